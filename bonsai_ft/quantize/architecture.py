"""Which modules does an architecture have, before any weight is read?

Everything that has to know how transformers lays out a decoder-only model and its config.
"""

import threading
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# `init_empty_weights` patches nn.Module for the whole process while it is active.
_BUILDING = threading.Lock()

# Where a config was read and by what is provenance, not part of the model.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "_commit_hash")


def build_empty(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture with parameters on the meta device and real non-persistent buffers."""
    with _BUILDING, init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def config_to_dict(config: PreTrainedConfig) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k not in _NOT_THE_MODEL}


def config_from_dict(values: dict[str, Any]) -> PreTrainedConfig:
    """The transformers config stored in a `.bonsai` file.

    Raises ValueError for an architecture this version of transformers does not know.
    """
    values = dict(values)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError("the model config has no model_type")
    try:
        return AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        raise ValueError(
            f"this version of transformers does not know model_type {model_type!r}; upgrade it"
        ) from error


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
