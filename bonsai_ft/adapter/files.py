"""How does an adapter become one `.bonsai` file, and find its way back onto the right base?"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor

from bonsai_ft.adapter.attach import (
    TernaryLoraConfig,
    adapter_state,
    attach,
    check_name,
    load_adapter_state,
    lora_config,
    lora_state,
    unchanged_on_failure,
)
from bonsai_ft.adapter.lora import TernaryLora
from bonsai_ft.format import BonsaiFile, BonsaiFormatError, open_bonsai, write_bonsai
from bonsai_ft.model import base_info

# What of PEFT's config an adapter file keeps.
_KEPT = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
)
# A rank that no layer uses, because patterns give all of them others, may be as large as this.
_USUAL_RANK = 1024


def save_adapter(
    model: torch.nn.Module,
    path: str | Path,
    name: str = "default",
    *,
    provenance: dict[str, Any] | None = None,
) -> None:
    """Writes LoRA matrices and codebooks of one attached adapter, atomically.

    LoRA of ternary layers is stored in the model's own dtype and codebooks in the base's storage
    dtype: the values the forward pass used, so a reloaded adapter gives the same logits bit for
    bit. Raises ValueError for a name that is not attached.
    """
    model = _without_peft(model)
    info = base_info(model)
    config = lora_config(model, name)
    kept = {key: _plain(getattr(config, key)) for key in _KEPT}
    tensors: dict[str, Tensor] = {}
    for key, value in adapter_state(model, name).items():
        tensors[key] = value.to(_used_dtype(model, key, value)).contiguous()
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
        check_name(model, name)
        try:
            config = _config(file, trainable)
            with unchanged_on_failure(model, name):
                attach(model, config, name)
                load_adapter_state(model, {key: file.tensor(key) for key in file.names()}, name)
        except Exception as error:
            # PEFT does not check the types of its settings, so anything can come
            if isinstance(error, BonsaiFormatError):
                raise
            raise BonsaiFormatError(f"{path}: {error}") from error


def _config(file: BonsaiFile, trainable: bool) -> TernaryLoraConfig:
    """The settings an adapter was trained with, its ranks compared with its tensors."""
    settings = file.config.get("adapter")
    if not isinstance(settings, dict):
        raise BonsaiFormatError(f"{file.path}: config.adapter is missing")
    for key in (*_KEPT, "codebooks"):
        if key not in settings:
            raise BonsaiFormatError(f"{file.path}: config.adapter has no {key}")
    # before anything of that size is allocated
    largest = max((file.shape(n)[0] for n in file.names() if n.endswith(".lora_A")), default=0)
    for rank in (settings["r"], *settings["rank_pattern"].values()):
        if type(rank) is not int or not 0 < rank <= max(largest, _USUAL_RANK):
            raise BonsaiFormatError(
                f"{file.path}: config.adapter: a rank is {rank!r}, but the largest tensor has "
                f"{largest}"
            )
    return TernaryLoraConfig(
        **{key: settings[key] for key in _KEPT},
        codebooks=settings["codebooks"],
        inference_mode=not trainable,
    )


def save_peft(model: torch.nn.Module, folder: str | Path, name: str = "default") -> list[str]:
    """Writes the LoRA part as PEFT files; returns what other tools will be missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = _without_peft(model)
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


def _without_peft(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a `PeftModel`: names in our files start at it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _used_dtype(model: torch.nn.Module, key: str, value: Tensor) -> torch.dtype:
    """The dtype in which the forward pass reads a tensor of an adapter."""
    layer = model.get_submodule(key.rpartition(".")[0])
    if not isinstance(layer, TernaryLora):
        return value.dtype
    if key.endswith(".residual_codebook"):
        return layer.ternary_layer.codebook_dtype
    return cast(torch.dtype, model.dtype)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
