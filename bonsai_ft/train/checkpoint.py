"""How is the state of a run saved so that it continues exactly, and never half-written?

A checkpoint is staged beside its place, every file flushed to disk, a manifest with sizes and
SHA-256 written last, and only then renamed. A folder without a manifest that verifies is not a
checkpoint.
Nothing is pickled. Random numbers need no state: data order and dropout are functions of the step.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MANIFEST = "manifest.json"
PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    root: Path,
    step: int,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Writes `root/step-NNNNNN`, then removes all but the newest `keep` up to this one.

    Raises OSError if it cannot be written; older checkpoints are then as they were.
    """
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob("*.tmp-*"):
        shutil.rmtree(stale)
    target = root / f"step-{step:06d}"
    staging = root / f"{target.name}.tmp-{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        values = {name: p.detach().contiguous() for name, p in parameters.items()}
        save_file(values, staging / PARAMETERS)
        moments, scalars = _flatten(optimizer)
        save_file(moments, staging / OPTIMIZER)
        kind = type(optimizer).__name__
        record = {"step": step, "optimizer": scalars, "optimizer_kind": kind, **state}
        (staging / STATE).write_text(json.dumps(record, indent=1), encoding="utf-8")
        files = sorted(staging.iterdir())
        manifest = {
            "format": "bonsai-checkpoint",
            "version": 1,
            "files": {f.name: {"bytes": f.stat().st_size, "sha256": _digest(f)} for f in files},
        }
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for file in staging.iterdir():
            _sync(file)
        _sync(staging)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
        _sync(root)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, SafetensorError):
            # a full disk, most of the time, which its own functions report as OSError
            raise OSError(f"{target} could not be written: {error}") from error
        raise
    older = [s for s in _steps(root) if s < step]
    # a run goes back only past damaged checkpoints, and those must not crowd out good ones
    newer = [s for s in _steps(root) if s > step]
    for other in older[: max(0, len(older) - keep + 1)] + newer:
        shutil.rmtree(root / f"step-{other:06d}")
    return target


def newest_checkpoint(root: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over.

    Raises ValueError if there is none.
    """
    complaints: list[str] = []
    for step in reversed(_steps(root)):
        folder = root / f"step-{step:06d}"
        reason = _why_not(folder)
        if reason is None:
            return folder, complaints
        complaints.append(f"{folder.name} is damaged ({reason}); using an older one")
    detail = f": {'; '.join(complaints)}" if complaints else ""
    raise ValueError(f"{root}: there is no complete checkpoint to resume from{detail}")


def load_checkpoint(
    folder: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Fills parameters and optimiser in place; returns the state that was saved with them.

    Raises ValueError if the checkpoint belongs to other parameters or to another optimiser.
    """
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    kind = type(optimizer).__name__
    if state["optimizer_kind"] != kind:
        raise ValueError(
            f"{folder}: made with {state['optimizer_kind']}, but this run would use {kind}; "
            "resume on the kind of device the run was started on"
        )
    saved = load_file(folder / PARAMETERS)
    if set(saved) != set(parameters):
        odd = sorted(set(saved) ^ set(parameters))[0]
        raise ValueError(f"{folder}: made for other parameters ({odd}); the settings have changed")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if saved[name].shape != parameter.shape:
                raise ValueError(f"{folder}: {name} has another shape; the settings have changed")
            parameter.copy_(saved[name])
    _restore(optimizer, load_file(folder / OPTIMIZER), state["optimizer"])
    return state


def _flatten(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in _leaves(values):
            if isinstance(value, Tensor):
                # copied, because 8-bit AdamW has one quantisation map for all parameters
                tensors[f"{index}.{key}"] = value.detach().to("cpu", copy=True).contiguous()
            elif value is not None:
                scalars[f"{index}.{key}"] = value
    return tensors, scalars


def _leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries of one parameter's state; 8-bit AdamW hides some of them one floor deeper."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield key, value


def _restore(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: dict[str, Any]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *scalars.items()]:
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    current = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    found = (_NAME.fullmatch(p.name) for p in root.iterdir() if p.is_dir())
    return sorted(int(match.group(1)) for match in found if match)


def _why_not(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name in (PARAMETERS, OPTIMIZER, STATE):
            expected = manifest["files"][name]
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"] or _digest(file) != expected["sha256"]:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return str(error)
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is not what was written"
    return None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
