"""Does a packed weight stand for the numbers it should, and is a wrong one refused?"""

import dataclasses

import pytest
import torch

from bonsai_ft.format.packing import pack_codes, pack_signs
from bonsai_ft.format.weight import Residual, TernaryWeight, num_groups, weight_layout

PACKINGS = ("2bit", "base3")


def parts(out, width, *, scale_group="128", dim=None, k=4, codebook_dtype=torch.float16, seed=0):
    """Unpacked signs, scale, codes, codebook, mu and sigma at random."""
    generator = torch.Generator().manual_seed(seed)
    groups = num_groups(width)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    signs = torch.randint(-1, 2, (out, width), generator=generator, dtype=torch.int8)
    scale = normal(out, groups if scale_group == "128" else 1).abs().half()
    if dim is None:
        return signs, scale, None
    codes = torch.randint(0, k, (out, -(-width // dim)), generator=generator)
    codebook = normal(groups, k, dim).to(codebook_dtype)
    codebook[-1, :, width - (groups - 1) * 128 :] = 0
    return signs, scale, (codes, codebook, normal(groups).half(), normal(groups).abs().half())


def weight_of(signs, scale, residual, packing="2bit"):
    if residual is not None:
        codes, codebook, mu, sigma = residual
        packed = pack_codes(codes, codebook.shape[1])
        residual = Residual(codes=packed, codebook=codebook, mu=mu, sigma=sigma)
    return TernaryWeight(
        out_features=signs.shape[0],
        in_features=signs.shape[1],
        packing=packing,
        ternary=pack_signs(signs, packing),
        scale=scale,
        residual=residual,
    )


def reference(signs, scale, residual):
    """W element by element, in float64, as the glossary of weight.py says it."""
    out, width = signs.shape
    weight = torch.empty(out, width, dtype=torch.float64)
    for o in range(out):
        for i in range(width):
            g = i // 128
            value = float(scale[o, g if scale.shape[1] > 1 else 0]) * int(signs[o, i])
            if residual is not None:
                codes, codebook, mu, sigma = residual
                dim = codebook.shape[2]
                codeword = codebook[g, codes[o, i // dim]]
                value += float(mu[g]) + float(sigma[g]) * float(codeword[i % dim])
            weight[o, i] = value
    return weight


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("scale_group", ["128", "channel"])
@pytest.mark.parametrize("width", [1, 7, 127, 128, 129, 300])
@pytest.mark.parametrize(("dim", "k"), [(None, 4), (128, 4), (32, 2), (8, 17), (1, 3), (128, 256)])
def test_dequantize_is_the_formula(packing, scale_group, width, dim, k):
    given = parts(3, width, scale_group=scale_group, dim=dim, k=k)
    weight = weight_of(*given, packing=packing)
    weight.validate()
    torch.testing.assert_close(weight.dequantize(torch.float64), reference(*given))
    torch.testing.assert_close(
        weight.dequantize(torch.float64, residual=False), reference(*given[:2], None)
    )
    assert torch.equal(weight.signs(), given[0])
    assert weight.expanded_scale().shape == (3, width)
    assert torch.equal(
        weight.expanded_scale(torch.float64) * weight.signs(),
        weight.dequantize(torch.float64, residual=False),
    )


def test_low_precision_is_float32_rounded_once():
    weight = weight_of(*parts(4, 300, dim=32))
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(weight.dequantize(dtype), weight.dequantize().to(dtype))


def test_gradients_reach_the_codebook():
    signs, scale, (codes, codebook, mu, sigma) = parts(4, 40, dim=8)
    codebook = codebook.double().requires_grad_()

    def dequantize(codebook):
        return weight_of(signs, scale, (codes, codebook, mu, sigma)).dequantize(torch.float64)

    assert torch.autograd.gradcheck(dequantize, (codebook,))


def test_bits_per_weight_count_every_tensor():
    weight = weight_of(*parts(256, 1024, dim=128))
    # 2 bits of sign, 16 of scale per 128, 2 of code per 128, codebook and moments shared by all.
    shared = 8 * (4 * 128 + 2) * 16 / (256 * 1024)
    assert weight.bits_per_weight == pytest.approx(2 + 16 / 128 + 2 / 128 + shared)
    assert weight.nbytes == sum(t.nbytes for t in weight.tensors().values())
    dense = weight_of(*parts(256, 1280), packing="base3")
    assert dense.bits_per_weight == pytest.approx(1.6 + 16 / 128)


def test_scale_group_is_read_from_the_shape():
    assert weight_of(*parts(2, 300)).scale_group == "128"
    assert weight_of(*parts(2, 300, scale_group="channel")).scale_group == "channel"


@pytest.mark.parametrize("dim", [None, 32])
def test_tensors_and_from_tensors_are_inverse(dim):
    weight = weight_of(*parts(4, 300, dim=dim))
    layout = weight_layout(out_features=4, in_features=300, packing="2bit", residual_dim=dim)
    tensors = weight.tensors()
    assert {s: (t.dtype, tuple(t.shape)) for s, t in tensors.items()} == layout
    again = TernaryWeight.from_tensors(tensors, out_features=4, in_features=300, packing="2bit")
    assert {s: t.data_ptr() for s, t in again.tensors().items()} == {
        s: t.data_ptr() for s, t in tensors.items()
    }


def test_from_tensors_names_what_is_missing_or_too_many():
    tensors = weight_of(*parts(4, 300, dim=32)).tensors()
    sizes = {"out_features": 4, "in_features": 300, "packing": "2bit"}
    for suffix in tensors:
        rest = {s: t for s, t in tensors.items() if s != suffix}
        with pytest.raises(ValueError, match=f"^{suffix}: the tensor is missing"):
            TernaryWeight.from_tensors(rest, **sizes)
    with pytest.raises(ValueError, match=r"^bias: "):
        TernaryWeight.from_tensors({**tensors, "bias": torch.zeros(4)}, **sizes)


def damaged(weight, suffix, change):
    """The weight with a changed copy of one tensor."""
    tensors = {s: t.clone() for s, t in weight.tensors().items()}
    tensors[suffix] = change(tensors[suffix])
    return TernaryWeight.from_tensors(
        tensors,
        out_features=weight.out_features,
        in_features=weight.in_features,
        packing=weight.packing,
    )


def setting(index, value):
    def change(tensor):
        tensor[index] = value
        return tensor

    return change


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("suffix", "change", "reason"),
    [
        ("ternary", setting((3, 2), 0b11), "code 3"),
        ("ternary", lambda t: t[:, :-1], "shape"),
        ("ternary", lambda t: t[:-1], "shape"),
        ("ternary", lambda t: t.to(torch.int8), "dtype"),
        ("scale", setting((1, 2), NAN), "NaN or infinite"),
        ("scale", setting((3, 0), INF), "NaN or infinite"),
        ("scale", setting((0, 0), -0.5), "-0.5"),
        ("scale", lambda t: t.float(), "dtype"),
        ("scale", lambda t: t[:, :2], "shape"),
        ("scale", lambda t: t[0], "shape"),
        ("codes", setting((0, 0), 0b00_00_11_00), "3 or more"),
        ("codes", setting((0, 2), 0b01_00_00_00), "unused bit"),
        ("codes", lambda t: t[:, :-1], "shape"),
        ("residual_codebook", setting((2, 0, 0), NAN), "NaN or infinite"),
        ("residual_codebook", lambda t: t.float(), "float16 or bfloat16"),
        ("residual_codebook", lambda t: t[..., :31], "must divide 128"),
        ("residual_codebook", lambda t: t[..., :0], "must divide 128"),
        ("residual_codebook", lambda t: t[:, :1], "2 to 256"),
        ("residual_codebook", lambda t: t[0], "shape"),
        ("residual_codebook", lambda t: t[:2], "shape"),
        ("residual_mu", setting(0, -INF), "NaN or infinite"),
        ("residual_mu", lambda t: t.bfloat16(), "dtype"),
        ("residual_sigma", setting(2, -1.0), "-1"),
        ("residual_sigma", setting(1, NAN), "NaN or infinite"),
        ("residual_sigma", lambda t: t[:2], "shape"),
    ],
)
def test_validate_refuses_and_names_the_tensor(suffix, change, reason):
    weight = weight_of(*parts(4, 300, dim=32, k=3))
    weight.validate()
    with pytest.raises(ValueError, match=f"^{suffix}: .*{reason}"):
        damaged(weight, suffix, change).validate()


def test_validate_refuses_a_base3_byte_above_242():
    weight = weight_of(*parts(4, 300), packing="base3")
    weight.validate()
    with pytest.raises(ValueError, match=r"^ternary: .*242"):
        damaged(weight, "ternary", setting((2, 7), 243)).validate()


def test_codebook_entries_beyond_the_last_input_must_be_zero():
    weight = weight_of(*parts(4, 576, dim=128))
    weight.validate()
    with pytest.raises(ValueError, match=r"^residual_codebook: the last group has 64 inputs"):
        damaged(weight, "residual_codebook", setting((4, 1, 64), 0.5)).validate()


@pytest.mark.parametrize("changes", [{"packing": "3bit"}, {"out_features": 0}, {"in_features": 0}])
def test_validate_refuses_impossible_sizes_and_packings(changes):
    weight = dataclasses.replace(weight_of(*parts(4, 300)), **changes)
    with pytest.raises(ValueError, match=r"^ternary: "):
        weight.validate()


def test_bfloat16_codebooks_are_allowed():
    weight_of(*parts(4, 300, dim=32, codebook_dtype=torch.bfloat16)).validate()
