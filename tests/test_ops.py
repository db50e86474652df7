"""Does `ternary_linear` compute y = x W^T and its gradients, without ever writing W's gradient?"""

import pytest
import torch
from conftest import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bonsai_ft.format import Residual, TernaryWeight, num_groups, pack_codes, pack_signs
from bonsai_ft.ops import (
    choose_kernel,
    reference,
    ternary_linear,
    ternary_linear_backward,
)

CODEBOOKS = [(128, 4), (128, 16), (64, 4), (32, 16), (8, 16), (8, 256)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def name_of(value):
    if isinstance(value, torch.dtype):
        return f"dtype={str(value).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"d={value[0]},K={value[1]}"
    return None


def random_weight(
    out, width, *, packing="2bit", scale_group="128", codebook=(128, 4), seed=0
) -> TernaryWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = num_groups(width)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    signs = torch.randint(-1, 2, (out, width), generator=generator, dtype=torch.int8)
    residual = None
    if codebook is not None:
        dim, k = codebook
        codes = torch.randint(0, k, (out, -(-width // dim)), generator=generator)
        codewords = normal(groups, k, dim).half()
        codewords[-1, :, width - (groups - 1) * 128 :] = 0
        residual = Residual(
            codes=pack_codes(codes, k),
            codebook=codewords,
            mu=(0.1 * normal(groups)).half(),
            sigma=(0.5 * normal(groups).abs() + 0.1).half(),
        )
    weight = TernaryWeight(
        out_features=out,
        in_features=width,
        packing=packing,
        ternary=pack_signs(signs, packing),
        scale=(normal(out, groups if scale_group == "128" else 1).abs() + 0.1).half(),
        residual=residual,
    )
    weight.validate()
    return weight


def arguments(weight, x, codewords):
    codes = None if weight.residual is None else weight.residual.codes
    return (
        x,
        weight.ternary,
        weight.scale,
        codes,
        codewords,
        weight.in_features,
        weight.packing,
    )


def codewords_of(weight, dtype=torch.float32):
    return None if weight.residual is None else weight.residual.effective_codebook(dtype)


def dense_reference(weight, x, codewords, dy):
    """y, dx and dcodewords in float64: W is written out, and autograd does the rest."""
    x = x.detach().double().requires_grad_()
    dense = weight.dequantize(torch.float64, residual=False)
    if weight.residual is None:
        y = x @ dense.T
        return y.detach(), *torch.autograd.grad(y, [x], dy.double()), None
    codewords = codewords.detach().double().requires_grad_()
    dim = weight.residual.dim
    codes = weight.residual.indices(weight.in_features)
    rows = [codewords[s * dim // 128, codes[:, s]] for s in range(codes.shape[1])]
    y = x @ (dense + torch.cat(rows, dim=1)[:, : weight.in_features]).T
    return y.detach(), *torch.autograd.grad(y, [x, codewords], dy.double())


def check(weight, shape, dtype):
    """Forward and all gradients against the dense reference."""
    x = torch.randn(*shape, weight.in_features).to(dtype).requires_grad_()
    dy = torch.randn(*shape, weight.out_features).to(dtype)
    master = torch.float64 if dtype == torch.float64 else torch.float32
    codewords = codewords_of(weight, master)
    inputs = [x]
    if codewords is not None:
        inputs.append(codewords.requires_grad_())
    y = ternary_linear(*arguments(weight, x, codewords))
    gradients = torch.autograd.grad(y, inputs, dy)
    y_ref, dx_ref, dc_ref = dense_reference(weight, x, codewords, dy)
    assert y.dtype == dtype
    assert_close(y, y_ref, dtype, "y")
    assert gradients[0].dtype == dtype
    assert_close(gradients[0], dx_ref, dtype, "dx")
    if codewords is not None:
        assert gradients[1].dtype == master
        assert_close(gradients[1], dc_ref, dtype, "dcodewords")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("codebook", CODEBOOKS, ids=name_of)
@pytest.mark.parametrize("scale_group", ["128", "channel"])
@pytest.mark.parametrize("packing", ["2bit", "base3"])
@pytest.mark.parametrize("width", [64, 200, 576])
def test_forward_and_gradients_equal_the_dense_reference(
    width, packing, scale_group, codebook, dtype
):
    weight = random_weight(
        96, width, packing=packing, scale_group=scale_group, codebook=codebook, seed=width
    )
    for tokens in (1, 7, 63, 128):
        check(weight, (tokens,), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_a_weight_without_residual_is_signs_times_scales(packing, dtype):
    for width in (64, 200, 576):
        check(random_weight(96, width, packing=packing, codebook=None), (7,), dtype)


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_dimensions_are_kept(shape, codebook):
    check(random_weight(24, 200, codebook=codebook), shape, torch.float32)


@pytest.mark.parametrize("codebook", [(128, 4), (64, 4), (8, 16), None], ids=name_of)
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_an_empty_batch_has_an_empty_result_and_zero_codebook_gradients(shape, codebook):
    weight = random_weight(24, 200, codebook=codebook)
    x = torch.zeros(*shape, 200, requires_grad=True)
    codewords = codewords_of(weight)
    if codewords is not None:
        codewords.requires_grad_()
    y = ternary_linear(*arguments(weight, x, codewords))
    assert y.shape == (*shape, 24)
    y.sum().backward()
    assert x.grad.shape == x.shape
    if codewords is not None:
        assert torch.equal(codewords.grad, torch.zeros_like(codewords))


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
def test_strides_of_inputs_do_not_matter(codebook):
    weight = random_weight(24, 200, codebook=codebook)
    plain = torch.randn(6, 5, 200)
    strided = plain.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    dy = torch.randn(6, 5, 24)
    dy_strided = dy.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert not dy_strided.is_contiguous()
    results = []
    for x, gradient in ((plain, dy), (strided, dy_strided), (plain, dy[:1, :1].expand(6, 5, 24))):
        x = x.detach().requires_grad_()
        codewords = codewords_of(weight)
        y = ternary_linear(*arguments(weight, x, codewords))
        results.append((y, *torch.autograd.grad(y, [x], gradient)))
    assert_close(results[1][0], results[0][0], what="y")
    assert_close(results[1][1], results[0][1], what="dx")
    expected = dense_reference(weight, plain, codewords, dy[:1, :1].expand(6, 5, 24))[1]
    assert_close(results[2][1], expected, torch.float32, "dx of an expanded dy")


@pytest.mark.parametrize("packing", ["2bit", "base3"])
@pytest.mark.parametrize("codebook", [*CODEBOOKS, None], ids=name_of)
def test_gradcheck_passes_in_float64(codebook, packing):
    # 136 inputs: a whole group and a short one, whose last sub-vector is cut for d > 8
    weight = random_weight(3, 136, packing=packing, codebook=codebook)
    x = torch.randn(2, 136, dtype=torch.float64, requires_grad=True)
    if codebook is None:
        assert torch.autograd.gradcheck(
            lambda x: ternary_linear(*arguments(weight, x, None)), (x,), fast_mode=True
        )
        return
    codewords = codewords_of(weight, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, c: ternary_linear(*arguments(weight, x, c)), (x, codewords), fast_mode=True
    )


def test_gradcheck_passes_in_float64_entry_by_entry():
    weight = random_weight(3, 24, codebook=(8, 4))
    x = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    codewords = codewords_of(weight, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, c: ternary_linear(*arguments(weight, x, c)), (x, codewords)
    )


def opcheck(function, args):
    torch.library.opcheck(
        function,
        args,
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
def test_opcheck_passes(codebook, dtype, monkeypatch):
    # poison is for values; opcheck compares memory that no one has to write
    monkeypatch.undo()
    weight = random_weight(16, 200, codebook=codebook)
    x = torch.randn(2, 3, 200, dtype=dtype, requires_grad=True)
    codewords = codewords_of(weight)
    if codewords is not None:
        codewords.requires_grad_()
    opcheck(ternary_linear, arguments(weight, x, codewords))


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16), None], ids=name_of)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
def test_opcheck_of_the_backward_passes(codebook, needs, monkeypatch):
    monkeypatch.undo()
    weight = random_weight(16, 200, codebook=codebook)
    x, dy = torch.randn(2, 3, 200).transpose(0, 1), torch.randn(3, 2, 16)
    args = (dy, *arguments(weight, x, codewords_of(weight)), *needs)
    torch.library.opcheck(
        ternary_linear_backward, args, test_utils=("test_schema", "test_faketensor")
    )


def _step(weight, function):
    x = torch.linspace(-1, 1, 600).view(3, 200).requires_grad_()
    codewords = codewords_of(weight).requires_grad_()
    y = function(*arguments(weight, x, codewords))
    y.square().sum().backward()
    return y.detach(), x.grad, codewords.grad


def test_the_full_graph_compiles(monkeypatch):
    monkeypatch.undo()
    torch._dynamo.reset()
    weight = random_weight(16, 200)

    def layer(*args):
        return 2 * ternary_linear(*args) + 1

    eager = _step(weight, layer)
    compiled = _step(weight, torch.compile(layer, fullgraph=True, backend="aot_eager"))
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_the_full_graph_compiles_with_inductor(monkeypatch):
    monkeypatch.undo()
    torch._dynamo.reset()
    weight = random_weight(16, 200)
    eager = _step(weight, ternary_linear)
    compiled = _step(weight, torch.compile(ternary_linear, fullgraph=True))
    for one, other in zip(eager, compiled, strict=True):
        assert_close(one, other)


def test_shapes_are_known_on_the_meta_device():
    weight = random_weight(16, 200)
    args = [
        a.to("meta") if isinstance(a, torch.Tensor) else a
        for a in arguments(weight, torch.randn(2, 3, 200), codewords_of(weight))
    ]
    args[0].requires_grad_()
    args[4].requires_grad_()
    y = ternary_linear(*args)
    assert y.is_meta
    assert y.shape == (2, 3, 16)
    y.sum().backward()
    assert args[0].grad.shape == (2, 3, 200)
    assert args[4].grad.shape == args[4].shape


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16)], ids=name_of)
def test_only_packed_tensors_inputs_and_codewords_are_saved(codebook):
    weight = random_weight(96, 576, codebook=codebook)
    x = torch.randn(7, 576, requires_grad=True)
    codewords = codewords_of(weight).requires_grad_()
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ternary_linear(*arguments(weight, x, codewords))
    allowed = (x, weight.ternary, weight.scale, weight.residual.codes, codewords)
    places = {tensor.data_ptr() for tensor in allowed}
    assert len(saved) == len(allowed)
    assert all(tensor.data_ptr() in places for tensor in saved)


class Products(TorchDispatchMode):
    """Shapes of the results of all matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if any(word in str(function) for word in ("mm", "mul.", "einsum", "dot", "outer")):
            self.shapes.append((str(function), tuple(result.shape)))
        return result


@pytest.mark.parametrize("codebook", [*CODEBOOKS, None], ids=name_of)
def test_the_backward_makes_no_dense_weight_gradient(codebook):
    out, width = 96, 576
    weight = random_weight(out, width, codebook=codebook)
    x, dy = torch.randn(7, width), torch.randn(7, out)
    args = arguments(weight, x, codewords_of(weight))
    with Products() as spy:
        reference.backward(dy, *args, False, codebook is not None)
    assert codebook is None or spy.shapes
    for name, shape in spy.shapes:
        # one [out, 128] block at a time is what codebooks of short codewords take
        assert torch.Size(shape).numel() <= out * 128, f"{name} made {shape}"


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16)], ids=name_of)
def test_gradients_that_nobody_needs_are_not_made(codebook):
    weight = random_weight(16, 200, codebook=codebook)
    x, dy = torch.randn(3, 200), torch.randn(3, 16)
    args = arguments(weight, x, codewords_of(weight))
    dx, dcodewords = reference.backward(dy, *args, False, False)
    assert dx.numel() == dcodewords.numel() == 0
    y = ternary_linear(*arguments(weight, x.requires_grad_(), codewords_of(weight)))
    y.sum().backward()
    assert x.grad is not None


def test_a_small_residual_survives_bfloat16():
    # R of 1e-3 is a quarter of bfloat16's step at S = 1: rounded with S*T, all of it would be lost
    weight = random_weight(64, 256)
    weight.residual.sigma.fill_(1e-3)
    weight.residual.mu.zero_()
    weight.scale.fill_(1)
    x = torch.randn(512, 256).bfloat16()
    y = ternary_linear(*arguments(weight, x, codewords_of(weight))).double()
    of_signs = x.double() @ weight.dequantize(torch.float64, residual=False).T
    of_residual = x.double() @ weight.residual.dequantize(256, torch.float64).T
    kept = ((y - of_signs) * of_residual).sum() / of_residual.square().sum()
    assert abs(kept - 1) < 0.1


def test_a_known_kernel_is_chosen_and_an_unknown_one_is_refused():
    assert choose_kernel("reference") == "reference"
    assert choose_kernel("auto", "cpu") in ("cpu", "reference")
    assert choose_kernel("auto", "mps") == "reference"
    with pytest.raises(ValueError, match=r"kernel=fast is not known.*auto"):
        choose_kernel("fast")
    with pytest.raises(ValueError, match="kernel=cuda was asked for, but the model is on cpu"):
        choose_kernel("cuda", "cpu")
