"""Do the CUDA kernels compute y and all gradients, on a GPU and without one?

Without one, `cuda_shim` executes the same .cu files and the same Python on CPU tensors, in several
orders, with poisoned memory and forbidden pages around every buffer. On a machine with an NVIDIA
GPU every test runs there too (`-m cuda`).
"""

import shutil

import cuda_shim
import pytest
import torch
from conftest import assert_close
from test_ops import (
    CODEBOOKS,
    arguments,
    codewords_of,
    dense_reference,
    name_of,
    random_weight,
)
from torch.utils._python_dispatch import TorchDispatchMode

from bonsai_ft.ops import cuda_kernels, ternary_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [64, 200, 576, 130, 1]
TOKENS = [1, 2, 7, 8, 17, 63, 64, 65, 130]
RESIDUALS = [*CODEBOOKS, None]
# neither a multiple of the 16 or 32 rows of a block, nor less than one
ROWS = 40

HOST = cuda_shim.HostLauncher()

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def where_kernels_run():
    no_compiler = shutil.which(cuda_shim.COMPILER) is None
    no_gpu = not torch.cuda.is_available()
    return [
        pytest.param(
            "cpu",
            id="host",
            marks=pytest.mark.skipif(no_compiler, reason="the host shim needs g++"),
        ),
        pytest.param(
            "cuda",
            marks=[pytest.mark.cuda, pytest.mark.skipif(no_gpu, reason="there is no NVIDIA GPU")],
        ),
    ]


@pytest.fixture(params=where_kernels_run())
def device(request, monkeypatch) -> torch.device:
    """Where the kernels run: on the host shim, or on a GPU through NVRTC."""
    if request.param == "cpu":
        monkeypatch.setattr(cuda_kernels, "launcher", lambda: HOST)
        monkeypatch.setattr(HOST, "launched", [])
    return torch.device(request.param)


def moved(values, device):
    return tuple(v.to(device) if isinstance(v, torch.Tensor) else v for v in values)


def shifted(tensor, by):
    """The same values at an address `by` elements further on than allocations begin."""
    storage = tensor.new_empty(tensor.numel() + by)
    return storage[by:].view(tensor.shape).copy_(tensor)


def results(args, dy, has_residual=True):
    """y, dx and dcodewords (None without residual) of the CUDA kernels."""
    y = cuda_kernels.forward(*args)
    dx, dcodewords = cuda_kernels.backward(dy, *args, True, has_residual)
    return y, dx, dcodewords if has_residual else None


