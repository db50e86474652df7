"""How is the state of a run saved so that it continues exactly, and never half-written?

A checkpoint is staged beside its place, every file flushed to disk, a manifest with sizes and SHA-256
written last, and only then renamed. A folder without a manifest that verifies is not a checkpoint.
Nothing is pickled. Random numbers need no state: data order and dropout are functions of the step.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    root: Path,
    step: int,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Writes `root/step-NNNNNN` and then removes the oldest ones beyond `keep`."""
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob("*.tmp-*"):
        shutil.rmtree(stale)
    target = root / f"step-{step:06d}"
    staging = root / f"{target.name}.tmp-{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        values = {name: p.detach().contiguous() for name, p in parameters.items()}
        save_file(values, staging / "parameters.safetensors")
        moments, scalars = _flatten(optimizer)
        save_file(moments, staging / "optimizer.safetensors")
        record = {"step": step, "optimizer": scalars, **state}
        (staging / "state.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
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
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    for old in _steps(root)[:-keep]:
        shutil.rmtree(root / f"step-{old:06d}")
    return target


def newest_checkpoint(root: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over.

    Raises ValueError if there is none.
    """
    complaints = []
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

    Raises ValueError if the checkpoint belongs to other parameters.
    """
    saved = load_file(folder / "parameters.safetensors")
    if set(saved) != set(parameters):
        odd = sorted(set(saved) ^ set(parameters))[0]
        raise ValueError(f"{folder}: made for other parameters ({odd}); the settings have changed")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if saved[name].shape != parameter.shape:
                raise ValueError(f"{folder}: {name} has another shape; the settings have changed")
            parameter.copy_(saved[name])
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    _restore(optimizer, load_file(folder / "optimizer.safetensors"), state["optimizer"])
    return state


def _flatten(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.detach().cpu().contiguous()
            elif value is not None:
                scalars[f"{index}.{key}"] = value
    return tensors, scalars


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
        for name, expected in manifest["files"].items():
            file = folder / name
            if file.stat().st_size != expected["bytes"] or _digest(file) != expected["sha256"]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: {type(error).__name__}"
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
