"""Which models are measured? Random packed bases of a given shape, and float copies of a base.

A random base is written layer by layer, so that a shape of any size needs little memory. A peer
gets the same architecture with the dequantised weights of the base: same tokens, same sizes, and
losses that can be compared.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from bonsai_ft.api import load_model
from bonsai_ft.format import (
    GROUP,
    BonsaiWriter,
    Residual,
    TernaryWeight,
    num_groups,
    open_bonsai,
    pack_codes,
    pack_signs,
    weight_layout,
)
from bonsai_ft.model import TernaryLinear, decode_weight
from bonsai_ft.quantize.architecture import build_empty, config_to_dict
from bonsai_ft.resources import cache_folder

RANDOM = "random:"
DIM, K = 128, 4
# Changes when the same shape gives other bytes.
RANDOM_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model of the Llama family."""

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool = False

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=2048,
            tie_word_embeddings=self.is_tied,
        )


SHAPES = {
    "tiny": ModelShape(hidden=256, intermediate=512, blocks=2, heads=4, kv_heads=2, vocabulary=512),
    "smollm2_135m": ModelShape(
        hidden=576,
        intermediate=1536,
        blocks=30,
        heads=9,
        kv_heads=3,
        vocabulary=49_152,
        is_tied=True,
    ),
    "1b": ModelShape(
        hidden=2048, intermediate=8192, blocks=16, heads=32, kv_heads=8, vocabulary=32_000
    ),
}


def find_model(model: str) -> Path:
    """The file of `model`: a .bonsai path, or "random:SHAPE", made once in the cache.

    Raises ValueError for what is neither.
    """
    if model.startswith(RANDOM):
        name = model.removeprefix(RANDOM)
        if name not in SHAPES:
            known = ", ".join(f"{RANDOM}{shape}" for shape in SHAPES)
            raise ValueError(f"MODEL {model}: there is no such shape; choose one of {known}")
        path = cache_folder() / f"random-{name}-v{RANDOM_VERSION}.bonsai"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.is_file():
                random_base(SHAPES[name], path)
        return path
    path = Path(model).expanduser()
    if path.suffix != ".bonsai" or not path.is_file():
        raise ValueError(
            f"MODEL {model}: there is no such .bonsai file; quantise a model first, or take "
            f"{RANDOM}1b, random weights of that size"
        )
    return path


def random_weight(
    out_features: int, in_features: int, generator: torch.Generator, packing: str = "2bit"
) -> TernaryWeight:
    """Random signs, scales and codes, of a size that keeps activations as they are."""
    groups, count = num_groups(in_features), -(-in_features // DIM)
    signs = torch.randint(-1, 2, (out_features, in_features), generator=generator, dtype=torch.int8)
    codes = torch.randint(0, K, (out_features, count), generator=generator, dtype=torch.uint8)
    size = 1.2 / math.sqrt(in_features)
    scale = size * (0.8 + 0.4 * torch.rand(out_features, groups, generator=generator))
    codebook = torch.randn(groups, K, DIM, generator=generator)
    codebook[-1, :, in_features - (groups - 1) * GROUP :] = 0
    return TernaryWeight(
        out_features=out_features,
        in_features=in_features,
        packing=packing,
        ternary=pack_signs(signs, packing),
        scale=scale.half(),
        residual=Residual(
            codes=pack_codes(codes, K),
            codebook=codebook.half(),
            mu=torch.zeros(groups).half(),
            sigma=torch.full((groups,), 0.1 * size).half(),
        ),
    )


def random_base(shape: ModelShape, path: Path, seed: int = 0) -> None:
    """Writes a packed model of random weights; no more than one layer is in memory."""
    config = shape.config()
    model = build_empty(config, torch.bfloat16)
    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    layers = []
    for name, linear in linears.items():
        sizes: dict[str, Any] = {
            "out_features": linear.out_features,
            "in_features": linear.in_features,
            "packing": "2bit",
        }
        layers.append({"name": name, **sizes})
        parts = weight_layout(**sizes, residual_dim=DIM, residual_k=K)
        layout |= {f"{name}.{suffix}": spec for suffix, spec in parts.items()}
    tied = set(model.all_tied_weights_keys)
    plain = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.rpartition(".")[0] not in linears and name not in tied
    }
    layout |= {name: (torch.bfloat16, size) for name, size in plain.items()}
    settings = {"model": config_to_dict(config), "dtype": "bfloat16", "layers": layers}
    generator = torch.Generator().manual_seed(seed)
    with BonsaiWriter(path, kind="model", config=settings, tensors=layout) as writer:
        for name, linear in linears.items():
            weight = random_weight(linear.out_features, linear.in_features, generator)
            for suffix, tensor in weight.tensors().items():
                writer.write(f"{name}.{suffix}", tensor)
        for name, size in plain.items():
            values = torch.randn(size, generator=generator).mul_(0.02)
            # norms lie around 1
            writer.write(name, (values if len(size) > 1 else values.add_(1)).bfloat16())


# ---------------------------------------------------------------- float peers


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return linear


def nf4_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """bitsandbytes' layer as QLoRA has it: NF4 with quantised scales. ImportError without it."""
    import bitsandbytes

    out_features, in_features = weight.shape
    linear = bitsandbytes.nn.Linear4bit(
        in_features,
        out_features,
        bias=bias is not None,
        compute_dtype=weight.dtype,
        quant_type="nf4",
        device="meta",
    )
    linear.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    # moving is what quantises
    return linear.to(weight.device)


def float_copy(
    base: Path,
    dtype: torch.dtype,
    device: str = "cpu",
    make: Callable[[Tensor, Tensor | None], nn.Module] = plain_linear,
) -> PreTrainedModel:
    """The base's architecture with its dequantised weights in layers of `make`, frozen.

    One layer at a time is converted, and nothing of the file stays mapped.
    """
    model = load_model(base, dtype=dtype, device_map="cpu", verify=False, kernel="reference")
    for name, module in list(model.named_modules()):
        if isinstance(module, TernaryLinear):
            model.set_submodule(name, make(decode_weight(module, dtype).to(device), module.bias))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        # of quantised layers the class is what is not to be lost
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    if make is nf4_linear:
        # by this PEFT knows that the layers are quantised
        cast(Any, model).is_loaded_in_4bit = True
    gc.collect()
    return cast(Any, model).to(device) if device != "cpu" else model


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a base has to compute and to read; the head is the output embedding, tied or not."""

    body_weights: int
    body_bytes: int
    vocabulary: int
    hidden: int
    file_bytes: int
    layer_names: list[str]

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden


def sizes_of(base: Path) -> Sizes:
    """Read off the file."""
    with open_bonsai(base, verify=False) as file:
        layers = file.config["layers"]
        names = {layer["name"] for layer in layers}
        body = [n for n in file.names() if n.rpartition(".")[0] in names]
        model = file.config["model"]
        text = model.get("text_config") or model
        return Sizes(
            body_weights=sum(layer["out_features"] * layer["in_features"] for layer in layers),
            body_bytes=sum(file.nbytes(name) for name in body),
            vocabulary=int(text["vocab_size"]),
            hidden=int(text["hidden_size"]),
            file_bytes=base.stat().st_size,
            layer_names=sorted({name.rpartition(".")[2] for name in names}),
        )


def shape_of(base: Path) -> ModelShape:
    """Sizes of a Llama-like base, for peers that build their own model of that shape."""
    with open_bonsai(base, verify=False) as file:
        config = file.config["model"]
    return ModelShape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        blocks=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        vocabulary=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings")),
    )
