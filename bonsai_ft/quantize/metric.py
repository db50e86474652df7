"""How far is a packed weight from the float one, in weights and in outputs?

The error of a layer's outputs is tr(D H D^T), D being the error of the weight and H = E[x x^T] the
second moment of the layer's inputs, [I, I].
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bonsai_ft.format.packing import GROUP

__all__ = ["checked_moment", "damped", "output_error", "quadratic", "relative_mse", "row_slices"]

# 32 MiB of float32 for the rows that are compared at a time.
BATCH_ELEMENTS = 1 << 23


def relative_mse(weight: Tensor, dequantised: Tensor) -> float:
    """sum (w - q)^2 / sum w^2."""
    lost = total = 0.0
    for rows in row_slices(weight):
        reference = weight[rows].double()
        lost += float((reference - dequantised[rows].double()).square().sum())
        total += float(reference.square().sum())
    return _ratio(lost, total)


def output_error(weight: Tensor, dequantised: Tensor, second_moment: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T) with D = W - Q: the relative mean square error of layer outputs.

    Computed in the precision of `second_moment`, at least float32, and summed in float64.
    """
    h = second_moment.to(torch.promote_types(second_moment.dtype, torch.float32))
    lost = sum(
        quadratic(weight[rows].to(h) - dequantised[rows].to(h), h) for rows in row_slices(weight)
    )
    total = sum(quadratic(weight[rows].to(h), h) for rows in row_slices(weight))
    return _ratio(lost, total)


def checked_moment(second_moment: Tensor, error: Tensor) -> Tensor:
    """H as float32 with mean diagonal 1, symmetric."""
    in_features = error.shape[1]
    if second_moment.shape != (in_features, in_features):
        raise ValueError(
            f"second_moment has shape {tuple(second_moment.shape)}, but the layer has "
            f"{in_features} inputs; give [{in_features}, {in_features}]"
        )
    diagonal = second_moment.diagonal().double()
    if not bool(second_moment.isfinite().all() & (diagonal >= 0).all()):
        raise ValueError("second_moment holds non-finite values or a negative mean square")
    unit = float(diagonal.mean())
    if unit == 0:
        # No input was ever seen: all of them count the same.
        return torch.eye(in_features, device=error.device)
    h = (second_moment.to(error.device) / unit).float()
    return (h + h.T) / 2


def damped(h: Tensor, damping: float, *, width: int = GROUP) -> Tensor:
    """H + damping * mean(diag H), more until diagonal blocks of this width are positive definite.

    A measured H is singular when inputs are dead or samples are few.
    """
    level = damping
    for _ in range(8):
        raised = h.clone()
        raised.diagonal().add_(level * float(h.diagonal().mean()))
        failed = [
            torch.linalg.cholesky_ex(rows[:, i * width : i * width + len(rows)].double()).info
            for i, rows in enumerate(raised.split(width))
        ]
        if not any(int(info) for info in failed):
            return raised
        level = max(10 * level, 1e-6)
    raise ValueError("second_moment is not positive semi-definite; accumulate it in float64")


def quadratic(difference: Tensor, h: Tensor) -> float:
    """tr(D H D^T)."""
    return float(((difference @ h) * difference).sum(dtype=torch.float64))


def row_slices(weight: Tensor) -> Iterator[slice]:
    step = max(1, BATCH_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def _ratio(lost: float, total: float) -> float:
    if total > 0:
        return lost / total
    return 0.0 if lost == 0 else math.inf
