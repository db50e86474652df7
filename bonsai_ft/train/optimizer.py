"""Which parameters move, how fast, by which optimiser?"""

import math

import torch
from torch import nn

from bonsai_ft.config import Optimizer, Schedule, TrainSection


def build_optimizer(
    groups: dict[str, list[nn.Parameter]], settings: TrainSection, kind: Optimizer, device: str
) -> torch.optim.Optimizer:
    """AdamW over parameter kinds; codebooks have their own learning rate and no weight decay.

    Raises ValueError for 8-bit AdamW without a GPU.
    """
    rates = {"codebook": settings.codebook_learning_rate}
    parameters = [
        {
            "params": tensors,
            "lr": rates.get(name, settings.learning_rate),
            "peak_lr": rates.get(name, settings.learning_rate),
            "weight_decay": 0.0 if name == "codebook" else settings.weight_decay,
            "name": name,
        }
        for name, tensors in groups.items()
        if tensors
    ]
    if not parameters:
        raise ValueError("no parameter is trainable; check adapter.lora and adapter.codebooks")
    betas = (settings.beta1, settings.beta2)
    if kind == Optimizer.auto:
        kind = Optimizer.adamw_8bit if device == "cuda" else Optimizer.adamw
    if kind == Optimizer.adamw:
        return torch.optim.AdamW(parameters, betas=betas)
    if device != "cuda":
        raise ValueError(
            f"hardware.optimizer=adamw_8bit needs a GPU, the run is on {device}; use adamw"
        )
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, betas=betas)


def lr_factor(step: int, settings: TrainSection, total_steps: int) -> float:
    """What the peak learning rates are multiplied by at `step` (0-based)."""
    warmup = math.ceil(settings.warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    match settings.schedule:
        case Schedule.cosine:
            return 0.5 * (1 + math.cos(math.pi * progress))
        case Schedule.linear:
            return 1 - progress
        case _:
            return 1.0


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Sets every group's rate for this step; returns them by kind."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return {group["name"]: group["lr"] for group in optimizer.param_groups}
