"""What does one layer cost, forward and backward, from one token to thousands?

Forward is the layer alone. Its calls go round so many copies of the layer that the weights come
from memory and not from a cache, as they do in a model. Forward and backward is what a training
step does with the layer: gradients for x, the LoRA matrices and (ours) the codebooks, never for the
weight; all sides have LoRA of the same rank. The limit is the time of the dense products at the
measured GEMM rate, or of reading our packed bytes at the measured copy bandwidth, whichever is
longer.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bonsai_ft.adapter import TernaryLoraConfig, attach, trainable_groups
from bonsai_ft.bench.models import nf4_linear, plain_linear, random_weight
from bonsai_ft.bench.timing import (
    OURS,
    Limits,
    Report,
    Setup,
    alternate,
    machine,
    measure_limits,
    ratio,
    ratios,
    rounded,
    spread,
)
from bonsai_ft.format import TernaryWeight
from bonsai_ft.model import TernaryLinear, decode_weight

RANK, ALPHA = 8, 16
# in x out: the widest layers of a 1B, two 8B and a 27B model
LAYERS = ((2048, 8192), (4096, 11008), (4096, 14336), (5120, 17408))
TOKENS = (1, 8, 64, 512, 2048)
LINEAR, NF4 = "nn.Linear", "bitsandbytes NF4"
# What bitsandbytes rearranges a layer into when it infers on a CPU.
NF4_INPUTS, NF4_OUTPUTS = 64, 32
# Weights that a side's forward calls go round, more than a cache holds, unless layers are tiny.
COLD_BYTES, MOST_COPIES = 512 << 20, 256
# A turn of a short call lasts at least this long.
TURN_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """Milliseconds by side; `ratios` are ours over each peer."""

    layer: str
    tokens: int
    work: str
    milliseconds: dict[str, float]
    spread: dict[str, list[float]]
    ratios: dict[str, float]
    limit_milliseconds: float
    packed_gb_per_second: float
    codebook_share: float | None = None


class _WithLora(nn.Module):
    """base(x) + (alpha / rank) x A^T B^T, all in one dtype."""

    def __init__(self, base: nn.Module, in_features: int, out_features: int, like: Tensor) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(0.01 * torch.randn(RANK, in_features).to(like))
        self.b = nn.Parameter(0.01 * torch.randn(out_features, RANK).to(like))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (ALPHA / RANK) * F.linear(F.linear(x, self.a), self.b)


class _Holder(nn.Module):
    """Something for an adapter to be attached to."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@dataclass(frozen=True, kw_only=True)
class _Side:
    plain: list[nn.Module]
    training: nn.Module
    trainable: list[nn.Parameter]


def measure_operator(
    setup: Setup,
    layers: tuple[tuple[int, int], ...] = LAYERS,
    tokens: tuple[int, ...] = TOKENS,
    turn_seconds: float = TURN_SECONDS,
    cold_bytes: int = COLD_BYTES,
) -> Report:
    """Every layer (in, out) at every number of tokens."""
    about = machine(setup)
    limits = measure_limits(setup)
    rows, notes = [], []
    for in_features, out_features in layers:
        weight = random_weight(out_features, in_features, torch.Generator().manual_seed(0))
        sides, codebook, missing = _sides(weight, setup, cold_bytes)
        notes += [note for note in missing if note not in notes]
        for count in tokens:
            rows += _rows(weight, sides, codebook, count, limits, setup, turn_seconds)
    overhead = call_overhead(setup, turn_seconds)
    return Report(
        bench="operator",
        subject=", ".join(f"{i}x{o}" for i, o in layers),
        settings={
            "rank": RANK,
            "repeats": setup.repeats,
            "call_microseconds": overhead,
            "call_layer": "128x128, 1 token",
        },
        machine=about,
        limits=limits,
        rows=rows,
        notes=notes,
    )


