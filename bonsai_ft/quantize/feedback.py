"""Which signs and scales leave a layer's outputs alone, when one rounding can make up for another?

`fit_optimal` rounds every weight for itself. `feedback_signs` hands the error of each column on to
the columns that are still free, in the proportion in which their inputs come together: GPTQ
(arXiv:2210.17323) with ternary values, whose scale is fitted when a group is reached.
`refine_signs` and `refit_scales` then move signs and scales in turn, each to the least error while
the other stays.

The error is that of outputs, tr(D H D^T) with D = target - S*T and H = E[x x^T]. `metric` is H,
damped so that it is positive definite.

Shapes: O output rows, I input features, G groups of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bonsai_ft.format.packing import GROUP
from bonsai_ft.quantize.metric import checked_moment, damped, output_error
from bonsai_ft.quantize.ternary import CHUNK_ELEMENTS, TernaryFit, best_scale, check_weight

__all__ = ["SCALE_FLOOR", "feedback_signs", "fit_feedback", "refine_signs", "refit_scales"]

# Shares of H's mean diagonal: more of it trusts few calibration tokens less.
DAMPINGS = (0.01, 0.03, 0.1)
ROUNDS = 2
# The smallest normal float16: a smaller scale would be coarse, and one of 0 divides.
SCALE_FLOOR = 2.0**-14


def fit_feedback(
    target: Tensor,
    second_moment: Tensor,
    *,
    judged: Tensor | None = None,
    dampings: tuple[float, ...] = DAMPINGS,
    rounds: int = ROUNDS,
    scale_group: str = "128",
) -> TernaryFit:
    """Signs and scales of `target` [O, I] for the inputs of `second_moment`, H [I, I].

    Every damping is tried, and the one with the least error on `judged`, the H of other inputs,
    is refined in `rounds` turns of signs and scales. Without `judged`, the first one is taken.

    Raises ValueError on weights that are not finite and moments of another size.
    """
    check_weight(target)
    h = checked_moment(second_moment, target)
    best: TernaryFit | None = None
    least, best_metric = math.inf, h
    for damping in dampings if judged is not None else dampings[:1]:
        metric = damped(h, damping, width=len(h))
        fit = feedback_signs(target, metric, scale_group=scale_group)
        error = 0.0 if judged is None else output_error(target, fit.dequantize(), judged)
        if best is None or error < least:
            best, least, best_metric = fit, error, metric
    assert best is not None, "there is at least one damping"
    for _ in range(rounds):
        best = refit_scales(target, best, best_metric)
        best = refine_signs(target, best, best_metric)
    return refit_scales(target, best, best_metric)


def feedback_signs(target: Tensor, metric: Tensor, *, scale_group: str = "128") -> TernaryFit:
    """Signs and scales of `target` [O, I], one column after the other, errors handed on.

    Groups go from the strongest inputs to the weakest, and so do the columns of a group: the first
    ones have most others left to make up for them. In the file every column keeps its place.

    Raises ValueError if a scale does not fit float16.
    """
    order = _Order.by_strength(metric.diagonal())
    permuted = metric[order.columns][:, order.columns].double()
    factor = torch.linalg.cholesky(permuted)
    # Row j of this factor of H^-1 says how the later columns answer an error of column j.
    answer = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True).float()
    # What an error of a column costs after the later ones have answered.
    cost = answer.diagonal().double().reciprocal().square()
    cost /= cost.max()
    free = target.float()[:, order.columns]
    signs = torch.empty_like(free)
    whole_row = _scale_of(free, cost) if scale_group == "channel" else None
    scale = free.new_empty(len(free), len(order.spans)) if whole_row is None else whole_row
    for group, span in order.spans:
        block, local = free[:, span].clone(), answer[span, span]
        chosen = _scale_of(block, cost[span]) if whole_row is None else whole_row
        if whole_row is None:
            scale[:, group : group + 1] = chosen
        handed_on = torch.empty_like(block)
        for j in range(block.shape[1]):
            sign = _nearest_sign(block[:, j : j + 1], chosen)
            error = (block[:, j : j + 1] - chosen * sign) / local[j, j]
            signs[:, span.start + j : span.start + j + 1] = sign
            handed_on[:, j : j + 1] = error
            block[:, j + 1 :].addmm_(error, local[j : j + 1, j + 1 :], alpha=-1)
        free[:, span.stop :].addmm_(handed_on, answer[span, span.stop :], alpha=-1)
    placed = torch.empty_like(signs)
    placed[:, order.columns] = signs
    return _fit(placed, scale)


def refine_signs(target: Tensor, fit: TernaryFit, metric: Tensor) -> TernaryFit:
    """One pass over the columns: each takes the signs of least error, all others as they are.

    Coordinate descent: with D = target - S*T, the best value of column j is q_j + (D H)_j / H_jj,
    and the sign is the nearest to it. Never raises the error.
    """
    in_features = target.shape[1]
    signs = fit.signs.float()
    product = (target.float() - fit.dequantize()) @ metric
    for group in range(math.ceil(in_features / GROUP)):
        span = slice(group * GROUP, min((group + 1) * GROUP, in_features))
        scale = (fit.scale[:, group : group + 1] if fit.scale.shape[1] > 1 else fit.scale).float()
        local, seen = metric[span, span], product[:, span].clone()
        moved = torch.empty_like(seen)
        for j in range(seen.shape[1]):
            present = scale * signs[:, span.start + j : span.start + j + 1]
            sign = _nearest_sign(present + seen[:, j : j + 1] / local[j, j], scale)
            change = present - scale * sign
            signs[:, span.start + j : span.start + j + 1] = sign
            moved[:, j : j + 1] = change
            seen.addmm_(change, local[j : j + 1])
        product.addmm_(moved, metric[span])
    return _fit(signs, fit.scale.float())


def refit_scales(target: Tensor, fit: TernaryFit, metric: Tensor) -> TernaryFit:
    """The scales of least error for the signs as they are: G linear equations for every row.

    A row keeps its scales if a new one would be negative, too small or too large for float16.
    """
    out_features, in_features = target.shape
    width = GROUP if fit.scale.shape[1] > 1 else in_features
    groups = fit.scale.shape[1]
    signs = fit.signs.float()

    def by_group(product: Tensor) -> Tensor:
        padded = F.pad(product * signs, (0, groups * width - in_features))
        return padded.view(out_features, groups, width).sum(2, dtype=torch.float64)

    normal = torch.empty(out_features, groups, groups, dtype=torch.float64, device=target.device)
    for group in range(groups):
        inputs = slice(group * width, min((group + 1) * width, in_features))
        normal[:, group] = by_group(signs[:, inputs] @ metric[inputs])
    wanted = by_group(target.float() @ metric).unsqueeze(2)
    # A group without a sign has a row and a column of zeros, and any scale.
    is_empty = normal.diagonal(dim1=1, dim2=2) <= 0
    normal += torch.diag_embed(is_empty.double())
    solved, info = torch.linalg.solve_ex(normal, wanted)
    kept = fit.scale.double()
    solved = torch.where(is_empty, kept, solved.squeeze(2))
    is_legal = (solved >= SCALE_FLOOR) & (solved <= torch.finfo(torch.float16).max)
    is_taken = (is_legal.all(1) & (info == 0)).unsqueeze(1)
    return _fit(signs, torch.where(is_taken, solved, kept))


@dataclass(frozen=True, kw_only=True)
class _Order:
    """In which order columns are rounded: their indices [I], and every group's span therein."""

    columns: Tensor
    spans: list[tuple[int, slice]]

    @classmethod
    def by_strength(cls, strength: Tensor) -> _Order:
        parts = strength.split(GROUP)
        means = torch.stack([part.double().mean() for part in parts])
        columns, spans, start = [], [], 0
        for group in means.argsort(descending=True, stable=True).tolist():
            inside = parts[group].argsort(descending=True, stable=True)
            columns.append(group * GROUP + inside)
            spans.append((group, slice(start, start + len(inside))))
            start += len(inside)
        return cls(columns=torch.cat(columns), spans=spans)


def _nearest_sign(value: Tensor, scale: Tensor) -> Tensor:
    return (value / scale).round().clamp(-1, 1)


def _scale_of(block: Tensor, cost: Tensor) -> Tensor:
    """The best scale [O, 1] of a block of columns when its errors cost this much, as stored."""
    step = max(1, CHUNK_ELEMENTS // block.shape[1])
    parts = [best_scale(rows.abs().unsqueeze(1), cost.unsqueeze(0)) for rows in block.split(step)]
    scale = torch.cat(parts)
    stored = scale.clamp_min(SCALE_FLOOR).to(torch.float16)
    if not bool(stored.isfinite().all()):
        raise ValueError("a scale exceeds the largest float16; rescale the weight")
    return stored.float()


def _fit(signs: Tensor, scale: Tensor) -> TernaryFit:
    return TernaryFit(
        signs=signs.to(torch.int8),
        scale=scale.to(torch.float16),
        threshold=float(scale.double().mean()) / 2,
    )
