"""Which signs T and scales S stand for a float weight?

`fit_optimal` is exact per (row, group), `fit_paper` follows the published recipe to the letter, and
`exact_ternary` recognises a weight that is ternary already. What S*T misses is `residual.py`'s.

Shapes: O output rows, I input features, G groups of a row, R rows of a chunk, N inputs of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bonsai_ft.format.packing import GROUP

__all__ = [
    "TernaryFit",
    "best_scale",
    "calibrate_threshold",
    "check_weight",
    "exact_ternary",
    "fit_optimal",
    "fit_paper",
]

SCALE_GROUPS = ("128", "channel")
FLOAT16_MAX = 65504.0
PAPER_SCALE = 0.7
# About 80 bytes of sorted copies, indices and float64 sums per element: 80 MiB at a time.
CHUNK_ELEMENTS = 1 << 20
# Quantiles need no more than this many magnitudes.
QUANTILE_SAMPLE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TernaryFit:
    """Signs int8 [O, I], scale float16 [O, G] or [O, 1], and the mean threshold, for the record."""

    signs: Tensor
    scale: Tensor
    threshold: float

    @property
    def scale_group(self) -> str:
        """`channel` if a row has one scale for several groups, as in the format."""
        groups = math.ceil(self.signs.shape[1] / GROUP)
        return "128" if self.scale.shape[1] == groups else "channel"

    def dequantize(self) -> Tensor:
        """S*T as float32 [O, I]."""
        scale = self.scale.float()
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(GROUP, dim=1)[:, : self.signs.shape[1]]
        return self.signs.float() * scale


def fit_optimal(
    weight: Tensor, *, importance: Tensor | None = None, scale_group: str = "128"
) -> TernaryFit:
    """T and S that minimise sum_j h_j (w_j - s t_j)^2, exactly, for every (row, group).

    For a fixed s the best T is a threshold on |w| whatever h is, so the best T keeps the k largest
    magnitudes. Keeping k removes (sum h|w|)^2 / sum h of the error: sort, take the best prefix.

    Raises ValueError on weights or importances that are not finite, and on a scale that float16
    cannot hold.
    """
    check_weight(weight)
    width = _group_width(weight, scale_group)
    h = None if importance is None else _grouped_importance(importance, weight, width)
    signs = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = []
    for rows, groups in _row_chunks(weight, width):
        magnitude = groups.float().abs()
        scale = best_scale(magnitude, h).to(torch.float16)
        _check_scale(scale, rows)
        # With the rounded scale, |w| > s/2 is again the best T, so rounding never costs more than
        # it must. The half is exact in float32.
        half = scale.float().unsqueeze(-1) / 2
        kept = (magnitude > half) & (half > 0)
        chosen = torch.where(kept, groups.sign(), torch.zeros_like(groups))
        signs[rows] = chosen.flatten(1)[:, : weight.shape[1]].to(torch.int8)
        scales.append(scale)
    scale = torch.cat(scales)
    return TernaryFit(signs=signs, scale=scale, threshold=_mean(scale) / 2)


def fit_paper(weight: Tensor, *, threshold: float = 0.008) -> TernaryFit:
    """T = sign(w) where |w| > threshold; a row's scale is 0.7 * std of the weights that T keeps."""
    check_weight(weight)
    if not (math.isfinite(threshold) and threshold >= 0):
        raise ValueError(f"threshold={threshold} is not allowed; give a finite number >= 0")
    signs = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = []
    for rows, groups in _row_chunks(weight, weight.shape[1]):
        values = groups.squeeze(1).float()
        kept = values.abs() > threshold
        signs[rows] = torch.where(kept, values.sign(), torch.zeros_like(values)).to(torch.int8)
        count = kept.sum(1).clamp_min(1)
        exact = values.double() * kept
        mean = exact.sum(1) / count
        variance = ((exact - mean.unsqueeze(1)).square() * kept).sum(1) / count
        scale = (PAPER_SCALE * variance.sqrt()).to(torch.float16).unsqueeze(1)
        _check_scale(scale, rows)
        scales.append(scale)
    return TernaryFit(signs=signs, scale=torch.cat(scales), threshold=float(threshold))


def calibrate_threshold(weight: Tensor, importance: Tensor | None, candidates: int = 32) -> float:
    """The threshold with which `fit_paper` has the smallest importance-weighted error.

    The grid is `candidates` evenly spaced quantiles of |w|, the first one 0 (every weight kept).
    """
    check_weight(weight)
    if candidates < 1:
        raise ValueError(f"candidates={candidates} is not allowed; give at least 1")
    grid = _quantiles(weight, candidates)
    h = torch.ones(weight.shape[1], dtype=torch.float64, device=weight.device)
    if importance is not None:
        measured = _grouped_importance(importance, weight, weight.shape[1])[0]
        h = measured if bool(measured.any()) else h
    error = torch.zeros(candidates, dtype=torch.float64, device=weight.device)
    for _, groups in _row_chunks(weight, weight.shape[1]):
        values = groups.squeeze(1).float()
        # Bin b holds the magnitudes above exactly b thresholds of the grid.
        bins = torch.bucketize(values.abs(), grid)
        exact = values.double()

        def above(term: Tensor, bins: Tensor = bins) -> Tensor:
            """Per row and threshold, the sum of `term` over the weights above the threshold."""
            sums = term.new_zeros(len(term), candidates + 1).scatter_add_(1, bins, term)
            return sums.flip(1).cumsum(1).flip(1)[:, 1:]

        count = above(torch.ones_like(exact)).clamp_min(1)
        mean = above(exact) / count
        variance = (above(exact.square()) / count - mean.square()).clamp_min(0)
        # Rounded as it is stored; a threshold whose scale overflows float16 is infinitely bad.
        scale = (PAPER_SCALE * variance.sqrt()).to(torch.float16).double()
        weighted_h = h.expand_as(exact).contiguous()
        gain = 2 * scale * above(weighted_h * exact.abs()) - scale.square() * above(weighted_h)
        error -= torch.where(scale.isfinite(), gain, -torch.inf).sum(0)
    return float(grid[int(error.argmin())])


