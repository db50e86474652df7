"""How is an adapter put on a model, chosen, and taken apart into tensors?

Tensor names here are those of the adapter file: `<module>.lora_A`, `<module>.lora_B`,
`<module>.residual_codebook`, and `<module>.weight` for modules trained whole.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from peft.tuners.tuners_utils import set_adapter as set_trained_adapter
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from bonsai_ft.adapter.lora import register_peft
from bonsai_ft.model import TernaryLinear

_TO_FILE = [
    (re.compile(r"\.lora_([AB])\.weight$"), r".lora_\1"),
    (re.compile(r"\.lora_residual_codebook$"), ".residual_codebook"),
]


@dataclass
class TernaryLoraConfig(LoraConfig):
    """A LoraConfig that can leave the codebooks alone."""

    codebooks: bool = field(default=True, metadata={"help": "train and carry the codebooks"})


def attach(model: nn.Module, config: LoraConfig, name: str = "default") -> None:
    """Adds an adapter to `model` in place, makes it the active one, and the only one that trains.

    Raises ValueError for a name that is taken or cannot be one, and for settings or targets that
    the model cannot have; the model is then as it was.
    """
    check_name(model, name)
    _check_targets(model, config)
    for setting in ("target_parameters", "trainable_token_indices"):
        if getattr(config, setting, None):
            raise ValueError(f"{setting} is not supported: an adapter file cannot carry it")
    register_peft()
    with unchanged_on_failure(model, name), warnings.catch_warnings():
        # several adapters on one model are meant
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter_in_model(config, model, adapter_name=name)
        if fused := list(getattr(config, "target_parameters", None) or []):
            # PEFT rewrites names that it takes for those of separate experts
            raise ValueError(
                "adapter.target_modules: PEFT maps these names onto fused expert weights, which an "
                f"adapter file cannot carry ({', '.join(sorted(fused))}); name "
                "attention layers only"
            )
        # layers that are not ternary come in the model's dtype; masters are float32
        cast_adapter_dtype(model, name)
        set_trained_adapter(model, [name], inference_mode=config.inference_mode)
    # new layers come in training mode, with dropout on
    model.train(model.training)
    _forget_layers(model)
    set_adapter(model, name)


def check_name(model: nn.Module, name: str) -> None:
    """ValueError for a name that is taken or cannot be one."""
    if name in adapter_names(model):
        raise ValueError(f"an adapter named {name!r} is attached already; choose another name")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == "__base__":
        raise ValueError(
            f"adapter name {name!r}: use letters, digits, '-' and '_' only (1 character or more)"
        )
    if hasattr(nn.ModuleDict(), name) or hasattr(nn.ParameterDict(), name):
        raise ValueError(f"adapter name {name!r} is a word that torch needs; choose another one")


def adapter_names(model: nn.Module) -> list[str]:
    return list(getattr(model, "peft_config", {}) or {})


def set_adapter(model: nn.Module, name: str | None) -> None:
    """Swaps the active adapter; None gives the base back, bit for bit.

    Flips two attributes per layer and touches no tensor. Raises ValueError for a name that is not
    attached.
    """
    if name is not None:
        _check_attached(model, name)
    for layer in _layers(model):
        layer._disable_adapters = name is None
        if name is not None:
            layer._active_adapter = [name]
            if isinstance(layer, AuxiliaryTrainingWrapper) and name not in layer._adapters:
                layer._active_adapter = []


def detach(model: nn.Module, name: str) -> None:
    """Removes an adapter and its tensors; the base is active afterwards.

    Raises ValueError for a name that is not attached.
    """
    _check_attached(model, name)
    _remove(model, name)
    set_adapter(model, None)


@contextmanager
def unchanged_on_failure(model: nn.Module, name: str) -> Iterator[None]:
    """Takes the adapter `name` off again, whole or in part, if attaching or filling it fails."""
    active = [(x, x._active_adapter, x._disable_adapters) for x in _layers(model)]
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    except BaseException:
        _remove(model, name)
        for layer, names, is_disabled in active:
            layer._active_adapter, layer._disable_adapters = names, is_disabled
        for parameter, requires_grad in trained:
            parameter.requires_grad = requires_grad
        raise


def _remove(model: nn.Module, name: str) -> None:
    """Deletes what there is of an adapter; layers without any adapter become plain again."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, AuxiliaryTrainingWrapper):
            layer.delete_adapter(name, new_active_adapters=None)
            if not layer._adapters:
                model.set_submodule(path, layer.original_module)
        elif isinstance(layer, BaseTunerLayer):
            with warnings.catch_warnings():
                # PEFT says which adapter becomes active instead; the caller decides that
                warnings.simplefilter("ignore")
                layer.delete_adapter(name)
            if not layer._all_available_adapter_names():
                model.set_submodule(path, layer.get_base_layer())
    configs = getattr(model, "peft_config", {})
    configs.pop(name, None)
    if not configs:
        model.__dict__.pop("peft_config", None)
    _forget_layers(model)


