"""Are signs and scales the best there are, and exact where nothing need be lost?"""

from itertools import product

import pytest
import torch
from torch import Tensor

from bonsai_ft.format.packing import GROUP
from bonsai_ft.quantize import ternary
from bonsai_ft.quantize.ternary import (
    TernaryFit,
    calibrate_threshold,
    exact_ternary,
    fit_optimal,
    fit_paper,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def weighted_error(weight: Tensor, fit: TernaryFit, importance: Tensor | None = None) -> float:
    h = torch.ones(weight.shape[1]) if importance is None else importance
    return float(((weight.double() - fit.dequantize().double()).square() * h.double()).sum())


def relative_error(weight: Tensor, fit: TernaryFit) -> float:
    return weighted_error(weight, fit) / float(weight.double().square().sum())


def random_ternary(in_features: int, scale_group: str, dtype: torch.dtype) -> Tensor:
    signs = torch.randint(-1, 2, (5, in_features), generator=torch.Generator().manual_seed(1))
    groups = -(-in_features // GROUP) if scale_group == "128" else 1
    scale = (uniform(5, groups, seed=2) + 0.5).bfloat16()
    wide = scale.repeat_interleave(GROUP if groups > 1 else in_features, dim=1)
    return (signs * wide[:, :in_features]).to(dtype)


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("seed", range(5))
def test_optimal_fit_equals_search_over_all_sign_vectors(seed: int, is_weighted: bool) -> None:
    weight = normal(3, 7, seed=seed)
    importance = uniform(7, seed=seed + 100) if is_weighted else None
    fit = fit_optimal(weight, importance=importance)
    h = torch.ones(7).double() if importance is None else importance.double()
    signs = torch.tensor(list(product((-1.0, 0.0, 1.0), repeat=7))).double()
    for row, values in enumerate(weight.double()):
        mass = (signs.square() * h).sum(1).clamp_min(1e-300)
        best = ((h * values.square()).sum() - (signs * values * h).sum(1).square() / mass).min()
        error = (h * (values - fit.dequantize()[row].double()).square()).sum()
        rounding = h.sum() * (float(fit.scale[row]) * 2.0**-10) ** 2
        assert best - 1e-12 <= error <= best + rounding


@pytest.mark.parametrize("scale_group", ["128", "channel"])
def test_optimal_fit_equals_search_over_all_thresholds(scale_group: str) -> None:
    weight, importance = normal(4, 192), uniform(192)
    fit = fit_optimal(weight, importance=importance, scale_group=scale_group)
    best = rounding = 0.0
    for part in (slice(0, 128), slice(128, 192)) if scale_group == "128" else (slice(0, 192),):
        h = importance[part].double()
        for values in weight[:, part].double():
            errors = []
            for threshold in [-1.0, *values.abs().tolist()]:
                signs = torch.where(values.abs() > threshold, values.sign(), 0.0)
                mass = (h * signs.square()).sum().clamp_min(1e-300)
                scale = (h * signs * values).sum() / mass
                errors.append(float((h * (values - scale * signs).square()).sum()))
            best += min(errors)
            rounding += float(h.sum()) * 4.0**-10
    assert best - 1e-9 <= weighted_error(weight, fit, importance) <= best + rounding


@pytest.mark.parametrize("scale_group", ["128", "channel"])
def test_optimal_fit_beats_the_known_rules(scale_group: str) -> None:
    weight = normal(32, 320) * (0.2 + uniform(320, seed=3))
    width = GROUP if scale_group == "128" else 320
    for block in weight.split(width, dim=1):
        best = weighted_error(block, fit_optimal(block, scale_group=scale_group))
        mean = block.abs().mean(1, keepdim=True)
        # BitNet rounds at half the mean; TWN cuts at 0.7 of it and takes the mean of the rest.
        for factor in (0.5, 0.7):
            kept = block.abs() > factor * mean
            rest = (block.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
            for scale in (mean, rest):
                assert best < float((block - scale * block.sign() * kept).square().sum())
    whole = weighted_error(weight, fit_optimal(weight, scale_group=scale_group))
    assert whole < weighted_error(weight, fit_paper(weight, threshold=0.3))


@pytest.mark.parametrize(("scale_group", "expected"), [("128", 0.187), ("channel", 0.190)])
def test_gaussian_weights_lose_what_theory_says(scale_group: str, expected: float) -> None:
    weight = normal(1024, 512)
    fit = fit_optimal(weight, scale_group=scale_group)
    assert relative_error(weight, fit) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("in_features", [64, 128, 576], ids=["short", "one", "ragged"])
@pytest.mark.parametrize("scale_group", ["128", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ternary_weights_come_back_bit_for_bit(
    in_features: int, scale_group: str, dtype: torch.dtype
) -> None:
    weight = random_ternary(in_features, scale_group, dtype)
    exact = exact_ternary(weight, scale_group)
    assert exact is not None
    for fit in (exact, fit_optimal(weight, scale_group=scale_group)):
        assert torch.equal(fit.dequantize(), weight.float())
        assert fit.signs.dtype == torch.int8
        assert fit.scale.dtype == torch.float16
        groups = -(-in_features // GROUP) if scale_group == "128" else 1
        assert fit.scale.shape == (5, groups)


def test_negative_zero_is_a_zero() -> None:
    weight = torch.tensor([[0.5, -0.0, -0.5, 0.0]])
    fit = exact_ternary(weight, "128")
    assert fit is not None
    assert fit.signs.tolist() == [[1, 0, -1, 0]]
    assert fit.threshold == 0.25


@pytest.mark.parametrize(
    "weight",
    [
        torch.tensor([[0.5, 0.25, 0.0]]),
        torch.tensor([[0.1, -0.1, 0.0]]),
        torch.tensor([[70000.0, 0.0, -70000.0]]),
        torch.tensor([[1e-9, 0.0, -1e-9]]),
    ],
    ids=["two magnitudes", "not a float16", "too large", "too small"],
)
def test_what_is_not_exactly_ternary_is_not_called_so(weight: Tensor) -> None:
    assert exact_ternary(weight, "128") is None


def test_one_scale_per_row_is_not_exact_for_scales_per_group() -> None:
    weight = random_ternary(256, "128", torch.float32)
    assert exact_ternary(weight, "128") is not None
    assert exact_ternary(weight, "channel") is None


def test_rounded_scale_gets_the_best_signs_for_it() -> None:
    # Near the smallest float16 numbers the scale moves by up to half of itself.
    weight = normal(64, 128) * 2e-7
    fit = fit_optimal(weight)
    scale = fit.scale.float().expand_as(weight)
    for sign in (-1, 0, 1):
        other = (weight - scale * sign).abs()
        assert bool(((weight - fit.dequantize()).abs() <= other).all())


def test_chunks_do_not_change_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance = normal(17, 200), uniform(200)
    whole = fit_optimal(weight, importance=importance), fit_paper(weight, threshold=0.5)
    threshold = calibrate_threshold(weight, importance)
    monkeypatch.setattr(ternary, "CHUNK_ELEMENTS", 512)
    parts = fit_optimal(weight, importance=importance), fit_paper(weight, threshold=0.5)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.signs, other.signs)
        assert torch.equal(one.scale, other.scale)
    assert calibrate_threshold(weight, importance) == threshold


def test_unit_of_the_importance_does_not_matter() -> None:
    weight, importance = normal(8, 256), uniform(256).double()
    fit = fit_optimal(weight, importance=importance)
    for unit in (1e-200, 1e200):
        other = fit_optimal(weight, importance=importance * unit)
        assert torch.equal(fit.signs, other.signs)
        assert torch.equal(fit.scale, other.scale)


def test_group_without_importance_is_fitted_as_if_all_inputs_mattered() -> None:
    weight, importance = normal(8, 256), uniform(256)
    importance[:128] = 0
    fit, plain = fit_optimal(weight, importance=importance), fit_optimal(weight)
    assert torch.equal(fit.signs[:, :128], plain.signs[:, :128])
    assert torch.equal(fit.scale[:, 0], plain.scale[:, 0])
    assert not torch.equal(fit.scale[:, 1], plain.scale[:, 1])


def test_weights_only_where_importance_is_zero_do_not_vanish() -> None:
    weight = torch.tensor([[0.0, 0.0, 0.5, -0.5]])
    fit = fit_optimal(weight, importance=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert torch.equal(fit.dequantize(), weight)


def test_zero_weights_have_zero_scale_and_signs() -> None:
    for fit in (fit_optimal(torch.zeros(3, 200)), fit_paper(torch.zeros(3, 200))):
        assert not fit.signs.any()
        assert not fit.scale.any()
    assert fit_paper(torch.full((2, 8), 0.005)).scale.tolist() == [[0.0], [0.0]]
    assert calibrate_threshold(torch.zeros(3, 200), None) == 0.0


def test_paper_scheme_is_followed_to_the_letter() -> None:
    weight = torch.tensor([[0.03, -0.01, 0.008, -0.002], [0.02, 0.02, 0.0, 0.001]])
    fit = fit_paper(weight)
    assert fit.signs.tolist() == [[1, -1, 0, 0], [1, 1, 0, 0]]
    # Standard deviation of 0.03 and -0.01 is 0.02, of 0.02 and 0.02 it is 0.
    assert torch.equal(fit.scale, torch.tensor([[0.7 * 0.02], [0.0]], dtype=torch.float16))
    assert fit.threshold == 0.008
    assert fit.scale_group == "128"
    assert fit_paper(normal(2, 256)).scale_group == "channel"


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_calibrated_threshold_is_the_best_of_its_grid(is_weighted: bool) -> None:
    weight = normal(64, 320) * 0.05
    importance = uniform(320).pow(4) if is_weighted else None
    chosen = calibrate_threshold(weight, importance, candidates=16)
    ordered = weight.abs().flatten().sort().values
    grid = [0.0] + [float(ordered[i * len(ordered) // 16]) for i in range(1, 16)]
    errors = [weighted_error(weight, fit_paper(weight, threshold=t), importance) for t in grid]
    assert chosen == grid[errors.index(min(errors))]
    assert min(errors) < weighted_error(weight, fit_paper(weight), importance)


def test_scale_beyond_float16_is_refused_by_name() -> None:
    weight = torch.ones(4, 256)
    weight[2, 130:] = 2e5
    with pytest.raises(ValueError, match=r"row 2, group 1 exceeds 65504"):
        fit_optimal(weight)
    signed = weight * torch.ones(256).index_fill(0, torch.arange(0, 256, 2), -1.0)
    with pytest.raises(ValueError, match=r"row 2, group 0 exceeds 65504"):
        fit_paper(signed)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (torch.ones(5), "one value per input"),
        (torch.tensor([1.0, -1.0, 0.0, 0.0]), "negative"),
        (torch.tensor([1.0, torch.nan, 0.0, 0.0]), "non-finite"),
    ],
    ids=["length", "sign", "nan"],
)
def test_unusable_importance_is_refused(importance: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_optimal(torch.ones(2, 4), importance=importance)


def test_unusable_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="scale_group=row is not known; use one of 128, channel"):
        fit_optimal(torch.ones(2, 4), scale_group="row")
    with pytest.raises(ValueError, match="NaN or infinite"):
        exact_ternary(torch.tensor([[1.0, torch.inf]]))
    with pytest.raises(ValueError, match="non-empty"):
        fit_optimal(torch.ones(4))
    with pytest.raises(ValueError, match="threshold=-1"):
        fit_paper(torch.ones(2, 4), threshold=-1.0)
    with pytest.raises(ValueError, match="candidates=0"):
        calibrate_threshold(torch.ones(2, 4), None, candidates=0)
