"""How fast are tokens made and prompts read, by `generate` and by what else could do it?

Decoding is the difference between a short prompt answered with many tokens and with one, so that
reading the prompt and setting up count for no side. Every answer is greedy and of full length. The
limit of decoding is reading all weights once per token at the measured copy bandwidth, that of a
prompt its products at the measured GEMM rate.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from bonsai_ft import generate as generation
from bonsai_ft.api import load_model
from bonsai_ft.bench.models import Sizes, float_copy, sizes_of
from bonsai_ft.bench.timing import (
    OURS,
    Limits,
    Report,
    Setup,
    alternate,
    machine,
    measure_limits,
    ratio,
    rounded,
)
from bonsai_ft.decode import start_decoding

DYNAMIC, STATIC = "transformers", "transformers, static cache"
PAD = 0


@dataclass(frozen=True, kw_only=True)
class DecodeSide:
    """`generate(ids, count)` answers ids [1, T] with count tokens; bytes are those of the weights.

    `weight_bytes` is what one token reads: the body and the head.
    """

    generate: Callable[[Tensor, int], object]
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Tokens per second of one side; ratios are ours over this side's, above 1 if ours is faster.

    `answer_tokens_per_second` counts the prompt's time too, as `generate` reports it.
    """

    side: str
    tokens_per_second: float
    spread: list[float]
    ratio: float | None
    limit_tokens_per_second: float
    answer_tokens_per_second: float
    prefill_tokens_per_second: float
    prefill_ratio: float | None
    prefill_limit_tokens_per_second: float


def measure_decode(
    setup: Setup,
    base: Path,
    *,
    prompt: int = 16,
    new_tokens: int = 64,
    long_prompt: int = 256,
    others: dict[str, DecodeSide] | None = None,
) -> Report:
    """Ours, transformers on the float copy, and `others`."""
    for flag, value in (("prompt", prompt), ("long-prompt", long_prompt)):
        if value < 1:
            raise ValueError(f"--{flag} {value}: it must be 1 or more")
    if new_tokens < 2:
        raise ValueError(f"--new-tokens {new_tokens}: it must be 2 or more")
    about = machine(setup)
    limits = measure_limits(setup)
    sizes = sizes_of(base)
    generator = torch.Generator().manual_seed(1)
    short, long = (
        torch.randint(0, sizes.vocabulary, (1, length), generator=generator)
        for length in (prompt, long_prompt)
    )
    ours = load_model(base, dtype=setup.dtype, device_map=setup.device, kernel=setup.kernel).eval()
    element = torch.finfo(setup.dtype).bits // 8
    head = sizes.head_weights * element
    sides = {
        OURS: DecodeSide(generate=_ours(ours), weight_bytes=sizes.body_bytes + head),
        **(_transformers(setup, base, element * sizes.body_weights + head)),
        **(others or {}),
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, side in sides.items():
        calls |= {
            f"{name}|many": partial(side.generate, short, new_tokens),
            f"{name}|one": partial(side.generate, short, 1),
            f"{name}|long": partial(side.generate, long, 1),
        }
    seconds = alternate(calls, repeats=setup.repeats, device=setup.device)
    counts = {"new": new_tokens, "long": long_prompt}
    return Report(
        bench="decode",
        subject=base.stem,
        settings={
            "prompt": prompt,
            "new_tokens": new_tokens,
            "long_prompt": long_prompt,
            "repeats": setup.repeats,
            "computed_by": _computed_by(ours, short),
        },
        machine=about,
        limits=limits,
        rows=[_row(name, side, seconds, counts, limits, sizes) for name, side in sides.items()],
    )


def _row(
    name: str,
    side: DecodeSide,
    seconds: dict[str, list[float]],
    counts: dict[str, int],
    limits: Limits,
    sizes: Sizes,
) -> DecodeRow:
    # a difference that noise has made negative is not a speed
    def decoding(who: str) -> list[float]:
        pairs = zip(seconds[f"{who}|many"], seconds[f"{who}|one"], strict=True)
        return [max(many - one, 1e-9) / (counts["new"] - 1) for many, one in pairs]

    own, long = decoding(name), seconds[f"{name}|long"]
    is_ours = name == OURS
    prefill_flop = 2.0 * (sizes.body_weights * counts["long"] + sizes.head_weights)
    return DecodeRow(
        side=name,
        tokens_per_second=rounded(1 / statistics.median(own)),
        spread=[rounded(1 / max(own)), rounded(1 / min(own))],
        ratio=None if is_ours else ratio(own, decoding(OURS)),
        limit_tokens_per_second=rounded(1 / limits.seconds(0.0, side.weight_bytes)),
        answer_tokens_per_second=rounded(
            counts["new"] / statistics.median(seconds[f"{name}|many"])
        ),
        prefill_tokens_per_second=rounded(counts["long"] / statistics.median(long)),
        prefill_ratio=None if is_ours else ratio(long, seconds[f"{OURS}|long"]),
        prefill_limit_tokens_per_second=rounded(counts["long"] / limits.seconds(prefill_flop, 0.0)),
    )


def _ours(model: PreTrainedModel) -> Callable[[Tensor, int], object]:
    """What `answer` does between the tokenizer's two parts, greedy and without an end."""

    @torch.inference_mode()
    def run(ids: Tensor, count: int) -> Tensor:
        ids = ids.to(model.device)
        decoding = start_decoding(model, ids, torch.ones_like(ids), count)
        if decoding is None:
            with generation._few_threads(model):
                return _generate(model, ids, count, None)
        return generation._decode(decoding, ids, count, ([-1], PAD), [], True, None)

    return run


def _computed_by(model: PreTrainedModel, ids: Tensor) -> str:
    ids = ids.to(model.device)
    has_decoder = start_decoding(model, ids, torch.ones_like(ids), 1) is not None
    return "the compiled decoder" if has_decoder else "transformers"


def _transformers(setup: Setup, base: Path, weight_bytes: int) -> dict[str, DecodeSide]:
    if not setup.with_peers:
        return {}
    model = float_copy(base, setup.dtype, setup.device).eval()

    def side(cache: str | None) -> DecodeSide:
        @torch.inference_mode()
        def run(ids: Tensor, count: int) -> Tensor:
            return _generate(model, ids.to(setup.device), count, cache)

        return DecodeSide(generate=run, weight_bytes=weight_bytes)

    return {DYNAMIC: side(None), STATIC: side("static")}


def _generate(model: PreTrainedModel, ids: Tensor, count: int, cache: str | None) -> Tensor:
    config = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=PAD,
        cache_implementation=cache,
        disable_compile=True,
    )
    before = model.generation_config
    # an end token of its own would be filled in
    model.generation_config = GenerationConfig()
    try:
        return cast(Any, model).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
    finally:
        model.generation_config = before
