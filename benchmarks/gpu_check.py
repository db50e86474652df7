"""What do the CUDA kernels do on this machine's GPU? Their tests, then their speed beside peers.

    PYTHONPATH=. python benchmarks/gpu_check.py                     # or: make gpu-check
    PYTHONPATH=. python benchmarks/gpu_check.py --quick --output /tmp/out
    PYTHONPATH=. python benchmarks/gpu_check.py --only kernels,operator

It needs torch, transformers, peft, accelerate, cuda-core and pytest, and runs from a checkout that
is not installed. What was measured stands in `benchmarks/results/<card>.json`, written anew after
every part, so that a run that is cut short keeps what it has. Exit code 1: a test failed or losses
disagree; 2: there is no GPU.

`operator`, `step` and `decode` are those of `bonsai_ft.bench`: what a user waits for, Python and
launches included. `kernels` is the GPU's own time: layers are captured in a CUDA graph and replayed
between two CUDA events.
"""

import argparse
import copy
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bonsai_ft.bench import (
    Report,
    Setup,
    as_json,
    find_model,
    markdown,
    measure_decode,
    measure_operator,
    measure_step,
)
from bonsai_ft.bench.layers import LINEAR
from bonsai_ft.bench.models import plain_linear, random_weight
from bonsai_ft.bench.step import LORA
from bonsai_ft.bench.timing import OURS, Limits, measure_limits, ratio, rounded
from bonsai_ft.model import TernaryLinear, decode_weight

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# The files with tests that only a GPU can run.
TESTS = ("tests/test_cuda_kernels.py", "tests/test_gpu_check.py", "tests/test_nvrtc.py")
PARTS = ("tests", "kernels", "operator", "step", "decode")
# in x out: the widest layers of a 1B, an 8B and a 27B model
LAYERS = ((2048, 8192), (4096, 14336), (5120, 17408))
TOKENS = (1, 8, 64, 512, 2048)
QUICK_LAYERS, QUICK_TOKENS = LAYERS[1:2], (1, 64, 2048)
STEP_BASES = ("random:smollm2_135m", "random:1b")
DECODE_BASE = "random:1b"
# A GPU's product and copy, several times its caches.
PRODUCT, COPY_BYTES = (8192, 8192, 8192), 2 << 30
# Weights that one replay goes round; the largest L2 cache in use has 126 MiB.
COLD_BYTES = 512 << 20
MOST_COPIES = 64
TURN_SECONDS = 0.03
# Both sides drop other activations, and ours rounds less; a wrong gradient is further off.
LOSS_TOLERANCE = 0.05
LIBRARIES = (
    "torch", "transformers", "peft", "accelerate", "bitsandbytes", "cuda-core", "cuda-bindings",
    "nvidia-cuda-nvrtc",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """Microseconds of one layer's forward pass on the GPU alone, by side.

    The limit is the time of the products at the measured rate, or of reading the packed bytes as
    fast as a copy reads and writes, whichever is longer.
    """

    layer: str
    tokens: int
    microseconds: dict[str, float]
    ratio: float
    limit_microseconds: float
    packed_gb_per_second: float


# ---------------------------------------------------------------- the GPU's own time


def measure_kernels(
    setup: Setup,
    limits: Limits,
    layers: Sequence[tuple[int, int]] = LAYERS,
    tokens: Sequence[int] = TOKENS,
    cold_bytes: int = COLD_BYTES,
    turn_seconds: float = TURN_SECONDS,
) -> list[KernelRow]:
    """Every layer (in, out) at every number of tokens, ours and torch's."""
    rows = []
    for in_features, out_features in layers:
        weight = random_weight(out_features, in_features, torch.Generator().manual_seed(0))
        packed = TernaryLinear(weight).to(setup.device).requires_grad_(False)
        packed.kernel = setup.kernel
        dense = decode_weight(packed, setup.dtype)
        sides = {
            OURS: _copies(packed, weight.nbytes, cold_bytes),
            LINEAR: _copies(plain_linear(dense, None), dense.nbytes, cold_bytes),
        }
        for count in tokens:
            x = torch.randn(count, in_features, device=setup.device).to(setup.dtype)
            seconds = _device_seconds(sides, x, setup, turn_seconds)
            flop = 2.0 * count * in_features * out_features
            median = statistics.median(seconds[OURS])
            rows.append(
                KernelRow(
                    layer=f"{in_features}x{out_features}",
                    tokens=count,
                    microseconds={
                        n: rounded(1e6 * statistics.median(s)) for n, s in seconds.items()
                    },
                    ratio=ratio(seconds[OURS], seconds[LINEAR]),
                    limit_microseconds=rounded(1e6 * limits.seconds(flop, weight.nbytes / 2)),
                    packed_gb_per_second=rounded(weight.nbytes / median / 1e9),
                )
            )
    return rows


def _copies(layer: nn.Module, size: int, cold_bytes: int) -> list[nn.Module]:
    more = min(cold_bytes // size, MOST_COPIES)
    return [layer, *(copy.deepcopy(layer) for _ in range(more))]


@torch.no_grad()
def _device_seconds(
    sides: dict[str, list[nn.Module]], x: torch.Tensor, setup: Setup, turn_seconds: float
) -> dict[str, list[float]]:
    """Seconds of one layer, turn by turn, the sides in changing order."""
    runs, replays = {}, {}
    for name, layers in sides.items():
        runs[name] = _replay(layers, x, setup.device)
        once = _event_seconds(runs[name], 1, setup.device)
        replays[name] = max(1, round(turn_seconds / max(once, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(setup.repeats):
        for name in order:
            total = _event_seconds(runs[name], replays[name], setup.device)
            seconds[name].append(total / replays[name] / len(sides[name]))
        order.reverse()
    return seconds


def _replay(layers: list[nn.Module], x: torch.Tensor, device: str) -> Callable[[], object]:
    """What runs all layers once, without Python's part where there are CUDA graphs."""

    def run() -> None:
        for layer in layers:
            layer(x)

    # compiles, and makes the libraries allocate what they keep
    run()
    if device != "cuda":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _event_seconds(run: Callable[[], object], calls: int, device: str) -> float:
    if device != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def kernels_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"| layer (in x out) | tokens | ours us | limit us | packed GB/s | {LINEAR} us | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        us = row["microseconds"]
        lines.append(
            f"| {row['layer']} | {row['tokens']} | {us[OURS]:g} | {row['limit_microseconds']:g} | "
            f"{row['packed_gb_per_second']:g} | {us[LINEAR]:g} | {row['ratio']:.2f} x |"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------- what is around it


def run_tests() -> dict[str, Any]:
    """pytest's exit code and last line; its output is shown as it comes."""
    command = [sys.executable, "-m", "pytest", *TESTS, "-m", "cuda", "-q"]
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None, "a pipe was asked for"
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    said = [line for line in lines if re.search(r"\b(passed|failed|error|deselected)", line)]
    return {"exit_code": process.returncode, "summary": (said or lines or [""])[-1]}


def _environment() -> dict[str, str]:
    """Child processes find this checkout, wherever they are started."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def about(commit: str | None) -> dict[str, Any]:
    """Card, driver, versions and commit."""
    properties = torch.cuda.get_device_properties(0)
    versions = {"python": platform.python_version(), "cuda of torch": torch.version.cuda}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    # the second is what the bindings raise without a driver
    with suppress(ImportError, RuntimeError):
        from cuda.bindings import driver

        _, version = driver.cuDriverGetVersion()
        versions["cuda of driver"] = f"{version // 1000}.{version % 1000 // 10}"
    return {
        "card": properties.name,
        "architecture": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "commit": commit or _commit(),
        "versions": versions,
    }


def _commit() -> str:
    try:
        head = _git("rev-parse", "HEAD")
        return f"{head}, changed since" if _git("status", "--porcelain") else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def file_name(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_") + ".json"


def loss_problems(report: dict[str, Any]) -> list[str]:
    """A first loss that is not finite, or far from the peer's."""
    losses = {row["side"]: row["first_loss"] for row in report["rows"]}
    peer = losses.get(LORA, losses[OURS])
    # a NaN is near to nothing
    if abs(losses[OURS] - peer) <= LOSS_TOLERANCE * peer:
        return []
    return [f"step of {report['subject']}: first loss {losses[OURS]}, but {peer} of {LORA}"]


# ---------------------------------------------------------------- all of it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of every part; tests of this file have small ones."""

    setup: Setup
    layers: tuple[tuple[int, int], ...] = LAYERS
    tokens: tuple[int, ...] = TOKENS
    step_bases: tuple[str, ...] = STEP_BASES
    decode_base: str = DECODE_BASE
    rows: int = 4
    length: int = 256
    new_tokens: int = 64
    long_prompt: int = 256
    cold_bytes: int = COLD_BYTES
    turn_seconds: float = TURN_SECONDS
    with_memory: bool = True


def measure(
    plan: Plan,
    parts: Sequence[str],
    result: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Adds every part to `result`; a part too large for the card is named among the problems."""
    setup = plan.setup

    def add(name: str, run: Callable[[], Report]) -> dict[str, Any] | None:
        report = None
        try:
            report = as_json(run())
        except torch.OutOfMemoryError as error:
            result["problems"].append(f"{name}: {str(error).splitlines()[0]}")
        if report is not None:
            result["reports"].append(report)
            _show(name, markdown(report))
        # a model that has failed lives until its error is gone
        gc.collect()
        save(result)
        return report

    if "kernels" in parts:
        limits = measure_limits(setup)
        result["limits"] = asdict(limits)
        rows = measure_kernels(
            setup, limits, plan.layers, plan.tokens, plan.cold_bytes, plan.turn_seconds
        )
        result["kernels"] = [asdict(row) for row in rows]
        _show("forward, the GPU's own time", kernels_table(result["kernels"]))
        save(result)
    if "operator" in parts:
        add(
            "operator",
            lambda: measure_operator(
                setup, plan.layers, plan.tokens, plan.turn_seconds, plan.cold_bytes
            ),
        )
    if "step" in parts:
        for name in plan.step_bases:
            step = partial(
                measure_step,
                setup,
                find_model(name),
                rows=plan.rows,
                length=plan.length,
                same_loss=setup.with_peers,
                with_memory=plan.with_memory,
            )
            report = add(f"training step, {name}", step)
            result["problems"] += loss_problems(report) if report else []
    if "decode" in parts:
        add(
            f"decoding, {plan.decode_base}",
            lambda: measure_decode(
                setup,
                find_model(plan.decode_base),
                new_tokens=plan.new_tokens,
                long_prompt=plan.long_prompt,
            ),
        )


def _show(title: str, text: str) -> None:
    print(f"\n## {title}\n\n{text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--only", default=",".join(PARTS), help="of: " + ",".join(PARTS))
    flags.add_argument("--quick", action="store_true", help="one layer, few repeats")
    flags.add_argument("--repeats", type=int, help="turns of every side (9, or 3 if --quick)")
    flags.add_argument("--kernel", default="cuda", help="cuda, or reference to compare with")
    flags.add_argument("--no-peers", action="store_true")
    flags.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    flags.add_argument("--commit", help="what this checkout is, where git does not say")
    args = flags.parse_args(arguments)
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        flags.error(f"--only: {', '.join(sorted(unknown))}; choose of {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("gpu-check: torch finds no NVIDIA GPU on this machine", file=sys.stderr)
        return 2
    # processes of their own, in which memory is measured, have to find this checkout
    os.environ.update(_environment())
    result: dict[str, Any] = {**about(args.commit), "problems": [], "reports": []}
    path = args.output / file_name(result["card"])

    def save(what: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")

    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"# {result['card']} ({result['architecture']}), commit {result['commit']}\n\n{versions}")
    if "tests" in parts:
        result["tests"] = run_tests()
        if result["tests"]["exit_code"]:
            result["problems"].append(f"tests: {result['tests']['summary']}")
        save(result)
    plan = Plan(
        setup=Setup(
            kernel=args.kernel,
            device="cuda",
            repeats=args.repeats or (3 if args.quick else 9),
            with_peers=not args.no_peers,
            product=PRODUCT,
            copy_bytes=COPY_BYTES,
        )
    )
    if args.quick:
        plan = replace(plan, layers=QUICK_LAYERS, tokens=QUICK_TOKENS, step_bases=STEP_BASES[1:])
    measure(plan, [part for part in parts if part != "tests"], result, save)
    print(f"\n{path}")
    for problem in result["problems"]:
        print(f"problem: {problem}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
