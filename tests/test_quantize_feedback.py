"""Do errors that are handed on leave outputs alone, and does every later move lower the error?"""

import itertools
import math

import pytest
import torch

from bonsai_ft.quantize.feedback import (
    SCALE_FLOOR,
    feedback_signs,
    fit_feedback,
    refine_signs,
    refit_scales,
)
from bonsai_ft.quantize.metric import checked_moment, damped, output_error
from bonsai_ft.quantize.ternary import TernaryFit, fit_optimal


def samples(tokens: int, inputs: int, seed: int, power: float = 1.0) -> torch.Tensor:
    """Inputs whose covariance falls as 1 / k^power along directions mixed by a fixed rotation."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(inputs, inputs, generator=torch.Generator().manual_seed(7))).Q
    spectrum = torch.arange(1, inputs + 1).pow(-power / 2)
    return torch.randn(tokens, inputs, generator=generator) * spectrum @ mix


def moment(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def weights(rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05


def error(target: torch.Tensor, fit: TernaryFit, metric: torch.Tensor) -> float:
    difference = (target - fit.dequantize()).double()
    return float(((difference @ metric.double()) * difference).sum())


@pytest.mark.parametrize("inputs", [128, 200, 320])
@pytest.mark.parametrize("scale_group", ["128", "channel"])
def test_feedback_lowers_the_error_of_outputs_on_unseen_inputs(inputs, scale_group):
    weight = weights(64, inputs)
    h, judged = moment(samples(8192, inputs, 1)), moment(samples(2048, inputs, 2))
    plain = fit_optimal(weight, importance=h.diagonal(), scale_group=scale_group)
    fit = fit_feedback(weight, h, judged=judged, scale_group=scale_group)
    assert fit.scale.shape == plain.scale.shape
    assert fit.scale_group == plain.scale_group
    assert set(fit.signs.unique().tolist()) <= {-1, 0, 1}
    before, after = (output_error(weight, one.dequantize(), judged) for one in (plain, fit))
    assert after < 0.6 * before


def test_without_correlation_feedback_is_no_better_than_rounding_and_no_worse():
    weight, h = weights(64, 256), torch.eye(256)
    plain = output_error(weight, fit_optimal(weight).dequantize(), h)
    assert output_error(weight, fit_feedback(weight, h).dequantize(), h) == pytest.approx(
        plain, rel=0.01
    )


def test_one_column_after_the_other_equals_the_textbook_loop():
    """Optimal brain surgeon by inverting what is left of H after every column, in float64."""
    weight, metric = weights(8, 128).double(), moment(samples(4096, 128, 3)).double()
    metric += 0.01 * metric.diagonal().mean() * torch.eye(128, dtype=torch.float64)
    fit = feedback_signs(weight, metric)
    order = metric.diagonal().float().argsort(descending=True, stable=True).tolist()
    free, signs = weight.clone(), torch.zeros_like(weight)
    left = list(order)
    for column in order:
        inverse = torch.linalg.inv(metric[left][:, left])
        signs[:, column] = (free[:, column] / fit.scale[:, 0].double()).round().clamp(-1, 1)
        lost = free[:, column] - signs[:, column] * fit.scale[:, 0].double()
        free[:, left] -= torch.outer(lost / inverse[0, 0], inverse[0])
        left.remove(column)
    agreement = (signs == fit.signs).double().mean()
    assert agreement > 0.999  # float32 may round a tie the other way


@pytest.mark.parametrize("scale_group", ["128", "channel"])
@pytest.mark.parametrize("start", ["optimal", "feedback"])
def test_no_move_of_signs_or_scales_raises_the_error(start, scale_group):
    weight = weights(48, 200)
    metric = damped(checked_moment(moment(samples(4096, 200, 4)), weight), 0.01, width=200)
    fit = (
        fit_optimal(weight, scale_group=scale_group)
        if start == "optimal"
        else feedback_signs(weight, metric, scale_group=scale_group)
    )
    errors = [error(weight, fit, metric)]
    for _ in range(3):
        for move in (refit_scales, refine_signs):
            fit = move(weight, fit, metric)
            errors.append(error(weight, fit, metric))
    # rounding a scale to float16 costs a little, never more
    assert all(after <= before * (1 + 1e-4) for before, after in itertools.pairwise(errors))
    assert errors[-1] < 0.95 * errors[0]


def test_a_refined_sign_is_the_best_one_with_all_others_as_they_are():
    weight = weights(16, 130)
    metric = damped(checked_moment(moment(samples(4096, 130, 5)), weight), 0.01, width=130)
    fit = refit_scales(weight, feedback_signs(weight, metric), metric)
    for _ in range(50):
        moved = refine_signs(weight, fit, metric)
        if torch.equal(moved.signs, fit.signs):
            break
        fit = moved
    least = error(weight, fit, metric)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        row = int(torch.randint(16, (), generator=generator))
        column = int(torch.randint(130, (), generator=generator))
        for sign in (-1, 0, 1):
            signs = fit.signs.clone()
            signs[row, column] = sign
            other = TernaryFit(signs=signs, scale=fit.scale, threshold=0.0)
            assert error(weight, other, metric) >= least * (1 - 1e-6)


def test_refitted_scales_solve_the_least_squares_problem():
    weight, inputs = weights(12, 300), samples(4096, 300, 6).double()
    metric = damped(checked_moment(moment(inputs.float()), weight), 0.01, width=300)
    fit = feedback_signs(weight, metric)
    refitted = refit_scales(weight, fit, metric)
    root = torch.linalg.cholesky(metric.double())
    for row in range(12):
        columns = torch.zeros(300, 3, dtype=torch.float64)
        for group in range(3):
            span = slice(group * 128, min(300, (group + 1) * 128))
            columns[span, group] = fit.signs[row, span].double()
        wanted = weight[row].double() @ root
        expected = torch.linalg.lstsq(root.T @ columns, wanted[:, None]).solution.squeeze()
        assert torch.allclose(refitted.scale[row].double(), expected, rtol=1e-3)


def test_a_row_of_zeros_stays_zero_and_every_scale_is_legal():
    weight = weights(8, 256)
    weight[3] = 0
    weight[:, :128] = 0
    x = samples(1024, 256, 8)
    x[:, 5] = 0
    fit = fit_feedback(weight, moment(x), judged=moment(x))
    assert not fit.signs[3].any()
    assert bool((fit.scale >= SCALE_FLOOR).all())
    assert bool(fit.scale.isfinite().all())
    assert output_error(weight, fit.dequantize(), moment(x)) < 0.3


def test_fewer_tokens_than_inputs_are_damped_until_the_metric_is_definite():
    weight, x = weights(16, 256), samples(40, 256, 9)
    fit = fit_feedback(weight, moment(x), dampings=(0.0,))
    assert math.isfinite(output_error(weight, fit.dequantize(), moment(x)))


def test_the_damping_with_the_least_error_on_the_other_inputs_is_taken():
    weight, few = weights(64, 256), moment(samples(64, 256, 10))
    judged = moment(samples(8192, 256, 11))
    errors = {
        damping: output_error(
            weight,
            feedback_signs(
                weight, damped(checked_moment(few, weight), damping, width=256)
            ).dequantize(),
            judged,
        )
        for damping in (1e-4, 1.0)
    }
    assert errors[1.0] < errors[1e-4]
    chosen = fit_feedback(weight, few, judged=judged, dampings=(1e-4, 1.0), rounds=0)
    fixed = fit_feedback(weight, few, dampings=(1.0,), rounds=0)
    assert torch.equal(chosen.signs, fixed.signs)


def test_weights_that_are_not_finite_and_moments_of_another_size_are_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        fit_feedback(torch.full((2, 128), math.nan), torch.eye(128))
    with pytest.raises(ValueError, match="128 inputs"):
        fit_feedback(torch.ones(2, 128), torch.eye(127))
    with pytest.raises(ValueError, match="largest float16"):
        fit_feedback(torch.full((2, 128), 1e6), torch.eye(128))
