"""Do codes and codebooks remove what they can of the error, and stay usable where there is none?"""

import math

import pytest
import torch
from torch import Tensor

from bonsai_ft.format.packing import GROUP
from bonsai_ft.quantize import residual as module
from bonsai_ft.quantize.metric import output_error, relative_mse
from bonsai_ft.quantize.residual import (
    ResidualFit,
    build_weight,
    fit_residual_activation,
    fit_residual_kmeans,
    fit_zero_residual,
    to_residual,
)
from bonsai_ft.quantize.ternary import fit_optimal

CODECS = [(128, 4), (8, 16), (32, 3)]
codecs = pytest.mark.parametrize(("dim", "k"), CODECS, ids=[f"d{d}-k{k}" for d, k in CODECS])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(num: int, features: int, seed: int) -> Tensor:
    """Samples whose covariance has the eigenvalues 1/k in one fixed random basis."""
    basis = torch.linalg.qr(normal(features, features, seed=99))[0]
    spectrum = torch.arange(1, features + 1).float().rsqrt()
    return (normal(num, features, seed=seed) * spectrum) @ basis.T


def moment(samples: Tensor) -> Tensor:
    return samples.T @ samples / len(samples)


def same(one: ResidualFit, other: ResidualFit) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def check_layout(fit: ResidualFit, out_features: int, in_features: int, dim: int, k: int) -> None:
    groups = math.ceil(in_features / GROUP)
    assert fit.codes.shape == (out_features, math.ceil(in_features / dim))
    assert fit.codes.dtype == torch.int64
    assert fit.codebook.shape == (groups, k, dim)
    assert fit.mu.shape == fit.sigma.shape == (groups,)
    assert fit.mu.dtype == fit.sigma.dtype == torch.float16
    assert bool((fit.sigma > 0).all())


@codecs
@pytest.mark.parametrize("in_features", [60, 256, 576, 580], ids=str)
@pytest.mark.parametrize("packing", ["2bit", "base3"])
def test_built_weight_is_valid_and_dequantizes_to_the_fit(
    in_features: int, dim: int, k: int, packing: str
) -> None:
    weight = normal(48, in_features)
    ternary = fit_optimal(weight)
    error = weight - ternary.dequantize()
    second_moment = moment(normal(2000, in_features, seed=1))
    for fit in (
        fit_residual_kmeans(error, dim=dim, k=k),
        fit_residual_activation(error, second_moment=second_moment, dim=dim, k=k),
        fit_zero_residual(ternary.scale, in_features, 48, dim, k),
    ):
        check_layout(fit, 48, in_features, dim, k)
        built = build_weight(ternary, fit, packing)
        built.validate()
        expected = ternary.dequantize() + to_residual(fit).dequantize(in_features)
        assert torch.equal(built.dequantize(), expected)
    assert build_weight(ternary, None, packing).residual is None


@codecs
@pytest.mark.parametrize("in_features", [576, 580], ids=str)
def test_every_code_is_the_nearest_stored_codeword(in_features: int, dim: int, k: int) -> None:
    error = normal(40, in_features)
    fit = fit_residual_kmeans(error, dim=dim, k=k)
    chosen = (error - fit.dense(in_features)).square()
    for code in range(k):
        other = ResidualFit(**{**vars(fit), "codes": torch.full_like(fit.codes, code)})
        rival = (error - other.dense(in_features)).square()
        for mine, theirs in zip(chosen.split(dim, 1), rival.split(dim, 1), strict=True):
            assert bool((mine.sum(1) <= theirs.sum(1) * (1 + 1e-4)).all())


def test_kmeans_error_falls_with_more_codewords() -> None:
    error = normal(256, 320)
    for dim in (128, 8):
        lost = [
            relative_mse(error, fit_residual_kmeans(error, dim=dim, k=k).dense(320))
            for k in (2, 4, 16, 64)
        ]
        assert lost == sorted(lost, reverse=True)
        assert lost[0] < 1


@pytest.mark.parametrize(
    ("dim", "k", "factor"), [(128, 4, 0.977), (8, 16, 0.618)], ids=["d128-k4", "d8-k16"]
)
def test_ternary_error_shrinks_by_the_known_factor(dim: int, k: int, factor: float) -> None:
    weight = normal(1024, 256)
    error = weight - fit_optimal(weight).dequantize()
    fit = fit_residual_kmeans(error, dim=dim, k=k)
    assert relative_mse(error, fit.dense(256)) == pytest.approx(factor, rel=0.02)


