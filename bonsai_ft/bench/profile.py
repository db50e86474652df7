"""Where does the time of a training step go, operation by operation?"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bonsai_ft.bench.step import prepare, random_ids
from bonsai_ft.bench.timing import (
    OURS,
    Report,
    Setup,
    machine,
    measure_limits,
    rounded,
    synchronise,
)

SHOWN = 16
REST = "everything else"


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """Time in one operation itself, without what it calls; `share` is of all operations' time."""

    operation: str
    calls: int
    milliseconds: float
    share: float


def measure_profile(setup: Setup, base: Path, *, rows: int = 4, length: int = 256) -> Report:
    """One step of ours with checkpointing, after one that warms up."""
    about = machine(setup)
    limits = measure_limits(setup)
    trainee = prepare(
        OURS,
        base,
        random_ids(base, rows, length),
        kernel=setup.kernel,
        dtype=setup.dtype,
        device=setup.device,
        with_checkpointing=True,
    )
    trainee.step()
    is_cuda = setup.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    synchronise(setup.device)
    started = time.perf_counter()
    with profile(activities=activities) as profiler:
        trainee.step()
        synchronise(setup.device)
    seconds = time.perf_counter() - started
    found = [
        (event.key, event.count, _own(event, is_cuda) / 1e3) for event in profiler.key_averages()
    ]
    found.sort(key=lambda one: -one[2])
    total = sum(own for _, _, own in found)
    rest = found[SHOWN:]
    shown = [*found[:SHOWN], (REST, sum(n for _, n, _ in rest), sum(own for *_, own in rest))]
    return Report(
        bench="profile",
        subject=base.stem,
        settings={"rows": rows, "length": length, "seconds_profiled": rounded(seconds)},
        machine=about,
        limits=limits,
        rows=[
            ProfileRow(
                operation=name, calls=calls, milliseconds=rounded(own), share=rounded(own / total)
            )
            for name, calls, own in shown
        ],
    )


def _own(event: torch.autograd.profiler_util.FunctionEventAvg, is_cuda: bool) -> float:
    return float(event.self_device_time_total if is_cuda else event.self_cpu_time_total)
