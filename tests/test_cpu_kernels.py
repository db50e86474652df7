"""Do the compiled CPU kernels compute what float64 does, inside their memory, always the same?"""

import copy
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from conftest import assert_close, rms_ratio
from test_ops import arguments, codewords_of, dense_reference, name_of, random_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from bonsai_ft.model import TernaryLinear
from bonsai_ft.ops import choose_kernel, cpu_kernels, ternary_linear
from bonsai_ft.ops.cpu_kernels import few_tokens, library

CODEBOOKS = [(128, 4), (128, 16), (64, 4), (32, 16), (16, 2), (8, 16), (8, 256), None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=["scalar", "avx2", "avx512", "neon"])
def instructions(request):
    """Every instruction set that this processor has, in turn."""
    functions = library().functions
    if functions.bonsai_choose_isa(request.param.encode()) is None:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    functions.bonsai_choose_isa(b"auto")


def run(weight, x, dy, codewords, kernel="cpu"):
    x = x.detach().requires_grad_()
    inputs = [x]
    if codewords is not None:
        codewords = codewords.detach().requires_grad_()
        inputs.append(codewords)
    y = ternary_linear(*arguments(weight, x, codewords), kernel)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def check(weight, tokens, dtype):
    """y, dx and dcodewords against float64.

    A sum that cancels has no relative accuracy of its own: what its terms' sizes allow counts.
    """
    x = torch.randn(tokens, weight.in_features).to(dtype)
    dy = torch.randn(tokens, weight.out_features).to(dtype)
    codewords = codewords_of(weight)
    results = run(weight, x, dy, codewords)
    expected = dense_reference(weight, x, codewords, dy)
    sizes = dense_reference(
        _without_signs(weight), x.abs(), None if codewords is None else codewords.abs(), dy.abs()
    )
    terms = {
        "y": weight.in_features,
        "dx": weight.out_features,
        "dcodewords": tokens * weight.out_features,
    }
    for what, one, exact, size in zip(terms, results, expected, sizes, strict=False):
        error = (one.double() - exact).square().mean().sqrt()
        # n terms of random sign add up to about the square root of n
        typical = size.square().mean().sqrt() / terms[what] ** 0.5
        scale = torch.maximum(exact.square().mean().sqrt(), typical)
        assert error <= LIMITS[dtype] * scale, (what, tokens, (error / scale).item())


def _without_signs(weight):
    positive = copy.deepcopy(weight)
    # every code becomes +1
    positive.ternary.fill_(0xAA if weight.packing == "2bit" else 242)
    return positive


