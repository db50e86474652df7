"""Which `.bonsai` file is the base of a run? A given one, or float weights quantised once.

The cache lies in `cache_dir`, `$BONSAI_FT_CACHE` or `~/.cache/bonsai_ft`. One process quantises
while others wait.
"""

import hashlib
import json
import re
from dataclasses import fields
from pathlib import Path

from filelock import FileLock

from bonsai_ft.config import ModelConfig
from bonsai_ft.format import BonsaiFormatError, open_bonsai
from bonsai_ft.quantize import QuantizeReport, QuantizeSettings, locate, quantize
from bonsai_ft.quantize.pipeline import Progress
from bonsai_ft.quantize.source import TOKENIZER_PATTERNS
from bonsai_ft.resources import cache_folder

# Changes when the same settings give other bytes, so that an old cache is not taken for a new one.
QUANTIZER_VERSION = 2


def find_base(
    model: ModelConfig, cache_dir: str | None, progress: Progress | None = None
) -> tuple[Path, QuantizeReport | None]:
    """The base's path, every checksum verified, and a report if it had to be made now.

    Raises ValueError if `model.source` is empty or cannot be used.
    """
    if not model.source:
        raise ValueError(
            "model.source is empty; give a .bonsai file, a folder, a hub id or a .gguf file, "
            "or choose a model: model=smollm2_135m"
        )
    source = locate(model.source)
    if source.endswith(".bonsai"):
        _refuse_quantising(model)
        path = Path(source).expanduser()
        if not path.is_file():
            raise ValueError(f"model.source={model.source}: there is no such file")
        with open_bonsai(path) as file:
            if file.kind != "model":
                raise ValueError(
                    f"model.source={model.source} is an {file.kind}, not a model; give the base it "
                    "was trained on"
                )
        return path, None
    settings = quantize_settings(model)
    folder = cache_folder(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cache_dir={folder}: cannot be used ({error.strerror}); choose another folder"
        ) from error
    # a name is free text and must not leave the folder
    name = re.sub(r"[^\w.-]", "_", model.name)
    path = folder / f"{name}-{_key(source, settings)}.bonsai"
    with FileLock(f"{path}.lock"):
        if path.is_file():
            try:
                with open_bonsai(path):
                    return path, None
            except BonsaiFormatError:
                # a cache may be damaged by anything; what it was made from is still there
                path.unlink()
        return path, quantize(model.source, path, settings, progress=progress)


def _refuse_quantising(model: ModelConfig) -> None:
    """A base that is packed already takes no settings for packing it."""
    for field in fields(ModelConfig):
        if field.name in ("name", "source", "expected_memory"):
            continue
        if (value := getattr(model, field.name)) != field.default:
            raise ValueError(
                f"model.{field.name}={value} has no effect: model.source={model.source} is "
                "quantised already; leave it out, or quantise the float model again"
            )


def quantize_settings(model: ModelConfig) -> QuantizeSettings:
    """Raises ValueError naming the setting that is wrong."""
    if model.scale_group == "128" and model.method == "paper":
        raise ValueError("model.method=paper has one scale per row; set model.scale_group=channel")
    return QuantizeSettings(
        method=model.method,
        residual_dim=model.residual_dim,
        residual_k=model.residual_k,
        scale_group=model.scale_group,
        packing="base3" if model.dense else "2bit",
        calibration=model.calibration or "",
    )


def _key(source: str, settings: QuantizeSettings) -> str:
    """Depends on the weights' files, not on where they lie: another environment finds the base."""
    path = Path(source).expanduser()
    files = [path]
    if path.is_dir():
        patterns = ("*.safetensors", *TOKENIZER_PATTERNS)
        files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    if settings.calibration:
        files.append(Path(settings.calibration).expanduser())
    stamp: list[object] = [
        [file.name, file.stat().st_size, _ends(file)] for file in files if file.is_file()
    ]
    record = json.dumps([QUANTIZER_VERSION, stamp or source, str(settings)])
    return hashlib.sha256(record.encode()).hexdigest()[:12]


def _ends(file: Path) -> str:
    """Hash of a file's first and last MiB: headers with all tensor names, and some weights."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        digest.update(opened.read(1 << 20))
        opened.seek(max(0, file.stat().st_size - (1 << 20)))
        digest.update(opened.read())
    return digest.hexdigest()