def _check_attached(model: nn.Module, name: str) -> None:
    if name not in adapter_names(model):
        known = ", ".join(adapter_names(model)) or "none"
        raise ValueError(f"there is no adapter named {name!r}; attached: {known}")


def _layers(model: nn.Module) -> list[Any]:
    """Layers that carry adapters; listed once, because walking a model costs more than swapping."""
    names = adapter_names(model)
    known = model.__dict__.get("_bonsai_adapter_layers")
    # the names tell whether PEFT was used directly to add or delete an adapter
    if known is None or known[0] != names:
        found = [
            m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]
        known = (names, found)
        model.__dict__["_bonsai_adapter_layers"] = known
    return known[1]


def _forget_layers(model: nn.Module) -> None:
    model.__dict__.pop("_bonsai_adapter_layers", None)


def trainable_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Trainable parameters by kind: "lora", "codebook" and "other" (modules trained whole)."""
    groups: dict[str, list[nn.Parameter]] = {"lora": [], "codebook": [], "other": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "residual_codebook" in name:
            groups["codebook"].append(parameter)
        elif "lora_" in name:
            groups["lora"].append(parameter)
        else:
            groups["other"].append(parameter)
    return groups


def adapter_state(model: nn.Module, name: str = "default") -> dict[str, Tensor]:
    """The adapter's tensors by file name, as they are held (float32 masters); tied ones once.

    Raises ValueError for a name that is not attached.
    """
    _check_attached(model, name)
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    once = {value.untyped_storage()._cdata: key for key, value in reversed(state.items())}
    return {_rename(key, _TO_FILE): state[key].detach() for key in state if key in once.values()}


def load_adapter_state(model: nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    """Fills an attached adapter.

    ValueError names the first tensor that has no place or no value; nothing is changed then.
    """
    expected = adapter_state(model, name)
    for key in sorted(set(expected) | set(tensors)):
        if key not in tensors:
            raise ValueError(f"tensor {key} is missing")
        if key not in expected:
            raise ValueError(f"tensor {key} has no place in the model")
        if tensors[key].shape != expected[key].shape:
            raise ValueError(
                f"tensor {key} has shape {list(tensors[key].shape)}, "
                f"the model needs {list(expected[key].shape)}"
            )
    with torch.no_grad():
        for key, value in expected.items():
            # state dicts share memory with the parameters, so the values go in place
            value.copy_(tensors[key])


def lora_state(model: nn.Module, name: str = "default") -> dict[str, Tensor]:
    """PEFT's own keys for the LoRA part alone (no codebooks, no modules trained whole)."""
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return {
        f"base_model.model.{key}": value.detach().contiguous()
        for key, value in state.items()
        if any(part in key for part in (".lora_A.", ".lora_B.", ".lora_embedding_"))
    }


def lora_config(model: nn.Module, name: str) -> LoraConfig:
    _check_attached(model, name)
    return cast(dict[str, LoraConfig], model.peft_config)[name]


def linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of all ternary layers, such as q_proj or down_proj."""
    return sorted(
        {
            name.removesuffix(".base_layer").rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if isinstance(module, TernaryLinear)
        }
    )


def _check_targets(model: nn.Module, config: LoraConfig) -> None:
    names = [name.removesuffix(".base_layer") for name, _ in model.named_modules()]
    for key, targets in (
        ("adapter.target_modules", config.target_modules),
        ("adapter.modules_to_save", config.modules_to_save),
    ):
        if targets is None or isinstance(targets, str):
            continue
        for target in targets:
            if not any(n == target or n.endswith(f".{target}") for n in names):
                raise ValueError(
                    f"{key}: the model has no module {target!r}; "
                    f"ternary layers are {', '.join(linear_names(model))}"
                )


def _rename(key: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        key = pattern.sub(replacement, key)
    return key