SHAPES = [
    (1, 24),
    (3, 5),
    (64, 1),
    (127, 24),
    (130, 97),
    (200, 5),
    (576, 24),
    (1030, 97),
    (1030, 1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_every_instruction_set_agrees_with_float64(instructions, packing, codebook, dtype):
    weight = random_weight(24, 200, packing=packing, codebook=codebook)
    for tokens in (1, 3, few_tokens(dtype), few_tokens(dtype) + 1):
        check(weight, tokens, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("codebook", CODEBOOKS, ids=name_of)
@pytest.mark.parametrize("scale_group", ["128", "channel"])
@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_every_shape_agrees_with_float64(instructions, packing, scale_group, codebook, dtype):
    for width, out in SHAPES:
        weight = random_weight(
            out, width, packing=packing, scale_group=scale_group, codebook=codebook, seed=width
        )
        for tokens in (1, 2, 7, few_tokens(dtype), 32, 33, 70):
            check(weight, tokens, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("tokens", [1, 5, 40, 100])
def test_threads_and_repetition_do_not_change_a_bit(instructions, tokens, dtype):
    weight = random_weight(97, 1030)
    x, dy = torch.randn(tokens, 1030).to(dtype), torch.randn(tokens, 97).to(dtype)
    codewords = codewords_of(weight)
    before = torch.get_num_threads()
    few = tokens <= few_tokens(dtype)
    try:
        torch.set_num_threads(1)
        first = run(weight, x, dy, codewords)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            again = run(weight, x, dy, codewords)
            # with many tokens the sums are the library's, which may split them by threads
            for one, other in zip(first, again, strict=True):
                if threads == 1:
                    assert torch.equal(one, other)
                else:
                    assert_close(one, other, dtype)
            if few:
                assert torch.equal(first[0], again[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_what_is_not_finite_reaches_its_token_and_no_other(instructions, value, dtype, tokens):
    weight = random_weight(24, 300)
    codewords = codewords_of(weight)
    x, dy = torch.randn(tokens, 300).to(dtype), torch.randn(tokens, 24).to(dtype)
    others = torch.arange(tokens) != 1
    clean = run(weight, x, dy, codewords)
    x[1, 140] = value
    y = run(weight, x, dy, codewords)[0]
    # a sign of 0 does not hide it: 0 times infinity is a NaN
    assert not y[1].isfinite().any()
    assert torch.equal(y[others], clean[0][others])
    dy[1, 5] = value
    dx = run(weight, clean[1], dy, codewords)[1]
    assert not dx[1].isfinite().any()
    assert torch.equal(dx[others], clean[1][others])


CHANGES = {
    "an outlier": lambda x: x.index_fill_(1, torch.tensor([7]), 1e4),
    "an outlier per group": lambda x: x.index_fill_(1, torch.arange(7, 512, 128), 1e4),
    "zeros": lambda x: x.zero_(),
    "groups of zeros": lambda x: x[:, :256].zero_(),
    "tiny": lambda x: x.mul_(1e-20),
    "large": lambda x: x.mul_(1e30),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("change", CHANGES)
def test_outliers_zeros_and_extreme_sizes_stay_accurate(instructions, change, dtype):
    weight = random_weight(32, 512)
    for tokens in (2, 70):
        x = torch.randn(tokens, 512)
        CHANGES[change](x)
        x = x.to(dtype)
        codewords = codewords_of(weight)
        y = ternary_linear(*arguments(weight, x, codewords), "cpu")
        expected = dense_reference(weight, x, codewords, torch.ones(tokens, 32))[0]
        assert rms_ratio(y, expected) <= LIMITS[dtype], tokens
        assert y.any() == expected.any()


@pytest.mark.parametrize("tokens", [2, 70])
def test_float16_overflows_and_underflows_like_the_reference(instructions, tokens):
    weight = random_weight(32, 512)
    codewords = codewords_of(weight)
    for factor in (1e-6, 1e3):
        x = (factor * torch.randn(tokens, 512)).half()
        y = ternary_linear(*arguments(weight, x, codewords), "cpu")
        exact = dense_reference(weight, x, codewords, torch.ones(tokens, 32))[0].half()
        is_large = exact.isinf()
        # close to the largest number either may be infinite
        is_clear = is_large | (exact.abs() < 6e4)
        assert torch.equal(y.isinf() & is_clear, is_large) or not is_large.any()
        # half a step of the smallest numbers, 2^-24
        error = (y.double() - exact.double())[~is_large & is_clear].abs()
        assert (error <= 2**-24 + 1e-2 * exact.double().abs()[~is_large & is_clear]).all()


@pytest.mark.parametrize("tokens", [3, 100])
def test_strided_and_shifted_inputs_give_the_same(tokens):
    weight = random_weight(24, 200)
    plain = torch.randn(tokens, 200)
    wide = torch.zeros(tokens, 210)
    wide[:, 5:205] = plain
    expected = ternary_linear(*arguments(weight, plain, codewords_of(weight)), "cpu")
    for x in (wide[:, 5:205], plain.T.contiguous().T):
        y = ternary_linear(*arguments(weight, x, codewords_of(weight)), "cpu")
        assert_close(y, expected)


GUARDED = """
    import ctypes, mmap, sys
    import torch
    sys.path.insert(0, {tests!r})
    from test_ops import random_weight, codewords_of
    from bonsai_ft.ops import cpu_kernels
    from bonsai_ft.ops.cpu_kernels import DTYPES, layer_of, library

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    PAGE = mmap.PAGESIZE
    kept = []
    # the last two end one byte before a register does
    SHAPES = ((5, 1), (7, 66), (3, 130), (9, 200), (6, 576), (4, 1030), (3, 124), (2, 252))

    def guarded(tensor, at_end):
        # between two pages that nobody may touch
        size = tensor.numel() * tensor.element_size()
        pages = max(1, -(-size // PAGE))
        area = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        offset = PAGE + (pages * PAGE - size if at_end else 0)
        copy = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        copy = copy.view(tensor.shape)
        copy.copy_(tensor)
        for page in (start, start + (pages + 1) * PAGE):
            assert libc.mprotect(page, PAGE, 0) == 0
        kept.append(area)
        return copy

    lib = library().functions
    assert lib.bonsai_choose_isa({isa!r}.encode())
    extra = {extra}
    for at_end in (True, False):
        for out, width in SHAPES:
            for packing in ("2bit", "base3"):
                for codebook in ((128, 4), (32, 16), (8, 256), None):
                    weight = random_weight(out, width, packing=packing, codebook=codebook)
                    words = codewords_of(weight)
                    codes = None if words is None else guarded(weight.residual.codes, at_end)
                    words = None if words is None else guarded(words, at_end)
                    layer, held = layer_of(
                        guarded(weight.ternary, at_end), guarded(weight.scale, at_end), codes,
                        words, width + extra, packing,
                    )
                    for dtype, code in DTYPES.items():
                        for first in (0, 1):
                            block = torch.zeros(out - first, width, dtype=dtype)
                            block = guarded(block, at_end)
                            for added in range(1 + (words is not None)):
                                lib.bonsai_unpack(layer, first, out, 0, width, added, code,
                                                  block.data_ptr(), width, 1)
                                if width > 128:
                                    part = torch.zeros(out - first, width - 128, dtype=dtype)
                                    part = guarded(part, at_end)
                                    lib.bonsai_unpack(layer, first, out, 128, width, added, code,
                                                      part.data_ptr(), width - 128, 1)
                            if words is not None:
                                _, k, dim = words.shape
                                count = -(-width // dim)
                                begin = min(first, count - 1)
                                z = torch.zeros(out - first, (count - begin) * k, dtype=dtype)
                                z = guarded(z, at_end)
                                lib.bonsai_one_hot(layer, first, out, begin, count, code,
                                                   z.data_ptr(), (count - begin) * k, 1)
                        for tokens in (1, 3):
                            x = guarded(torch.randn(tokens, width).to(dtype), at_end)
                            y = guarded(torch.zeros(tokens, out, dtype=dtype), at_end)
                            at, to = x.data_ptr(), y.data_ptr()
                            size = lib.bonsai_few_workspace(layer, tokens, code, 2)
                            memory = guarded(torch.zeros(size, dtype=torch.uint8), at_end)
                            lib.bonsai_linear_few(layer, code, at, width, to, out, tokens,
                                                  memory.data_ptr(), 2)
                            if words is None:
                                continue
                            count = -(-width // words.shape[2]) * words.shape[1]
                            p = guarded(torch.zeros(tokens, count, dtype=dtype), at_end)
                            lib.bonsai_codeword_products(layer, code, at, width, tokens,
                                                         p.data_ptr(), count, 2)
                            d = guarded(torch.zeros(words.shape), at_end)
                            lib.bonsai_codeword_gradient(layer, code, p.data_ptr(), count, at,
                                                         width, tokens, d.data_ptr(), 2)
    print("whole")
"""


def guarded_run(isa, extra):
    code = textwrap.dedent(GUARDED).format(tests=str(Path(__file__).parent), isa=isa, extra=extra)
    # threads that wait must not take a processor from those that work
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as on Linux")
def test_no_kernel_touches_memory_outside_its_tensors(instructions):
    done = guarded_run(instructions, 0)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "whole" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as on Linux")
def test_the_guard_notices_a_kernel_that_does():
    assert guarded_run("scalar", 4096).returncode < 0


def test_the_operators_layer_behaves_under_torchs_tools(monkeypatch):
    monkeypatch.undo()
    weight = random_weight(24, 200)
    layer = TernaryLinear(weight)
    layer.kernel = "cpu"
    x = torch.randn(2, 3, 200, requires_grad=True)
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
    again = checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(again, expected)
    for one, other in zip(
        torch.autograd.grad(again.sum(), [x, layer.residual_codebook]),
        torch.autograd.grad(expected.sum(), [x, layer.residual_codebook]),
        strict=True,
    ):
        assert torch.equal(one, other)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    args = arguments(weight, x, codewords_of(weight).requires_grad_())
    torch.library.opcheck(ternary_linear, (*args, "cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.inference_mode():
        layer(x.detach())
    layer(x).sum().backward()


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (2, 0, 3)], ids=str)
def test_an_empty_batch_has_an_empty_result_and_zero_codebook_gradients(shape, codebook):
    weight = random_weight(24, 200, codebook=codebook)
    codewords = codewords_of(weight)
    for dtype in DTYPES:
        x, dy = torch.zeros(*shape, 200, dtype=dtype), torch.zeros(*shape, 24, dtype=dtype)
        y, dx, *dcodewords = run(weight, x, dy, codewords)
        assert y.shape == dy.shape
        assert dx.shape == x.shape
        for gradient in dcodewords:
            assert torch.equal(gradient, torch.zeros_like(codewords))


def in_new_threads(count, function):
    """Runs `function(i)` in threads that have no workspace yet; raises what one of them raised."""
    errors = []

    def body(i):
        try:
            function(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("tokens", [3, 70])
def test_a_thread_may_train_after_inference_mode(tokens):
    weight = random_weight(24, 200)
    x, dy, codewords = torch.randn(tokens, 200), torch.randn(tokens, 24), codewords_of(weight)
    expected = run(weight, x, dy, codewords)

    def infer_then_train(_):
        with torch.inference_mode():
            y = ternary_linear(*arguments(weight, x, codewords), "cpu")
        assert torch.equal(y, expected[0])
        for one, other in zip(run(weight, x, dy, codewords), expected, strict=True):
            assert torch.equal(one, other)

    in_new_threads(1, infer_then_train)


def test_two_threads_at_once_do_not_disturb_each_other():
    cases = []
    for i, (width, tokens) in enumerate([(1030, 3), (576, 70)]):
        weight = random_weight(97, width, packing=("2bit", "base3")[i], seed=i)
        case = (weight, torch.randn(tokens, width), torch.randn(tokens, 97), codewords_of(weight))
        cases.append((case, run(*case)))

    def repeat(i):
        case, expected = cases[i]
        for _ in range(50):
            for one, other in zip(run(*case), expected, strict=True):
                assert torch.equal(one, other)

    in_new_threads(2, repeat)


class LargestResult(TorchDispatchMode):
    """Bytes of the largest memory that an operation's result lies in."""

    def __init__(self):
        super().__init__()
        self.bytes, self.name = 0, ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                size = tensor.untyped_storage().nbytes()
                if size > self.bytes:
                    self.bytes, self.name = size, str(function)
        return result


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
def test_no_memory_of_a_layers_size_is_taken(codebook):
    size = 2048
    weight = random_weight(size, size, codebook=codebook)
    x, dy = torch.randn(128, size).bfloat16(), torch.randn(128, size).bfloat16()
    args = arguments(weight, x, codewords_of(weight))
    seen = LargestResult()

    def step(_):
        with seen:
            cpu_kernels.forward(*args)
            cpu_kernels.backward(dy, *args, True, codebook is not None)

    in_new_threads(1, step)
    # the workspace is seen, and is half a layer in bfloat16 at most
    assert x.nbytes < seen.bytes <= size * size * 2 // 2, (seen.name, seen.bytes)


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("codebook", [(128, 4), (8, 16)], ids=name_of)
def test_only_packed_tensors_inputs_and_codewords_are_saved(codebook, tokens):
    weight = random_weight(96, 576, codebook=codebook)
    x = torch.randn(tokens, 576, requires_grad=True)
    codewords = codewords_of(weight).requires_grad_()
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ternary_linear(*arguments(weight, x, codewords), "cpu")
    allowed = (x, weight.ternary, weight.scale, weight.residual.codes, codewords)
    places = {tensor.data_ptr() for tensor in allowed}
    assert len(saved) == len(allowed)
    assert all(tensor.data_ptr() in places for tensor in saved)


def test_float64_belongs_to_the_reference():
    weight = random_weight(24, 200)
    x = torch.randn(2, 200, dtype=torch.float64)
    words = codewords_of(weight, torch.float64)
    with pytest.raises(ValueError, match="kernel=cpu computes in float32, bfloat16 and float16"):
        ternary_linear(*arguments(weight, x, words), "cpu")
    assert ternary_linear(*arguments(weight, x, words), "auto").dtype == torch.float64
    assert choose_kernel("cpu") == "cpu"


def test_fifty_training_steps_are_those_of_the_reference(tiny_base):
    from bonsai_ft.adapter import TernaryLoraConfig, attach, linear_names
    from bonsai_ft.api import load_model
    from bonsai_ft.data.batches import Batch
    from bonsai_ft.train.loss import sum_loss

    base = tiny_base("llama")
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), [])

    def losses(kernel, dtype):
        torch.manual_seed(0)
        model = load_model(base, dtype=dtype, kernel=kernel)
        attach(model, TernaryLoraConfig(r=4, target_modules=linear_names(model)))
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=3e-3)
        seen = []
        for _ in range(50):
            loss = sum_loss(model, batch) / 46
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return torch.tensor(seen)

    ours, theirs = losses("cpu", torch.float32), losses("reference", torch.float32)
    assert theirs[-1] < theirs[0] - 1
    assert (ours - theirs).abs().max() < 1e-5
    ours, theirs = losses("cpu", torch.bfloat16), losses("reference", torch.bfloat16)
    # one rounding to bfloat16 is 0.4%
    assert (ours / theirs - 1).abs().max() < 0.02
