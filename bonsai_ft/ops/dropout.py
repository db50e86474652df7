"""How is dropout made without storing, or even drawing, a mask? From a seed, the same each time.

Random numbers are what dropout costs on a CPU, and its mask is what it costs in memory. Here the
mask is a function of (seed, element): backward, and a checkpointed forward, make it again.
"""

import torch
from torch import Tensor

from bonsai_ft.ops import choose_kernel
from bonsai_ft.ops.cpu_kernels import DTYPES, library

# SplitMix64, as in kernels/cpu/dropout.cpp, in two's complement
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


@torch.library.custom_op("bonsai::dropout", mutates_args=())
def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Zeroes each element with probability p (to within 2^-16), scales the rest by 1 / (1 - p).

    The gradient is the same function of the gradient.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p={p} is not a probability")
    x = x.contiguous()
    if x.dtype not in DTYPES or choose_kernel("auto", x.device.type) != "cpu":
        return _reference(x, p, seed)
    out = torch.empty_like(x)
    library().functions.bonsai_dropout(
        x.data_ptr(),
        x.numel(),
        DTYPES[x.dtype],
        seed,
        p,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@dropout.register_fake
def _(x: Tensor, p: float, seed: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    _, ctx.p, ctx.seed = inputs


def _backward(ctx, dy):
    return dropout(dy, ctx.p, ctx.seed), None, None


dropout.register_autograd(_backward, setup_context=_setup_context)


def _reference(x: Tensor, p: float, seed: int) -> Tensor:
    """The same mask in plain torch, on any device."""
    count = -(-x.numel() // 4)
    state = torch.arange(1, count + 1, device=x.device) * _STEP + _signed(seed)
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    state = state ^ _shifted(state, 31)
    draws = state.view(torch.int16)[: x.numel()].view(x.shape).to(torch.int32) & 0xFFFF
    keep = draws >= int(p * 65536 + 0.5)
    return x * keep * (1 / (1 - p) if p < 1 else 0.0)


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros, which torch has for unsigned numbers only."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
