"""How long does a base take to load, and how much memory does it hold then?

Each load happens in a fresh process, with the file in the system's cache. The limits are what one
pass over the same file takes there: reading it, and reading and hashing it, which is what checking
its checksums asks for. The peer loads the same architecture from bfloat16 safetensors.
"""

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bonsai_ft.api import load_model
from bonsai_ft.bench.models import float_copy
from bonsai_ft.bench.timing import (
    OURS,
    Report,
    Setup,
    machine,
    measure_limits,
    memory_of,
    ratio,
    rounded,
    run_child,
    spread,
    synchronise,
)
from bonsai_ft.format import open_bonsai
from bonsai_ft.quantize.architecture import build_empty, config_from_dict

UNVERIFIED, PEER = "bonsai_ft, verify=False", "transformers"
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LoadRow:
    """One way to load. `resident_bytes` is what loading added, `ratio` ours over this side's time.

    `first_token_seconds` includes the load and one token's pass, which touches every weight;
    `used_bytes` is what was added by then.
    """

    side: str
    seconds: float
    spread: list[float]
    ratio: float | None
    limit_seconds: float
    file_bytes: int
    resident_bytes: int | None
    first_token_seconds: float
    used_bytes: int | None


def measure_load(setup: Setup, base: Path) -> Report:
    """Ours with and without verification, and transformers' loading of the float copy."""
    about = machine(setup)
    limits = measure_limits(setup)
    dtype = str(setup.dtype).removeprefix("torch.")
    sides = {OURS: base, UNVERIFIED: base}
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if setup.with_peers:
            float_copy(base, setup.dtype).save_pretrained(folder)
            sides[PEER] = Path(folder)
        for _ in range(setup.repeats):
            for side, path in sides.items():
                answer = run_child(
                    "load",
                    side=side,
                    path=str(path),
                    dtype=dtype,
                    device=setup.device,
                    kernel=setup.kernel,
                )
                found.setdefault(side, []).append(answer)
        sizes = {side: _file_bytes(path) for side, path in sides.items()}
    return Report(
        bench="load",
        subject=base.stem,
        settings={"repeats": setup.repeats},
        machine=about,
        limits=limits,
        rows=[_row(side, found, sizes[side]) for side in sides],
    )


def _row(side: str, found: dict[str, list[dict[str, Any]]], file_bytes: int) -> LoadRow:
    def values(name: str) -> list[Any]:
        return [answer[name] for answer in found[side] if answer.get(name) is not None]

    def median_bytes(name: str) -> int | None:
        return int(statistics.median(values(name))) if values(name) else None

    seconds = values("seconds")
    limit = "hash_seconds" if side == OURS else "read_seconds"
    return LoadRow(
        side=side,
        seconds=rounded(statistics.median(seconds)),
        spread=spread(seconds),
        ratio=None
        if side == OURS
        else ratio([answer["seconds"] for answer in found[OURS]], seconds),
        limit_seconds=rounded(statistics.median(values(limit))),
        file_bytes=file_bytes,
        resident_bytes=median_bytes("resident"),
        first_token_seconds=rounded(statistics.median(values("first_token_seconds"))),
        used_bytes=median_bytes("used"),
    )


def _file_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _weight_files(path))


def _weight_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def load_once(*, side: str, path: str, dtype: str, device: str, kernel: str) -> dict[str, Any]:
    """In a process of its own: one load, one token, and the limits for the same bytes."""
    files = _weight_files(Path(path))
    read_seconds = _pass(files, lambda block: None)
    hash_seconds = _pass(files, hashlib.sha256().update)
    # the architecture's code is imported by whoever comes first, and is no part of loading
    build_empty(_config(Path(path)), torch.bfloat16)

    def load() -> Any:
        if side == PEER:
            chosen = getattr(torch, dtype)
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=chosen)
            return model.to(device)
        return load_model(path, dtype=dtype, device_map=device, verify=side == OURS, kernel=kernel)

    before = memory_of(device).get("resident")
    started = time.perf_counter()
    model = load()
    synchronise(device)
    seconds = time.perf_counter() - started
    after = memory_of(device).get("resident")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    synchronise(device)
    first_token = time.perf_counter() - started
    used = memory_of(device).get("resident")
    known = before is not None and after is not None and used is not None
    return {
        "seconds": seconds,
        "first_token_seconds": first_token,
        "read_seconds": read_seconds,
        "hash_seconds": hash_seconds,
        "resident": after - before if known else None,  # type: ignore[operator]
        "used": used - before if known else None,  # type: ignore[operator]
    }


def _config(path: Path) -> Any:
    if path.is_dir():
        return AutoConfig.from_pretrained(path)
    with open_bonsai(path, verify=False) as file:
        return config_from_dict(file.config["model"])


def _pass(files: list[Path], use: Callable[[memoryview], object]) -> float:
    """Seconds of reading all bytes once, block by block, handing each to `use`."""
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                use(view[:count])
    return time.perf_counter() - started