def _sides(
    weight: TernaryWeight, setup: Setup, cold_bytes: int
) -> tuple[dict[str, _Side], list[nn.Parameter], list[str]]:
    """Ours and the peers, our codebooks, and which peers are missing."""

    def ternary() -> TernaryLinear:
        layer = TernaryLinear(_copy(weight))
        layer.kernel = setup.kernel
        return layer.to(setup.device).requires_grad_(False)

    def copies(make: Callable[[], nn.Module]) -> list[nn.Module]:
        first = make().eval()
        size = sum(p.nbytes for p in first.parameters())
        more = min(cold_bytes // size, MOST_COPIES)
        return [first, *(make().eval() for _ in range(more))]

    adapted = _Holder(ternary())
    config = TernaryLoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["layer"])
    attach(adapted, config)
    adapted.to(setup.device)
    groups = trainable_groups(adapted)
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    sides = {OURS: _Side(plain=copies(ternary), training=adapted, trainable=trainable)}
    notes: list[str] = []
    if not setup.with_peers:
        return sides, groups["codebook"], notes
    dense = decode_weight(ternary(), setup.dtype).to(setup.device)

    def add(name: str, make: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
        # two layers: bitsandbytes rearranges one that infers, and back when it trains
        inner = make(dense, None)
        training = _WithLora(inner, weight.in_features, weight.out_features, dense)
        sides[name] = _Side(
            plain=copies(lambda: make(dense.clone(), None)),
            training=training,
            trainable=[training.a, training.b],
        )

    add(LINEAR, plain_linear)
    if weight.in_features % NF4_INPUTS or weight.out_features % NF4_OUTPUTS:
        notes.append(
            f"without {NF4} for {weight.in_features}x{weight.out_features}: on a CPU it needs "
            f"multiples of {NF4_INPUTS} and {NF4_OUTPUTS}"
        )
        return sides, groups["codebook"], notes
    try:
        add(NF4, nf4_linear)
    except ImportError as error:
        notes.append(f"without {NF4}: {error}")
    return sides, groups["codebook"], notes


def _copy(weight: TernaryWeight) -> TernaryWeight:
    return TernaryWeight.from_tensors(
        {suffix: tensor.clone() for suffix, tensor in weight.tensors().items()},
        out_features=weight.out_features,
        in_features=weight.in_features,
        packing=weight.packing,
    )


def _rows(
    weight: TernaryWeight,
    sides: dict[str, _Side],
    codebooks: list[nn.Parameter],
    tokens: int,
    limits: Limits,
    setup: Setup,
    turn_seconds: float,
) -> list[OperatorRow]:
    x = torch.randn(tokens, weight.in_features, device=setup.device).to(setup.dtype)
    dy = torch.randn(tokens, weight.out_features, device=setup.device).to(setup.dtype)
    wanted = x.clone().requires_grad_()

    def step(side: _Side, left_out: tuple[nn.Parameter, ...] = ()) -> None:
        known = {id(p) for p in left_out}
        inputs = [wanted, *(p for p in side.trainable if id(p) not in known)]
        torch.autograd.grad(side.training(wanted), inputs, dy)

    def frozen_step() -> None:
        for codebook in codebooks:
            codebook.requires_grad_(False)
        step(sides[OURS], tuple(codebooks))
        for codebook in codebooks:
            codebook.requires_grad_(True)

    def next_layer(layers: Iterator[nn.Module]) -> None:
        next(layers)(x)

    def timed(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        return alternate(calls, repeats=setup.repeats, device=setup.device, at_least=turn_seconds)

    with torch.inference_mode():
        forward = timed(
            {name: partial(next_layer, cycle(side.plain)) for name, side in sides.items()}
        )
    both = timed(
        {name: partial(step, side) for name, side in sides.items()}
        | {"frozen codebooks": frozen_step}
    )
    frozen = both.pop("frozen codebooks")

    def row(work: str, seconds: dict[str, list[float]], passes: int, **more: Any) -> OperatorRow:
        flop = passes * 2.0 * tokens * weight.out_features * weight.in_features
        ours = statistics.median(seconds[OURS])
        return OperatorRow(
            layer=f"{weight.in_features}x{weight.out_features}",
            tokens=tokens,
            work=work,
            milliseconds={n: rounded(1e3 * statistics.median(s)) for n, s in seconds.items()},
            spread={n: spread(s, 1e3) for n, s in seconds.items()},
            ratios=ratios(seconds),
            limit_milliseconds=rounded(1e3 * limits.seconds(flop, passes * weight.nbytes)),
            packed_gb_per_second=rounded(passes * weight.nbytes / ours / 1e9),
            **more,
        )

    share = rounded(1 - ratio(frozen, both[OURS]))
    return [
        row("forward", forward, 1),
        row("forward + backward", both, 2, codebook_share=share),
    ]


def call_overhead(setup: Setup, turn_seconds: float = TURN_SECONDS) -> dict[str, float]:
    """Microseconds of a call that has next to nothing to compute: one token, 128 x 128."""
    weight = random_weight(128, 128, torch.Generator().manual_seed(0))
    layer = TernaryLinear(weight).to(setup.device).requires_grad_(False)
    layer.kernel = setup.kernel
    dense = plain_linear(decode_weight(layer, setup.dtype), None)
    x = torch.randn(1, 128, device=setup.device).to(setup.dtype)
    words = layer.codewords()
    arguments = (layer.ternary, layer.scale, layer.codes, words, 128, weight.packing, setup.kernel)
    sides = {
        "operator": lambda: torch.ops.bonsai.ternary_linear(x, *arguments),
        "layer": lambda: layer(x),
        LINEAR: lambda: dense(x),
    }
    with torch.inference_mode():
        seconds = alternate(
            sides, repeats=setup.repeats, device=setup.device, at_least=turn_seconds
        )
    return {name: rounded(1e6 * statistics.median(values)) for name, values in seconds.items()}
