"""Does a packed layer behave like a layer: moving, copying, saving, casting, training?"""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from test_ops import CODEBOOKS, name_of, random_weight

from bonsai_ft.model import TernaryLinear, decode_weight

STORED = ("ternary", "scale", "codes", "residual_mu", "residual_sigma")


def layer_of(out=24, width=200, bias=True, **options) -> TernaryLinear:
    return TernaryLinear(random_weight(out, width, **options), torch.randn(out) if bias else None)


def bytes_of(layer):
    return {name: value.clone() for name, value in layer.state_dict().items()}


def assert_same_bytes(one, other, names=None):
    for name in one if names is None else names:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("packing", ["2bit", "base3"])
@pytest.mark.parametrize("codebook", [*CODEBOOKS, None], ids=name_of)
def test_a_layer_equals_linear_with_the_decoded_weight(codebook, packing, bias):
    layer = layer_of(codebook=codebook, packing=packing, bias=bias)
    x = torch.randn(2, 5, 200)
    expected = F.linear(
        x.double(), decode_weight(layer, torch.float64), None if not bias else layer.bias.double()
    )
    assert_close(layer(x), expected, torch.float32)


def test_decoding_rounds_to_the_dtype_asked_for():
    layer = layer_of()
    assert decode_weight(layer).dtype == torch.float32
    low = decode_weight(layer, torch.bfloat16)
    assert torch.equal(low, decode_weight(layer).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=name_of)
def test_changing_the_dtype_touches_the_bias_alone(dtype):
    layer = layer_of()
    before = bytes_of(layer)
    assert layer.to(dtype) is layer
    after = bytes_of(layer)
    assert layer.bias.dtype == dtype
    assert layer.residual_codebook.dtype == torch.float32
    assert_same_bytes(before, after, [*STORED, "residual_codebook"])
    assert layer(torch.randn(3, 200, dtype=dtype)).dtype == dtype


def test_half_and_float_give_the_layer_back():
    layer = layer_of()
    x = torch.randn(3, 200)
    with torch.no_grad():
        layer.bias.copy_(layer.bias.half())
    before = layer(x)
    layer.half()
    assert layer.bias.dtype == torch.float16
    layer.float()
    assert torch.equal(layer(x), before)


def test_a_gradient_in_place_does_not_hinder_a_change_of_dtype():
    layer = layer_of()
    layer.bias.requires_grad_()
    layer(torch.randn(3, 200)).sum().backward()
    layer.to(torch.bfloat16)
    assert layer.bias.grad.dtype == torch.bfloat16
    assert layer.residual_codebook.grad.dtype == torch.float32


def test_what_is_trainable_stays_trainable_when_moved():
    layer = layer_of().to(torch.bfloat16)
    trainable = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trainable == {"residual_codebook"}


@pytest.mark.parametrize("options", [{}, {"codebook": None}], ids=["residual", "no residual"])
def test_the_meta_device_keeps_shapes_and_dtypes(options):
    layer = layer_of(**options)
    specs = {name: (t.shape, t.dtype) for name, t in layer.state_dict().items()}
    layer.to("meta")
    assert all(t.is_meta for t in layer.state_dict().values())
    assert {name: (t.shape, t.dtype) for name, t in layer.state_dict().items()} == specs
    assert layer(torch.randn(3, 200, device="meta")).shape == (3, 24)
    layer.to_empty(device="cpu")
    assert {name: (t.shape, t.dtype) for name, t in layer.state_dict().items()} == specs


@pytest.mark.parametrize("options", [{}, {"codebook": None}], ids=["residual", "no residual"])
def test_a_deep_copy_is_equal_and_separate(options):
    layer = layer_of(**options)
    twin = copy.deepcopy(layer)
    assert_same_bytes(bytes_of(layer), bytes_of(twin))
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert one.data_ptr() != other.data_ptr()
        assert one.requires_grad == other.requires_grad
    x = torch.randn(3, 200)
    assert torch.equal(layer(x), twin(x))


@pytest.mark.parametrize("options", [{}, {"codebook": None}], ids=["residual", "no residual"])
def test_a_state_dict_goes_around_strictly(options):
    layer = layer_of(seed=0, **options)
    other = layer_of(seed=1, **options)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    assert_same_bytes(bytes_of(layer), bytes_of(other))
    x = torch.randn(3, 200)
    assert torch.equal(layer(x), other(x))


def test_a_pickle_gives_the_layer_back():
    layer = layer_of(packing="base3")
    twin = pickle.loads(pickle.dumps(layer))
    assert_same_bytes(bytes_of(layer), bytes_of(twin))
    x = torch.randn(3, 200)
    assert torch.equal(layer(x), twin(x))
    assert repr(layer) == repr(twin)


