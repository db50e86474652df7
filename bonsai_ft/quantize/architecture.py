"""Which modules does an architecture have, before any weight is read?

Everything that has to know how transformers lays out a decoder-only model and its config.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

# One model is built at a time, because building patches a method of nn.Module.
_BUILDING = threading.Lock()

# Where a config was read and by what is provenance, not part of the model.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "_commit_hash")
# What decides which code runs is never taken from a file: transformers would fetch attention
# kernels from whatever repository they name.
_NOT_FROM_A_FILE = {
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "auto_map",
    "quantization_config",
}


def build_empty(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture with parameters on the meta device and real non-persistent buffers."""
    with _BUILDING, _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Accelerate's `init_empty_weights`, for this thread alone.

    The patch is seen by the whole process, and a model that another thread is filling with weights
    at the same time must keep them.
    """
    register = nn.Module.register_parameter
    owner = threading.get_ident()

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == owner:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def config_to_dict(config: PreTrainedConfig) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k not in _NOT_THE_MODEL}


def config_from_dict(values: dict[str, Any]) -> PreTrainedConfig:
    """The transformers config stored in a `.bonsai` file.

    Raises ValueError for an architecture this version of transformers does not know.
    """
    values = _without_code(values)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError("the model config has no model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"this version of transformers does not know model_type {model_type!r}; upgrade it"
        )
    return AutoConfig.for_model(model_type, **values)


def _without_code(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_code(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in _NOT_FROM_A_FILE
    }


def decoder_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder blocks.

    Raises ValueError for a model that has no such list.
    """
    depth = model.config.get_text_config().num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no list of {depth} decoder blocks; "
            "only decoder-only models of transformers can be quantised"
        )
    return min(found, key=lambda item: item[0].count("."))


def plain_names(model: PreTrainedModel, skip: set[str]) -> list[str]:
    """State-dict names that are stored as they are: no tied duplicates, nothing in `skip`."""
    tied = set(model.all_tied_weights_keys)
    return [name for name in model.state_dict() if name not in tied and name not in skip]


def assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a tensor in the place of a parameter or buffer, which may be on the meta device."""
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(getattr(owner, leaf), nn.Parameter):
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        owner.register_buffer(leaf, tensor)
