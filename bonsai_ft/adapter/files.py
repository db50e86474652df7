"""How does an adapter become one `.bonsai` file, and find its way back onto the right base?"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bonsai_ft.adapter.attach import (
    TernaryLoraConfig,
    adapter_state,
    attach,
    detach,
    load_adapter_state,
    lora_config,
    lora_state,
    set_adapter,
)
from bonsai_ft.format import BonsaiFormatError, open_bonsai, write_bonsai
from bonsai_ft.model import base_info

# What of PEFT's config an adapter file keeps.
_KEPT = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
)


def save_adapter(
    model: torch.nn.Module,
    path: str | Path,
    name: str = "default",
    *,
    provenance: dict[str, Any] | None = None,
) -> None:
    """Writes LoRA matrices and codebooks of one attached adapter, atomically.

    LoRA is stored in the model's own dtype and codebooks in the base's storage dtype: the values
    the forward pass used, so a reloaded adapter gives the same logits bit for bit.
    """
    info = base_info(model)
    config = lora_config(model, name)
    kept = {key: _plain(getattr(config, key)) for key in _KEPT}
    tensors: dict[str, Tensor] = {}
    for key, value in adapter_state(model, name).items():
        dtype = model.dtype
        if key.endswith(".residual_codebook"):
            dtype = _codebook_dtype(model, key)
        tensors[key] = value.to(dtype).contiguous()
    write_bonsai(
        path,
        kind="adapter",
        fingerprint=info.fingerprint,
        config={
            "adapter": kept | {"codebooks": any(k.endswith(".residual_codebook") for k in tensors)},
            "base": {"fingerprint": info.fingerprint, **info.config.get("provenance", {})},
            "provenance": provenance or {},
            "software": {n: importlib.metadata.version(n) for n in ("torch", "peft")},
        },
        tensors=tensors,
    )


def load_adapter(
    model: torch.nn.Module, path: str | Path, name: str = "default", *, trainable: bool = False
) -> None:
    """Attaches the adapter in `path` to a model from `load_model` and makes it active.

    Raises BonsaiFormatError for a damaged file and ValueError for an adapter of another base; the
    model is then as it was.
    """
    info = base_info(model)
    with open_bonsai(path) as file:
        if file.kind != "adapter":
            raise BonsaiFormatError(f"{path} is a model, not an adapter")
        if file.fingerprint != info.fingerprint:
            trained = file.config.get("base", {}).get("source", "unknown")
            raise ValueError(
                f"{path} was trained on another base: its fingerprint is {file.fingerprint}, "
                f"the loaded base {info.path} has {info.fingerprint} (trained on: {trained})"
            )
        try:
            settings = dict(file.config["adapter"])
            config = TernaryLoraConfig(
                **{key: settings[key] for key in _KEPT},
                codebooks=settings["codebooks"],
                inference_mode=not trainable,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BonsaiFormatError(
                f"{path}: config.adapter is incomplete or wrong: {error}"
            ) from error
        attach(model, config, name)
        try:
            load_adapter_state(model, {key: file.tensor(key) for key in file.names()}, name)
        except ValueError as error:
            detach(model, name)
            raise BonsaiFormatError(f"{path}: {error}") from error
    set_adapter(model, name)


def save_peft(model: torch.nn.Module, folder: str | Path, name: str = "default") -> list[str]:
    """Writes the LoRA part as PEFT files; returns what other tools will be missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = lora_config(model, name)
    source = base_info(model).config.get("provenance", {}).get("source", "")
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "bias": "none",
        "inference_mode": True,
        **{key: _plain(getattr(config, key)) for key in _KEPT},
        "modules_to_save": None,
    }
    save_file(lora_state(model, name), folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    missing = []
    if any(key.endswith(".residual_codebook") for key in adapter_state(model, name)):
        missing.append("the trained codebooks")
    if config.modules_to_save:
        missing.append(f"the trained modules {', '.join(sorted(config.modules_to_save))}")
    return missing


def _codebook_dtype(model: torch.nn.Module, key: str) -> torch.dtype:
    layer = model.get_submodule(key.removesuffix(".residual_codebook"))
    return layer.get_base_layer().codebook_dtype


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
