"""How does a `.bonsai` file become a transformers model, and a model a file again?

The architecture is built by transformers on the meta device, linear layers are swapped for
`TernaryLinear`, and every tensor is assigned from the mapped file: nothing is copied but the
codebooks' float32 masters and tensors whose dtype is asked to change. Names of Hugging Face's
modules appear in this file and nowhere below it.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bonsai_ft.format import BonsaiFile, BonsaiFormatError, open_bonsai, write_bonsai
from bonsai_ft.model.linear import TernaryLinear
from bonsai_ft.ops import check_kernel, choose_kernel
from bonsai_ft.quantize.architecture import build_empty, config_from_dict

# Keys of model configs that say how often a module is repeated, and those that are a dimension.
_REPEATED = re.compile(r"(layers?|experts)$")
_SIZES = re.compile(r"(size|dim|heads|features|rank|channels)$|^(num|d)_")


@dataclass(frozen=True, kw_only=True)
class BaseInfo:
    """What a loaded model remembers of its file: `model.bonsai`."""

    path: str
    fingerprint: str
    config: dict[str, Any]
    files: dict[str, bytes]


def load_model(
    path: str | Path,
    *,
    device_map: str | dict[str, Any] | None = "auto",
    dtype: torch.dtype | str = "auto",
    verify: bool = True,
    kernel: str = "auto",
) -> PreTrainedModel:
    """A transformers model on packed weights, from a `.bonsai` file of kind "model".

    `device_map`: "auto" (a GPU if there is one and the model fits, spread by Accelerate if it does
    not), a device such as "cpu" or "cuda:0", or an Accelerate map. `dtype` is that of activations
    and unquantised tensors, also by name ("bfloat16"); "auto" keeps the file's. `verify` checks
    every checksum. `kernel` chooses who computes packed layers: "auto", "reference", "cpu", "cuda".

    Raises BonsaiFormatError for a file that is damaged or does not fit its own config, ValueError
    for a kernel that is unknown or cannot be had.
    """
    check_kernel(kernel)
    with open_bonsai(path, verify=verify) as file:
        if file.kind != "model":
            raise BonsaiFormatError(
                f"{path} is an {file.kind}, not a model; give the base it was trained on, "
                "and this file as the adapter"
            )
        model = _assemble(file, dtype)
        info = BaseInfo(
            path=str(path),
            fingerprint=file.fingerprint,
            config=file.config,
            files={name: file.file(name) for name in file.files()},
        )
    model.bonsai = info  # type: ignore[assignment]
    model.generation_config = _generation_config(model, info)
    return _choose_kernels(_place(model, device_map), kernel)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer, with its chat template, that travels inside a `.bonsai` model."""
    with open_bonsai(path, verify=False) as file:
        files = {name: file.file(name) for name in file.files()}
    return tokenizer_from_files(files, str(path))


def tokenizer_from_files(files: dict[str, bytes], path: str) -> PreTrainedTokenizerBase:
    if "tokenizer_config.json" not in files:
        raise BonsaiFormatError(f"{path}: there is no tokenizer inside; quantise the model again")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return AutoTokenizer.from_pretrained(folder)


def save_model(model: PreTrainedModel, path: str | Path) -> str:
    """Writes a loaded model back, with the codebooks it holds now; returns the fingerprint.

    Raises ValueError if adapters are attached: they are saved by themselves.
    """
    info = base_info(model)
    tensors: dict[str, torch.Tensor] = {}
    packed = {name: m for name, m in model.named_modules() if isinstance(m, TernaryLinear)}
    if set(packed) != {layer["name"] for layer in info.config["layers"]}:
        raise ValueError("the model has adapters attached; detach them, or use save_adapter")
    for name, module in packed.items():
        for suffix, tensor in module.packed().tensors().items():
            tensors[f"{name}.{suffix}"] = tensor
        if module.bias is not None:
            tensors[f"{name}.bias"] = module.bias.detach()
    for name in _plain_names(model):
        tensors[name] = model.get_parameter_or_buffer(name).detach()
    for name, content in info.files.items():
        tensors[f"files/{name}"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    # a model may have been loaded in another dtype than its file's
    config = info.config | {"dtype": str(model.dtype).removeprefix("torch.")}
    write_bonsai(path, kind="model", config=config, tensors=tensors)
    with open_bonsai(path, verify=False) as file:
        return file.fingerprint


def _choose_kernels(model: PreTrainedModel, kernel: str) -> PreTrainedModel:
    """What runs is decided here, once, so that it is known (and refused) before the first token."""
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            choose_kernel(kernel, module.ternary.device.type)
            module.kernel = kernel
    return model


def base_info(model: nn.Module) -> BaseInfo:
    """What `load_model` remembered; ValueError for a model that did not come from it."""
    info = getattr(model, "bonsai", None)
    if info is None:
        raise ValueError("this model did not come from bonsai_ft.load_model")
    return info


def _assemble(file: BonsaiFile, dtype: torch.dtype | str) -> PreTrainedModel:
    dtype = _chosen_dtype(file, dtype)
    model = _empty_model(file, dtype)
    used: set[str] = set()
    names = set(file.names())
    for name in file.weight_names():
        try:
            linear = model.get_submodule(name)
        except AttributeError:
            raise BonsaiFormatError(
                f"{file.path}: tensor {name}: {type(model).__name__} has no such layer"
            ) from None
        if not isinstance(linear, nn.Linear):
            raise BonsaiFormatError(f"{file.path}: tensor {name}: not a linear layer")
        weight = file.weight(name)
        if (weight.out_features, weight.in_features) != (linear.out_features, linear.in_features):
            raise BonsaiFormatError(
                f"{file.path}: tensor {name}: shape {weight.out_features} x {weight.in_features}, "
                f"but the config says {linear.out_features} x {linear.in_features}"
            )
        bias = None
        if linear.bias is not None:
            bias = _read(file, f"{name}.bias", linear.bias.shape, dtype)
            used.add(f"{name}.bias")
        model.set_submodule(name, TernaryLinear(weight, bias))
        used |= {f"{name}.{suffix}" for suffix in weight.tensors()}
    for name in _plain_names(model):
        expected = model.get_parameter_or_buffer(name)
        tensor = _read(file, name, expected.shape, dtype if expected.is_floating_point() else None)
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(expected, nn.Parameter):
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            # copied for the reason given in TernaryLinear
            owner.register_buffer(leaf, tensor.clone())
        used.add(name)
    model.tie_weights()
    unexpected = sorted(names - used - {n for n in names if n.startswith("files/")})
    if unexpected:
        raise BonsaiFormatError(
            f"{file.path}: tensor {unexpected[0]}: the model has no place for it"
        )
    left = [n for n, p in model.named_parameters() if p.is_meta]
    if left:
        raise BonsaiFormatError(f"{file.path}: tensor {left[0]}: missing")
    return model


def _chosen_dtype(file: BonsaiFile, dtype: torch.dtype | str) -> torch.dtype:
    stored = file.config.get("dtype", "float32")
    chosen: Any = stored if dtype == "auto" else dtype
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen.removeprefix("torch."), None)
    if isinstance(chosen, torch.dtype) and chosen.is_floating_point:
        return chosen
    if dtype == "auto":
        raise BonsaiFormatError(
            f"{file.path}: config.dtype is {stored!r}, not a floating-point dtype"
        )
    raise ValueError(f"dtype={dtype} is not a floating-point dtype")