def test_clear_clusters_are_found() -> None:
    centres = normal(4, 128) + 0.1
    codes = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(1))
    fit = fit_residual_kmeans(centres[codes])
    assert relative_mse(centres[codes], fit.dense(128)) < 1e-6


def test_empty_clusters_are_given_the_worst_served_points() -> None:
    # All points start in cluster 0, so that clusters 1 and 2 are empty.
    points = torch.cat([torch.zeros(9, 2), torch.tensor([[8.0, 0.0], [0.0, 9.0]])]).unsqueeze(0)
    start = torch.zeros(1, 11, dtype=torch.long)
    centroids = module._fit_centroids(points, torch.zeros(1, 3), 10, start)
    found = sorted(centroids[0].tolist())
    assert found == [[0.0, 0.0], [0.0, 9.0], [8.0, 0.0]]


@codecs
def test_fits_are_deterministic_and_follow_the_seed(dim: int, k: int) -> None:
    error, second_moment = normal(64, 200), moment(correlated(2000, 200, seed=1))
    for seed in (0, 7):
        kmeans = [fit_residual_kmeans(error, dim=dim, k=k, seed=seed) for _ in range(2)]
        assert same(*kmeans)
        activation = [
            fit_residual_activation(error, second_moment=second_moment, dim=dim, k=k, seed=seed)
            for _ in range(2)
        ]
        assert same(*activation)
    first = fit_residual_kmeans(error, dim=dim, k=k, seed=0)
    assert not same(first, fit_residual_kmeans(error, dim=dim, k=k, seed=1))


def test_batches_do_not_change_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    error = normal(50, 576)
    whole = fit_residual_kmeans(error, dim=8, k=4)
    monkeypatch.setattr(module, "BATCH_ELEMENTS", 1)
    monkeypatch.setattr(module, "DISTANCE_ELEMENTS", 1 << 10)
    parts = fit_residual_kmeans(error, dim=8, k=4)
    # Sums are added in another order, so a point on a border may change sides.
    assert (whole.codes == parts.codes).float().mean() > 0.99


def test_bfloat16_codebooks_are_fitted_as_stored() -> None:
    error, second_moment = normal(64, 200), moment(correlated(2000, 200, seed=1))
    kmeans = fit_residual_kmeans(error, storage=torch.bfloat16)
    activation = fit_residual_activation(error, second_moment=second_moment, storage=torch.bfloat16)
    for fit in (kmeans, activation):
        assert fit.codebook.dtype == torch.bfloat16
        assert relative_mse(error, fit.dense(200)) < 1
    build_weight(fit_optimal(error), activation, "2bit").validate()


@pytest.mark.parametrize(
    ("dim", "k", "gain"),
    [(128, 4, 0.20), (64, 4, 0.20), (8, 16, 0.20)],
    ids=["d128-k4", "d64-k4", "d8-k16"],
)
def test_activation_fit_lowers_the_output_error_on_unseen_inputs(
    dim: int, k: int, gain: float
) -> None:
    weight = normal(512, 320)
    base = fit_optimal(weight).dequantize()
    seen, unseen = (moment(correlated(32 * 320, 320, seed=seed)) for seed in (1, 2))
    plain = fit_residual_kmeans(weight - base, dim=dim, k=k).dense(320)
    fitted = fit_residual_activation(weight - base, second_moment=seen, dim=dim, k=k).dense(320)
    for h in (seen, unseen):
        before, after = (output_error(weight, base + r, h) for r in (plain, fitted))
        assert after < (1 - gain) * before
        assert before < output_error(weight, base, h)


@codecs
def test_each_sweep_lowers_the_objective(dim: int, k: int) -> None:
    error, h = normal(128, 320), moment(correlated(4000, 320, seed=1))
    lost = [
        output_error(
            error,
            fit_residual_activation(error, second_moment=h, dim=dim, k=k, sweeps=sweeps).dense(320),
            h,
        )
        for sweeps in (1, 2, 4)
    ]
    # Descent is on the damped H, so it need not be strict on H itself.
    assert lost[1] <= lost[0] * 1.001
    assert lost[2] <= lost[1] * 1.001


@codecs
@pytest.mark.parametrize("kind", ["white", "steep", "one sample", "outliers"])
def test_activation_fit_is_never_worse_than_kmeans(dim: int, k: int, kind: str) -> None:
    error = normal(96, 200)
    samples = {
        "white": normal(5000, 200, seed=1),
        "steep": correlated(5000, 200, seed=1) * torch.linspace(0, 1, 200) ** 4,
        "one sample": normal(1, 200, seed=1),
        "outliers": normal(5000, 200, seed=1) * torch.where(torch.arange(200) < 3, 100.0, 1.0),
    }[kind]
    h = moment(samples).double()
    plain = fit_residual_kmeans(error, dim=dim, k=k)
    fit = fit_residual_activation(error, second_moment=h, dim=dim, k=k)
    assert output_error(error, fit.dense(200), h) <= output_error(error, plain.dense(200), h)
    assert output_error(error, fit.dense(200), h) < 1