def check(device, weight, shape, dtype, by=0):
    """Forward and all gradients against the dense reference in float64, from shifted addresses."""
    x = torch.randn(*shape, weight.in_features).to(dtype)
    dy = torch.randn(*shape, weight.out_features).to(dtype)
    codewords = codewords_of(weight)
    args = moved(arguments(weight, x, codewords), device)
    if by:
        args = [shifted(v, by) if isinstance(v, torch.Tensor) else v for v in args]
    actual = results(args, dy.to(device), codewords is not None)
    expected = dense_reference(weight, x, codewords, dy)
    for name, one, other in zip(("y", "dx", "dcodewords"), actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == (torch.float32 if name == "dcodewords" else dtype)
            assert_close(one.cpu(), other, dtype, f"{name} of {list(shape)}")


def check_block(device, weight, dtype, rows=(0, None), columns=(0, None)):
    """A dequantised block against torch, bit by bit, padding included."""
    out, width = weight.out_features, weight.in_features
    rows, columns = slice(*rows).indices(out)[:2], slice(*columns).indices(width)[:2]
    x = torch.empty(0, width, dtype=dtype)
    codewords = codewords_of(weight)
    layer = cuda_kernels._layer(*moved(arguments(weight, x, codewords), device)[1:])
    dim = layer.dim
    subvectors = (columns[0] // dim, -(-columns[1] // dim)) if layer.uses_one_hot else (0, 0)
    block = cuda_kernels._dequantize(
        layer, x.to(device), rows=rows, columns=columns, subvectors=subvectors
    )
    dense = weight.dequantize(torch.float32, residual=not layer.uses_one_hot)
    parts = [dense[slice(*rows), slice(*columns)].to(dtype)]
    if layer.uses_one_hot:
        codes = weight.residual.indices(width)[slice(*rows), slice(*subvectors)]
        parts.append(torch.nn.functional.one_hot(codes, layer.k).flatten(1).to(dtype))
    padded = [torch.nn.functional.pad(part, (0, -part.shape[1] % 8)) for part in parts]
    assert torch.equal(block.cpu(), torch.cat(padded, dim=1))


def tokens_for(width, dtype):
    # one input has one gradient per token: a few of them may cancel to less than their rounding
    return TOKENS if width > 1 or dtype == torch.float32 else [63, 64, 65, 130]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("packing", ["2bit", "base3"])
@pytest.mark.parametrize("width", WIDTHS)
def test_forward_and_gradients_equal_the_dense_reference(device, width, packing, dtype):
    # every combination of two settings occurs, not every one of all; those are in the slow test
    tokens = tokens_for(width, dtype)
    for i, codebook in enumerate(RESIDUALS):
        weight = random_weight(
            ROWS,
            width,
            packing=packing,
            scale_group=("128", "channel")[(i + WIDTHS.index(width)) % 2],
            codebook=codebook,
            seed=i,
        )
        first = 2 * i + DTYPES.index(dtype) + 3 * (packing == "2bit") + width
        for j in range(2):
            check(device, weight, (tokens[(first + 5 * j) % len(tokens)],), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("codebook", RESIDUALS, ids=name_of)
@pytest.mark.parametrize("scale_group", ["128", "channel"])
@pytest.mark.parametrize("packing", ["2bit", "base3"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_combination_equals_the_dense_reference(
    device, width, packing, scale_group, codebook, dtype
):
    weight = random_weight(
        ROWS, width, packing=packing, scale_group=scale_group, codebook=codebook, seed=width
    )
    for tokens in tokens_for(width, dtype):
        check(device, weight, (tokens,), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("codebook", RESIDUALS, ids=name_of)
@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_a_block_is_the_weight_rounded_once(device, packing, codebook, dtype):
    for width, scale_group in ((456, "128"), (130, "channel"), (1, "128")):
        weight = random_weight(
            70, width, packing=packing, codebook=codebook, scale_group=scale_group
        )
        check_block(device, weight, dtype)
        check_block(device, weight, dtype, rows=(32, 67))
        if width > 128:
            check_block(device, weight, dtype, rows=(1, 2), columns=(128, None))
            check_block(device, weight, dtype, columns=(0, 128))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("codebook", RESIDUALS, ids=name_of)
def test_a_layer_of_many_blocks_equals_the_dense_reference(device, codebook, dtype, monkeypatch):
    # blocks of at most 128 rows, columns or codes; 300 rows and 456 inputs end within one
    monkeypatch.setattr(cuda_kernels, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(cuda_kernels, "ROWS_PER_SUM", 64)
    check(device, random_weight(300, 456, codebook=codebook, packing="base3"), (65,), dtype)


@pytest.mark.parametrize("rows", [1, 15, 16, 33])
@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_any_number_of_rows_will_do(device, packing, rows):
    for tokens in (3, 20, 70):
        check(device, random_weight(rows, 300, packing=packing), (tokens,), torch.float32)


@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_rows_of_many_groups_are_shared_out_among_warps(device, packing):
    # 37 groups: some of the 8 warps have five, in two rounds, and some have four
    weight = random_weight(17, 37 * 128 - 5, packing=packing, codebook=(32, 4))
    for tokens in (1, 9):
        check(device, weight, (tokens,), torch.bfloat16)


@pytest.mark.parametrize("k", [2, 3, 5, 100])
def test_any_number_of_codewords_will_do(device, k):
    for dim in (128, 16, 4):
        for tokens in (2, 66):
            check(device, random_weight(20, 150, codebook=(dim, k)), (tokens,), torch.float32)


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_codewords_shorter_than_a_chunk_will_do(device, dim):
    for tokens in (2, 18, 66):
        check(device, random_weight(20, 150, codebook=(dim, 2)), (tokens,), torch.float32)


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
@pytest.mark.parametrize("shape", [(), (2, 3), (2, 1, 40)], ids=str)
def test_leading_dimensions_are_kept(device, shape, codebook):
    check(device, random_weight(24, 200, codebook=codebook), shape, torch.float32)


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_an_empty_batch_has_an_empty_result_and_zero_codebook_gradients(device, shape, codebook):
    weight = random_weight(24, 200, codebook=codebook)
    x, dy = torch.zeros(*shape, 200, device=device), torch.zeros(*shape, 24, device=device)
    args = moved(arguments(weight, x, codewords_of(weight)), device)
    y, dx, dcodewords = results(args, dy, codebook is not None)
    assert y.shape == dy.shape
    assert dx.shape == x.shape
    if codebook is not None:
        assert torch.equal(dcodewords, torch.zeros_like(args[4]))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("packing", ["2bit", "base3"])
@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
def test_addresses_and_strides_do_not_matter(device, codebook, packing, dtype):
    weight = random_weight(ROWS, 384, packing=packing, codebook=codebook)
    for tokens in (5, 20, 70):
        x, dy = torch.randn(tokens, 384).to(dtype), torch.randn(tokens, ROWS).to(dtype)
        plain = moved(arguments(weight, x, codewords_of(weight)), device)
        dy = dy.to(device)
        expected = results(plain, dy, codebook is not None)
        odd = [shifted(v, 1) if isinstance(v, torch.Tensor) else v for v in plain]
        tilted = list(plain)
        tilted[0] = plain[0].T.contiguous().T
        # columns of a wider tensor, rows apart
        tilted[1] = torch.cat([plain[1], plain[1]], dim=1)[:, : plain[1].shape[1]]
        for args, gradient in ((odd, shifted(dy, 1)), (tilted, dy.T.contiguous().T)):
            actual = results(args, gradient, codebook is not None)
            for name, one, other in zip(("y", "dx", "dcodewords"), actual, expected, strict=True):
                if one is not None:
                    assert_close(one, other, dtype, name)
        if tokens <= cuda_kernels.FEW_TOKENS_SHORT_CODEWORDS:
            # no library product in between: the same bits
            assert torch.equal(cuda_kernels.forward(*odd), expected[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
def test_results_are_the_same_bits_every_time(device, codebook, dtype):
    weight = random_weight(ROWS, 328, codebook=codebook)
    for tokens in (1, 30, 100):
        x, dy = torch.randn(tokens, 328).to(dtype), torch.randn(tokens, ROWS).to(dtype)
        args = moved(arguments(weight, x, codewords_of(weight)), device)
        first = results(args, dy.to(device), codebook is not None)
        second = results(args, dy.to(device), codebook is not None)
        for one, other in zip(first, second, strict=True):
            assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("codebook", [(128, 4), (64, 4), None], ids=name_of)
def test_a_token_has_the_same_bits_alone_and_among_a_few(device, codebook, dtype):
    weight = random_weight(ROWS, 328, codebook=codebook)
    x = torch.randn(cuda_kernels.FEW_TOKENS, 328).to(dtype)
    args = moved(arguments(weight, x, codewords_of(weight)), device)
    y = cuda_kernels.forward(*args)
    for first, last in ((0, 1), (7, 8), (8, 20), (31, 64)):
        assert torch.equal(cuda_kernels.forward(args[0][first:last], *args[1:]), y[first:last])


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16)], ids=name_of)
@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
def test_gradients_that_nobody_needs_are_not_made(device, codebook, needs):
    weight = random_weight(16, 200, codebook=codebook)
    x, dy = torch.randn(3, 200), torch.randn(3, 16)
    args = moved(arguments(weight, x, codewords_of(weight)), device)
    dx, dcodewords = cuda_kernels.backward(dy.to(device), *args, *needs)
    expected = dense_reference(weight, x, codewords_of(weight), dy)
    for gradient, is_needed, other in zip((dx, dcodewords), needs, expected[1:], strict=True):
        if is_needed:
            assert_close(gradient.cpu(), other, torch.float32)
        else:
            assert gradient.numel() == 0


@pytest.mark.parametrize("tokens", [40, 512])
def test_a_small_residual_survives_bfloat16(device, tokens):
    # R of 1e-3 is a quarter of bfloat16's step at S = 1: rounded with S*T, all of it would be lost
    weight = random_weight(64, 256)
    weight.residual.sigma.fill_(1e-3)
    weight.residual.mu.zero_()
    weight.scale.fill_(1)
    x = torch.randn(tokens, 256).bfloat16()
    args = moved(arguments(weight, x, codewords_of(weight)), device)
    y = cuda_kernels.forward(*args).double().cpu()
    of_signs = x.double() @ weight.dequantize(torch.float64, residual=False).T
    of_residual = x.double() @ weight.residual.dequantize(256, torch.float64).T
    kept = ((y - of_signs) * of_residual).sum() / of_residual.square().sum()
    assert abs(kept - 1) < 0.1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
@pytest.mark.parametrize("kernel", ["auto", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_operator_uses_the_kernels_on_a_gpu(dtype, kernel):
    weight = random_weight(ROWS, 200)
    for tokens in (3, 70):
        x, dy = torch.randn(tokens, 200).to(dtype), torch.randn(tokens, ROWS).to(dtype)
        args = moved(arguments(weight, x, codewords_of(weight)), "cuda")
        args[0].requires_grad_()
        args[4].requires_grad_()
        y = ternary_linear(*args, kernel)
        gradients = torch.autograd.grad(y, [args[0], args[4]], dy.cuda())
        expected = dense_reference(weight, x, codewords_of(weight), dy)
        for one, other in zip((y, *gradients), expected, strict=True):
            assert_close(one.cpu(), other, dtype)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_layers_of_real_models_equal_the_dense_reference(packing):
    # more blocks than a GPU holds at once, and several blocks of W: too much work for the shim
    for out, width in ((11008, 4096), (2048, 11008)):
        weight = random_weight(out, width, packing=packing)
        for tokens in (1, 8, 64, 512):
            check(torch.device("cuda"), weight, (tokens,), torch.bfloat16)


class Sizes(TorchDispatchMode):
    """The most elements of any result of a torch function, and how many times each one ran."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        self.calls[name] = self.calls.get(name, 0) + 1
        if isinstance(result, torch.Tensor) and name != "new_empty_strided":
            self.largest = max(self.largest, result.numel())
        return result


def spied(function, *args):
    """Result sizes of torch's own functions; the shim's, within launches, do not count."""
    spy = Sizes()
    with spy:
        function(*args)
    return spy


class Silent:
    """A launcher that computes nothing: what is left is the torch side of a call."""

    def __init__(self):
        self.launched = []

    def launch(self, source, kernel, grid, block, arguments, device, shared_bytes=0):
        self.launched.append(kernel)


@pytest.mark.parametrize("codebook", RESIDUALS, ids=name_of)
def test_nothing_as_large_as_the_layer_is_made(codebook, monkeypatch):
    silent = Silent()
    monkeypatch.setattr(cuda_kernels, "launcher", lambda: silent)
    monkeypatch.setattr(cuda_kernels, "WORKSPACE_BYTES", 1 << 14)
    rows, width, tokens = 1024, 2048, 70
    weight = random_weight(rows, width, codebook=codebook)
    x, dy = torch.randn(tokens, width), torch.randn(tokens, rows)
    args = arguments(weight, x, codewords_of(weight))
    forward = spied(cuda_kernels.forward, *args)
    backward = spied(cuda_kernels.backward, dy, *args, True, codebook is not None)
    # the smallest blocks: 128 rows, 128 columns, 8 sub-vectors; and partial sums of 128 columns
    assert forward.largest <= 128 * (width + width // 8)
    smallest = 128 * max(rows, cuda_kernels.SUMS_PER_COLUMN)
    kept = 0 if weight.residual is None else weight.residual.codebook.numel()
    assert backward.largest <= max(smallest, tokens * width, kept)
    assert max(forward.largest, smallest) < rows * width // 4


@pytest.mark.parametrize(
    ("codebook", "tokens", "fused"),
    [
        (None, 64, True),
        (None, 65, False),
        ((128, 4), 64, True),
        ((128, 4), 65, False),
        ((8, 16), 16, True),
        ((8, 16), 17, False),
    ],
    ids=str,
)
def test_few_tokens_never_see_a_weight(codebook, tokens, fused, monkeypatch):
    silent = Silent()
    monkeypatch.setattr(cuda_kernels, "launcher", lambda: silent)
    weight = random_weight(16, 256, codebook=codebook)
    cuda_kernels.forward(*arguments(weight, torch.randn(tokens, 256), codewords_of(weight)))
    assert any("dequantize" in kernel for kernel in silent.launched) == (not fused)
    if fused:
        assert len(silent.launched) == 2


MUTANTS = [
    ("linear_small.cu", "  __syncthreads();\n  write_fragments", "  write_fragments"),
    (
        "linear_small.cu",
        "  __syncthreads();\n  for (int i = threadIdx.x",
        "  for (int i = threadIdx.x",
    ),
    ("linear_small.cu", "m < live && column < in_features", "column < in_features"),
    ("linear_small.cu", "m < live && column < in_features", "m < live"),
    ("linear_small.cu", "layer.out_features - 1);", "1 << 30);"),
    ("linear_small.cu", "if (token >= x.tokens || row >= layer.out_features) continue;", ""),
    ("linear_small.cu", "at_most(first + a * kWarps, layer.groups - 1)", "first + a * kWarps"),
    ("linear_small.cu", "at_most(blockIdx.y * N + n, x.tiles - 1)", "blockIdx.y * N + n"),
    ("linear_small.cu", "rest < per_group ? int(rest) : per_group", "per_group"),
    ("decode.cuh", "if (p + i < end) bytes", "bytes"),
    ("linear_small.cu", "at_most(column / 4, layer.ternary_bytes - 8)", "column / 4"),
    ("linear_small.cu", "is_aligned(layer.ternary, 8) && layer", "layer"),
    ("linear_small.cu", "&& layer.ternary_bytes % 8 == 0", ""),
    ("linear_small.cu", "if (group < layer.groups) {", "{"),
    ("linear_small.cu", "__uint_as_float(low_bits);\n", "0.0f;\n"),
    ("linear_small.cu", "total += sums.of[w][m][r]", "total += w < 7 ? sums.of[w][m][r] : 0"),
    ("decode.cuh", "word >= begin && word + 12 <= end", "word >= begin"),
    ("dequantize.cu", "r < block.rows ? r : block.rows - 1", "r"),
    ("dequantize.cu", "if (r >= block.rows) break;", ""),
    ("dequantize.cu", "(codes[i] & kept) | (0x5555u & ~kept)", "codes[i]"),
    ("dequantize.cu", "if (i >= valid) r[i] = 0.0f;", ""),
    ("dequantize.cu", "if (p + 2 < end)", "if (true)"),
    ("dequantize.cu", "p + 1 < end ? p[0] | u32(p[1]) << 8 : p[0]", "p[0] | u32(p[1]) << 8"),
    ("dequantize.cu", "if (is_aligned(word, 16)) {", "if (true) {"),
    ("codebook_gradient.cu", "r + i < last ? r + i : last - 1", "r + i"),
    ("codebook_gradient.cu", "if (r + i < last) own", "own"),
    ("codebook_gradient.cu", "  if (c < columns) {", "  {"),
    ("codebook_gradient.cu", "own[i * kWarp] = 0.0f;", ";"),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(cuda_shim.COMPILER) is None, reason="the host shim needs g++")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[1].strip()[:40]}")
def test_a_guard_that_is_taken_away_is_missed(mutant, tmp_path, monkeypatch):
    name, old, new = mutant
    for path in cuda_shim.KERNELS.iterdir():
        text = path.read_text(encoding="utf-8")
        if path.name == name:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    shim = cuda_shim.HostLauncher(tmp_path)
    monkeypatch.setattr(cuda_kernels, "launcher", lambda: shim)
    with pytest.raises(AssertionError):
        exercise(torch.device("cpu"))


def exercise(device):
    """A little of everything, at unlucky sizes and addresses."""
    for packing in ("2bit", "base3"):
        for codebook in ((128, 4), (8, 16), (4, 2), None):
            for width in (200, 160, 130, 1):
                weight = random_weight(37, width, packing=packing, codebook=codebook)
                check_block(device, weight, torch.float32)
                for tokens in (3, 9, 17, 70):
                    check(device, weight, (tokens,), torch.float32, by=tokens % 2)