def _empty_model(file: BonsaiFile, dtype: torch.dtype) -> PreTrainedModel:
    values = file.config.get("model")
    if not isinstance(values, dict):
        raise BonsaiFormatError(f"{file.path}: config.model is missing or not an object")
    _check_sizes(values, file)
    try:
        return build_empty(config_from_dict(values), dtype)
    except Exception as error:
        # a config can be wrong in as many ways as transformers has architectures
        reason = (str(error).splitlines() or [""])[0]
        raise BonsaiFormatError(
            f"{file.path}: config.model makes no model: {type(error).__name__}: {reason}"
        ) from error


def _check_sizes(values: dict[str, Any], file: BonsaiFile) -> None:
    """BonsaiFormatError where a config asks for more than its file can fill.

    Every block has a tensor of its own and every dimension is one of some tensor, so these bounds
    are generous; without them, a few digits would make construction take hours or all memory.
    """
    num_tensors = len(file.names())
    num_bytes = sum(file.nbytes(name) for name in file.names())
    for key, value in values.items():
        if isinstance(value, dict):
            _check_sizes(value, file)
        if type(value) is not int:
            continue
        bound = None
        if _REPEATED.search(key):
            bound = max(num_tensors, 1024)
        elif _SIZES.search(key):
            bound = num_bytes
        if bound is not None and value > bound:
            raise BonsaiFormatError(
                f"{file.path}: config.model: {key} is {value}, but the file has only "
                f"{num_tensors} tensors and {num_bytes} bytes"
            )


def _read(
    file: BonsaiFile, name: str, shape: torch.Size, dtype: torch.dtype | None
) -> torch.Tensor:
    if name not in file:
        raise BonsaiFormatError(f"{file.path}: tensor {name}: missing")
    tensor = file.tensor(name)
    if tensor.shape != shape:
        raise BonsaiFormatError(
            f"{file.path}: tensor {name}: shape {list(tensor.shape)}, "
            f"but the config says {list(shape)}"
        )
    return tensor if dtype is None else tensor.to(dtype)


def _plain_names(model: PreTrainedModel) -> list[str]:
    """State-dict names outside TernaryLinear layers, tied duplicates left out."""
    packed = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, TernaryLinear))
    tied = set(model.all_tied_weights_keys)
    return [n for n in model.state_dict() if not n.startswith(packed) and n not in tied]


def _generation_config(model: PreTrainedModel, info: BaseInfo) -> GenerationConfig:
    stored = info.files.get("generation_config.json")
    if stored is None:
        return GenerationConfig.from_model_config(model.config)
    try:
        return GenerationConfig.from_dict(json.loads(stored))
    except (ValueError, TypeError, AttributeError) as error:
        raise BonsaiFormatError(
            f"{info.path}: tensor files/generation_config.json: {error}"
        ) from error


def _place(model: PreTrainedModel, device_map: str | dict[str, Any] | None) -> PreTrainedModel:
    if device_map is None:
        return model
    if isinstance(device_map, dict):
        places = device_map
    elif device_map != "auto":
        places = {"": device_map}
    elif torch.cuda.is_available():
        places = infer_auto_device_map(model, no_split_module_classes=model._no_split_modules or [])
    else:
        places = {"": "cpu"}
    if len(set(places.values())) == 1:
        return model.to(next(iter(places.values())))
    return dispatch_model(model, places)