def exact_ternary(weight: Tensor, scale_group: str = "128") -> TernaryFit | None:
    """The fit that loses nothing, or None: every group must hold only -s, 0, s with s in float16.

    A negative zero counts as 0.
    """
    check_weight(weight)
    width = _group_width(weight, scale_group)
    signs = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = []
    for rows, groups in _row_chunks(weight, width):
        magnitude = groups.abs()
        largest = magnitude.amax(-1, keepdim=True)
        scale = largest.to(torch.float16)
        is_exact = (scale.to(largest.dtype) == largest).all()
        if not bool(is_exact & ((magnitude == 0) | (magnitude == largest)).all()):
            return None
        signs[rows] = groups.sign().flatten(1)[:, : weight.shape[1]].to(torch.int8)
        scales.append(scale.squeeze(-1))
    scale = torch.cat(scales)
    return TernaryFit(signs=signs, scale=scale, threshold=_mean(scale) / 2)


def best_scale(magnitude: Tensor, h: Tensor | None) -> Tensor:
    """The real-valued best scale, float64 [R, G], for |w| of shape [R, G, N] and h of [G, N]."""
    if h is None:
        ordered = magnitude.sort(dim=-1, descending=True).values.double()
        # A short group's padding is zero and sorts last: longer prefixes only lose.
        mass = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device, dtype=torch.float64)
        product = ordered.cumsum(-1)
        mass = mass.expand_as(product)
    else:
        values, order = magnitude.sort(dim=-1, descending=True)
        weights = h.expand(magnitude.shape).gather(-1, order)
        # Nothing that matters is non-zero here: any T is free, so choose it as if all inputs did.
        is_idle = (weights * values).sum(-1, keepdim=True) == 0
        weights = weights.masked_fill(is_idle, 1.0)
        product = (weights * values).cumsum(-1)
        mass = weights.cumsum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    best = (product.square() / mass).argmax(-1, keepdim=True)
    return (product.gather(-1, best) / mass.gather(-1, best)).squeeze(-1)


def _quantiles(weight: Tensor, count: int) -> Tensor:
    """The ascending grid: 0 and the quantiles i/count of |w|, from an evenly strided sample."""
    flat = weight.reshape(-1)
    sample = flat[:: math.ceil(flat.numel() / QUANTILE_SAMPLE)].float().abs().sort().values
    grid = sample[torch.arange(count, device=flat.device) * len(sample) // count].clone()
    grid[0] = 0.0
    return grid


def _group_width(weight: Tensor, scale_group: str) -> int:
    if scale_group not in SCALE_GROUPS:
        raise ValueError(
            f"scale_group={scale_group} is not known; use one of {', '.join(SCALE_GROUPS)}"
        )
    return GROUP if scale_group == "128" else weight.shape[1]


def _row_chunks(weight: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Row ranges with their rows as [R, G, N], a short last group padded with zeros."""
    out_features, in_features = weight.shape
    groups = math.ceil(in_features / width)
    step = max(1, CHUNK_ELEMENTS // (groups * width))
    for start in range(0, out_features, step):
        rows = slice(start, min(start + step, out_features))
        block = F.pad(weight[rows].detach(), (0, groups * width - in_features))
        yield rows, block.view(-1, groups, width)


def _grouped_importance(importance: Tensor, weight: Tensor, width: int) -> Tensor:
    """Importance as float64 [G, N]; the best fit of a group does not depend on its unit."""
    in_features = weight.shape[1]
    if importance.shape != (in_features,):
        raise ValueError(
            f"importance has shape {tuple(importance.shape)}, but the weight has {in_features} "
            "inputs; give one value per input"
        )
    h = importance.detach().to(weight.device, torch.float64)
    if not bool((h.isfinite() & (h >= 0)).all()):
        raise ValueError("importance holds negative or non-finite values; mean squares are >= 0")
    groups = math.ceil(in_features / width)
    h = F.pad(h, (0, groups * width - in_features)).view(groups, width)
    largest = h.amax(1, keepdim=True)
    return h / torch.where(largest > 0, largest, torch.ones_like(largest))


def check_weight(weight: Tensor) -> None:
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(
            f"weight is {weight.dtype} of shape {tuple(weight.shape)}; "
            "give a non-empty floating point matrix [out_features, in_features]"
        )
    low, high = weight.detach().aminmax()
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise ValueError("weight holds NaN or infinite values; repair the source checkpoint")


def _check_scale(scale: Tensor, rows: slice) -> None:
    bad = (~scale.isfinite()).nonzero()
    if len(bad):
        row, group = bad[0].tolist()
        raise ValueError(
            f"the scale of row {rows.start + row}, group {group} exceeds {FLOAT16_MAX:.0f}, the "
            "largest float16; rescale the weight before quantising it"
        )


def _mean(scale: Tensor) -> float:
    return float(scale.double().mean())
