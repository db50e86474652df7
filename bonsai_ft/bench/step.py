"""What does a training step cost in time and memory, beside LoRA on bfloat16 and on 4-bit weights?

All sides have the same architecture, tokens, targets, LoRA rank and dropout, AdamW, and gradient
checkpointing; ours trains its codebooks besides. Ours computes its loss in slices, the peers the
one that transformers gives them; `same_loss` adds PEFT with ours, so that only layers differ.

The limit is the time of the dense products at the measured GEMM rate: with checkpointing, blocks
run forward twice and backward for x alone, the head forward and backward. Attention's own products
are not in it.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bonsai_ft.adapter import TernaryLoraConfig, attach
from bonsai_ft.api import load_model
from bonsai_ft.bench.models import float_copy, nf4_linear, sizes_of
from bonsai_ft.bench.timing import (
    OURS,
    Limits,
    Report,
    Setup,
    alternate,
    forget_peak,
    machine,
    measure_limits,
    memory_of,
    ratio,
    rounded,
    run_child,
    spread,
)
from bonsai_ft.data.batches import Batch
from bonsai_ft.train.loss import sum_loss
from bonsai_ft.train.memory import RETURNED_BYTES, return_large_blocks

# How large blocks must be before glibc, left alone, gives them back at last.
LIMIT_OF_GLIBC = 32 << 20
RANK, ALPHA, DROPOUT = 8, 16, 0.05
LORA, QLORA, SAME_LOSS = "PEFT LoRA", "NF4 QLoRA", "PEFT LoRA, our loss"
MEMORY_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One side; `time_ratio` and `memory_ratio` are ours over this side's.

    `resident_bytes` is held when everything is loaded, `peak_bytes` after two steps; both of a
    fresh process.
    """

    side: str
    seconds: float
    spread: list[float]
    tokens_per_second: float
    time_ratio: float | None
    limit_seconds: float
    first_loss: float
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    memory_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model that trains; `step` runs forward, backward and update, and gives the loss."""

    model: PreTrainedModel
    step: Callable[[], float]


def measure_step(
    setup: Setup,
    base: Path,
    *,
    rows: int = 4,
    length: int = 256,
    same_loss: bool = False,
    with_memory: bool = True,
    with_checkpointing: bool = True,
) -> Report:
    """Every side on the base at `base` (or its float copy), rows x length random tokens."""
    _check_batch(rows, length)
    about = machine(setup)
    limits = measure_limits(setup)
    ids = random_ids(base, rows, length)
    notes: list[str] = []
    trainees: dict[str, Trainee] = {}
    for name in (OURS, LORA, QLORA) if setup.with_peers else (OURS,):
        try:
            trainees[name] = prepare(
                name,
                base,
                ids,
                kernel=setup.kernel,
                dtype=setup.dtype,
                device=setup.device,
                with_checkpointing=with_checkpointing,
            )
        except ImportError as error:
            notes.append(f"without {name}: {error}")
    if same_loss and LORA in trainees:
        model = trainees[LORA].model
        trainees[SAME_LOSS] = Trainee(model=model, step=_stepper(model, _our_loss(model, ids)))
    losses: dict[str, float] = {}

    def run(name: str) -> None:
        if setup.device == "cpu":
            # as in train, and for the others where glibc itself would end up
            return_large_blocks(RETURNED_BYTES if name == OURS else LIMIT_OF_GLIBC)
        torch.manual_seed(0)
        loss = trainees[name].step()
        losses.setdefault(name, loss)

    seconds = alternate(
        {name: partial(run, name) for name in trainees},
        repeats=setup.repeats,
        device=setup.device,
    )
    memory: dict[str, dict[str, Any]] = {}
    names = [name for name in trainees if name != SAME_LOSS]
    trainees.clear()
    if with_memory:
        for name in names:
            memory[name] = run_child(
                "step",
                side=name,
                base=str(base),
                rows=rows,
                length=length,
                kernel=setup.kernel,
                dtype=str(setup.dtype).removeprefix("torch."),
                device=setup.device,
                with_checkpointing=with_checkpointing,
            )
        notes += _memory_notes(memory)
    limit = limit_seconds(base, rows * length, limits, with_checkpointing)
    return Report(
        bench="step",
        subject=base.stem,
        settings={
            "rows": rows,
            "length": length,
            "rank": RANK,
            "checkpointing": with_checkpointing,
            "repeats": setup.repeats,
        },
        machine=about,
        limits=limits,
        rows=[_row(name, seconds, losses[name], memory, limit, rows * length) for name in seconds],
        notes=notes,
    )


def _check_batch(rows: int, length: int) -> None:
    if rows < 1:
        raise ValueError(f"--rows {rows}: it must be 1 or more")
    if length < 2:
        raise ValueError(f"--length {length}: it must be 2 or more")


def _row(
    name: str,
    seconds: dict[str, list[float]],
    loss: float,
    memory: dict[str, dict[str, Any]],
    limit: float,
    tokens: int,
) -> StepRow:
    median = statistics.median(seconds[name])
    own, ours = memory.get(name, {}), memory.get(OURS, {})
    has_peaks = name != OURS and "peak" in own and "peak" in ours
    return StepRow(
        side=name,
        seconds=rounded(median),
        spread=spread(seconds[name]),
        tokens_per_second=rounded(tokens / median),
        time_ratio=None if name == OURS else ratio(seconds[OURS], seconds[name]),
        limit_seconds=rounded(limit),
        first_loss=rounded(loss),
        resident_bytes=own.get("resident"),
        peak_bytes=own.get("peak"),
        memory_ratio=rounded(ours["peak"] / own["peak"]) if has_peaks else None,
    )


def _memory_notes(memory: dict[str, dict[str, Any]]) -> list[str]:
    if not all("peak" in one for one in memory.values()):
        return ["this system does not say how much memory a process held"]
    notes = []
    if memory[OURS].get("imports"):
        notes.append(
            f"of each peak, {memory[OURS]['imports'] / 1e6:.0f} MB are Python and its libraries"
        )
    if len(memory) > 1:
        notes.append(
            "a peer's peak leaves out what preparing its weights took, ours includes loading"
        )
    return notes


def random_ids(base: Path, rows: int, length: int) -> Tensor:
    """The same tokens for every side and process."""
    vocabulary = sizes_of(base).vocabulary
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def limit_seconds(base: Path, tokens: int, limits: Limits, with_checkpointing: bool) -> float:
    sizes = sizes_of(base)
    passes = 3 if with_checkpointing else 2
    return limits.seconds(
        2.0 * tokens * (passes * sizes.body_weights + 2 * sizes.head_weights), 0.0
    )


def prepare(
    side: str,
    base: Path,
    ids: Tensor,
    *,
    kernel: str,
    dtype: torch.dtype,
    device: str,
    with_checkpointing: bool,
) -> Trainee:
    """Loads or converts the base, attaches LoRA, and makes the step ready."""
    model: Any
    if side == OURS:
        model = load_model(base, dtype=dtype, device_map=device, kernel=kernel)
    elif side == LORA:
        model = float_copy(base, dtype, device)
    else:
        model = float_copy(base, dtype, device, nf4_linear)
    torch.manual_seed(0)
    # on float layers this is PEFT's own LoRA, injected as get_peft_model does
    attach(
        model,
        TernaryLoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=DROPOUT,
            target_modules=sizes_of(base).layer_names,
        ),
    )
    model.train()
    if with_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    ids = ids.to(device)
    if side == OURS:
        return Trainee(model=model, step=_stepper(model, _our_loss(model, ids)))
    return Trainee(
        model=model,
        step=_stepper(model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss),
    )


def _our_loss(model: PreTrainedModel, ids: Tensor) -> Callable[[], Tensor]:
    batch = Batch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), [])
    return lambda: sum_loss(model, batch) / batch.num_targets


def _stepper(model: PreTrainedModel, loss: Callable[[], Tensor]) -> Callable[[], float]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5)

    def step() -> float:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


def step_memory(
    *,
    side: str,
    base: str,
    rows: int,
    length: int,
    kernel: str,
    dtype: str,
    device: str,
    with_checkpointing: bool,
) -> dict[str, Any]:
    """In a process of its own: bytes held before and after loading, and at most in two steps.

    What a peer's conversion took is forgotten: its users load weights that are ready.
    """
    if side == OURS and device == "cpu":
        return_large_blocks()
    imports = memory_of(device).get("resident")
    path = Path(base)
    trainee = prepare(
        side,
        path,
        random_ids(path, rows, length),
        kernel=kernel,
        dtype=getattr(torch, dtype),
        device=device,
        with_checkpointing=with_checkpointing,
    )
    is_clean = side == OURS or forget_peak(device)
    resident = memory_of(device).get("resident")
    for _ in range(MEMORY_STEPS):
        trainee.step()
    peak = memory_of(device).get("peak") if is_clean else None
    found = {"imports": imports, "resident": resident, "peak": peak}
    return {name: value for name, value in found.items() if value is not None}