def test_a_layer_can_be_shared_between_processes():
    layer = layer_of()
    before = bytes_of(layer)
    layer.share_memory()
    assert all(t.is_shared() for t in layer.state_dict().values())
    assert_same_bytes(before, bytes_of(layer))


def test_names_let_users_freeze_by_name():
    names = {name for name, _ in layer_of().named_parameters()}
    assert names == {"ternary", "scale", "codes", "residual_codebook", "bias"}


def test_the_representation_says_what_is_inside():
    assert "K=4, d=128" in repr(layer_of())
    assert "residual: none" in repr(layer_of(codebook=None))


def test_packing_a_layer_gives_its_weight_back():
    weight = random_weight(24, 200, packing="base3")
    packed = TernaryLinear(weight).packed()
    packed.validate()
    assert_same_bytes(weight.tensors(), packed.tensors())


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16)], ids=name_of)
def test_the_forward_uses_the_codebook_as_it_will_be_stored(codebook):
    layer = layer_of(codebook=codebook)
    with torch.no_grad():
        layer.residual_codebook.add_(1e-5 * torch.randn_like(layer.residual_codebook))
    stored = layer.residual_codebook.half().float()
    assert not torch.equal(stored, layer.residual_codebook)
    x = torch.randn(3, 200)
    assert torch.equal(layer(x), layer(x, codebook=stored))
    # what is written to a file is what was used
    reloaded = TernaryLinear(layer.packed(), layer.bias.detach())
    assert torch.equal(layer(x), reloaded(x))


@pytest.mark.parametrize("codebook", [(128, 4), (8, 16)], ids=name_of)
def test_the_gradient_passes_straight_through_the_rounding(codebook):
    layer = layer_of(codebook=codebook)
    with torch.no_grad():
        layer.residual_codebook.add_(1e-5 * torch.randn_like(layer.residual_codebook))
    x, dy = torch.randn(7, 200), torch.randn(7, 24)
    layer(x).backward(dy)
    rounded = layer.residual_codebook.detach().half().float().requires_grad_()
    layer(x, codebook=rounded).backward(dy)
    assert torch.equal(layer.residual_codebook.grad, rounded.grad)
    assert rounded.grad.abs().max() > 0
    assert layer.residual_codebook.grad.dtype == torch.float32


def test_a_step_too_small_for_the_file_is_not_forgotten():
    layer = layer_of()
    before = layer.residual_codebook.detach().clone()
    with torch.no_grad():
        for _ in range(64):
            layer.residual_codebook.mul_(1 + 1e-4)
    rounded = layer.packed().residual.codebook
    assert not torch.equal(rounded, before.half())


def test_a_layer_takes_the_dtype_of_autocast():
    layer = layer_of(64, 192)
    x = torch.randn(5, 192, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, layer(x), torch.bfloat16)
    y.float().sum().backward()
    assert x.grad.dtype == layer.residual_codebook.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone_as_it_does_for_linear():
    layer = layer_of(64, 192)
    x = torch.randn(5, 192, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.nn.Linear(192, 64).double()(x).dtype == torch.float64


def test_the_whole_layer_compiles_as_one_graph():
    torch._dynamo.reset()
    layer = layer_of()
    x = torch.randn(3, 200)
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert layer.residual_codebook.grad is not None


@pytest.mark.slow
def test_inductor_keeps_the_rounding_of_the_codebook():
    """It would leave out a cast to float16 and back, and forward would see unrounded codewords."""
    layer = layer_of(codebook=(128, 4))
    with torch.no_grad():
        layer.residual_codebook.mul_(1 + 2**-12)
    compiled = torch.compile(layer.codewords, fullgraph=True)
    assert torch.equal(compiled(), layer.codewords())
    assert not torch.equal(layer.residual_codebook.half().float(), layer.residual_codebook)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("shape", [(4, 100), (3, 400), (200, 1), ()], ids=str)
def test_inputs_of_another_width_are_refused(shape, kernel):
    layer = layer_of()
    layer.kernel = kernel
    with pytest.raises(ValueError, match=r"x has shape .*, but the layer has 200 inputs"):
        layer(torch.ones(shape))


def test_compiled_kernels_refuse_packed_tensors_of_another_dtype():
    layer = layer_of()
    layer.kernel = "cpu"
    layer.scale = torch.nn.Parameter(layer.scale.float(), requires_grad=False)
    with pytest.raises(ValueError, match=r"scale is torch.float32; compiled kernels read"):
        layer(torch.ones(2, 200))