@codecs
def test_dead_inputs_do_not_break_the_activation_fit(dim: int, k: int) -> None:
    error, samples = normal(64, 320), correlated(3000, 320, seed=1)
    samples[:, 128:256] = 0
    samples[:, 5] = 0
    fit = fit_residual_activation(error, second_moment=moment(samples), dim=dim, k=k, damping=0.0)
    build_weight(fit_optimal(error), fit, "2bit").validate()
    nothing = fit_residual_activation(error, second_moment=torch.zeros(320, 320), dim=dim, k=k)
    assert relative_mse(error, nothing.dense(320)) < 1


def test_zero_error_gives_zero_residual_with_a_trainable_unit() -> None:
    error, h = torch.zeros(16, 200), moment(normal(1000, 200))
    for fit in (fit_residual_kmeans(error), fit_residual_activation(error, second_moment=h)):
        assert not fit.dense(200).any()
        assert bool((fit.sigma > 0).all())


@codecs
@pytest.mark.parametrize("num_scales", [3, 1], ids=["128", "channel"])
def test_zero_residual_is_exactly_zero_and_balanced(num_scales: int, dim: int, k: int) -> None:
    scale = (normal(50, num_scales).abs() + 0.5).half()
    fit = fit_zero_residual(scale, 300, 50, dim, k, 0)
    check_layout(fit, 50, 300, dim, k)
    assert not fit.dense(300).any()
    assert torch.allclose(fit.sigma.float(), 0.05 * scale.float().mean(0).expand(3), rtol=1e-3)
    counts = torch.stack([torch.bincount(column, minlength=k) for column in fit.codes.T])
    assert int(counts.max() - counts.min()) <= 1
    assert same(fit, fit_zero_residual(scale, 300, 50, dim, k, 0))
    assert not same(fit, fit_zero_residual(scale, 300, 50, dim, k, 1))


def test_zero_residual_of_a_zero_weight_can_train() -> None:
    fit = fit_zero_residual(torch.zeros(8, 1, dtype=torch.float16), 128, 8, 128, 4, 0)
    assert bool((fit.sigma > 0).all())


def test_fewer_rows_than_codewords_are_kept_exactly() -> None:
    error = normal(2, 128)
    fit = fit_residual_kmeans(error, k=16)
    assert relative_mse(error, fit.dense(128)) < 1e-6


def test_error_measures_agree_with_their_definitions() -> None:
    weight, other, samples = normal(8, 40), normal(8, 40, seed=1), normal(500, 40, seed=2).double()
    outputs = samples @ weight.double().T
    expected = (outputs - samples @ other.double().T).square().sum() / outputs.square().sum()
    assert output_error(weight, other, moment(samples)) == pytest.approx(float(expected))
    assert relative_mse(weight, torch.zeros_like(weight)) == 1
    assert relative_mse(weight, weight) == 0
    assert relative_mse(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
    assert relative_mse(torch.zeros(2, 2), torch.ones(2, 2)) == math.inf


def test_unusable_arguments_are_refused() -> None:
    error = normal(4, 128)
    with pytest.raises(ValueError, match="residual_dim=48 does not divide"):
        fit_residual_kmeans(error, dim=48)
    with pytest.raises(ValueError, match="residual_k=300"):
        fit_residual_kmeans(error, k=300)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        fit_residual_kmeans(error, storage=torch.float32)
    with pytest.raises(ValueError, match="NaN or infinite"):
        fit_residual_kmeans(torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match="exceeds float16"):
        fit_residual_kmeans(error * 1e6)
    with pytest.raises(ValueError, match="has 128 inputs"):
        fit_residual_activation(error, second_moment=torch.eye(4))
    with pytest.raises(ValueError, match="negative mean square"):
        fit_residual_activation(error, second_moment=-torch.eye(128))
    with pytest.raises(ValueError, match="positive semi-definite"):
        fit_residual_activation(error, second_moment=torch.eye(128) + 1e9 * (1 - torch.eye(128)))
    with pytest.raises(ValueError, match="sweeps=0"):
        fit_residual_activation(error, second_moment=torch.eye(128), sweeps=0)
    with pytest.raises(ValueError, match="has scales"):
        fit_zero_residual(torch.ones(4, 2), 128, 4, 128, 4, 0)
