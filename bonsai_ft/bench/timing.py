"""How is a duration or a peak of memory measured so that two sides can be compared?

Sides take turns in one process, in changing order, and a ratio is the median of the turns' ratios:
what slows the machine down for a while slows both. Memory is measured in a fresh process per side.
"""

import ctypes
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bonsai_ft.ops import available_kernels, choose_kernel

OURS = "bonsai_ft"
# Matrices of the product and bytes of the copy that stand for the machine's limits.
PRODUCT = (2048, 4096, 4096)
COPY_BYTES = 256 << 20
PEERS = ("transformers", "peft", "bitsandbytes", "kernels", "llama_cpp_python")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all sides of a measurement have in common."""

    kernel: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    repeats: int = 5
    with_peers: bool = True
    product: tuple[int, int, int] = PRODUCT
    copy_bytes: int = COPY_BYTES

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats {self.repeats}: it must be 1 or more")
        choose_kernel(self.kernel, self.device)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine can do at best, measured in the same run.

    A copy of n bytes in t seconds counts as n / t; the memory then moved 2 n.
    """

    gemm_gflop_per_second: float
    copy_gb_per_second: float

    def seconds(self, flop: float, num_bytes: float) -> float:
        """The least time for that many operations and bytes."""
        return max(flop / self.gemm_gflop_per_second, num_bytes / self.copy_gb_per_second) / 1e9


@dataclass(frozen=True, kw_only=True)
class Report:
    """One measurement: rows are dataclasses of its own kind."""

    bench: str
    subject: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    limits: Limits
    rows: list[Any]
    notes: list[str] = field(default_factory=list)


def machine(setup: Setup) -> dict[str, Any]:
    """Processor, threads, versions, and how busy the machine was when this was asked."""
    chosen = choose_kernel(setup.kernel, setup.device)
    [kernel] = [report for report in available_kernels() if report.name == chosen]
    versions = {"torch": str(torch.__version__)}
    for name in PEERS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    is_cuda = setup.device == "cuda"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    return {
        "processor": torch.cuda.get_device_name() if is_cuda else _processor(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        "kernel": f"{kernel.name} ({kernel.detail})",
        "dtype": str(setup.dtype).removeprefix("torch."),
        "load_average_at_start": round(load, 2),
        "versions": versions,
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def measure_limits(setup: Setup) -> Limits:
    """The rate of a large product in `setup.dtype`, and of a copy too large for the caches.

    Of seven turns the best one: a limit is what the machine can do.
    """
    rows, inner, columns = setup.product
    a = torch.randn(rows, inner, device=setup.device).to(setup.dtype)
    b = torch.randn(inner, columns, device=setup.device).to(setup.dtype)
    source = torch.ones(max(1, setup.copy_bytes // 8), dtype=torch.int64, device=setup.device)
    target = torch.empty_like(source)
    sides = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    seconds = alternate(sides, repeats=7, device=setup.device)
    flop = 2 * rows * inner * columns
    return Limits(
        gemm_gflop_per_second=rounded(flop / min(seconds["product"]) / 1e9),
        copy_gb_per_second=rounded(source.nbytes / min(seconds["copy"]) / 1e9),
    )


# ---------------------------------------------------------------- time


def alternate(
    sides: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    device: str = "cpu",
    at_least: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of a call of each side, turn by turn; the call that warms up is not among them.

    A turn calls a side as often as it takes to fill `at_least` seconds.
    """
    calls = {}
    for name, run in sides.items():
        run()
        once = _seconds(run, 1, device) if at_least else math.inf
        calls[name] = max(1, math.ceil(at_least / max(once, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(repeats):
        for name in order:
            seconds[name].append(_seconds(sides[name], calls[name], device))
        order.reverse()
    return seconds


def _seconds(run: Callable[[], object], calls: int, device: str) -> float:
    synchronise(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    synchronise(device)
    return (time.perf_counter() - started) / calls


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the turns of ours / theirs."""
    return rounded(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)))


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Ours over each peer."""
    return {name: ratio(seconds[OURS], theirs) for name, theirs in seconds.items() if name != OURS}


def spread(values: list[float], factor: float = 1.0) -> list[float]:
    """Lowest and highest."""
    return [rounded(factor * min(values)), rounded(factor * max(values))]


def rounded(value: float) -> float:
    """Four digits: more would only be noise."""
    return float(f"{value:.4g}")


# ---------------------------------------------------------------- memory, in fresh processes


def run_child(what: str, **request: Any) -> dict[str, Any]:
    """The answer of `bonsai_ft.bench.__main__` in a process of its own; RuntimeError if it fails.

    The process has as many threads as this one.
    """
    request = {"what": what, "threads": torch.get_num_threads(), **request}
    command = [sys.executable, "-m", "bonsai_ft.bench", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"measuring {what} in a process of its own failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def memory_of(device: str) -> dict[str, int]:
    """`resident` and `peak` bytes of this process (CPU) or of the device's tensors (CUDA).

    Empty where the system does not say.
    """
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        return {"resident": torch.cuda.memory_allocated(), "peak": peak}
    lines = []
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    names = {"VmRSS:": "resident", "VmHWM:": "peak"}
    fields = (line.split() for line in lines)
    return {names[part[0]]: 1024 * int(part[1]) for part in fields if part[0] in names}


def forget_peak(device: str) -> bool:
    """Lets the peak start from what is held now; False where that is not possible.

    What the C heap holds free is given back first.
    """
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError, TypeError):
        return False
    return True
