"""Which `.bonsai` file is the base of a run? A given one, or float weights quantised once.

The cache lies in `cache_dir`, `$BONSAI_FT_CACHE` or `~/.cache/bonsai_ft`. One process quantises
while others wait.
"""

import hashlib
import json
import os
import re
from pathlib import Path

from filelock import FileLock

from bonsai_ft.config import ModelConfig
from bonsai_ft.format import BonsaiFormatError, open_bonsai
from bonsai_ft.quantize import QuantizeReport, QuantizeSettings, locate, quantize
from bonsai_ft.quantize.pipeline import Progress

# Changes when the same settings give other bytes, so that an old cache is not taken for a new one.
QUANTIZER_VERSION = 1


def cache_folder(chosen: str | None) -> Path:
    folder = chosen or os.environ.get("BONSAI_FT_CACHE") or "~/.cache/bonsai_ft"
    return Path(folder).expanduser()


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
        return path, quantize(source, path, settings, progress=progress)


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
    path = Path(source).expanduser()
    stamp: list[object] = [source]
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        stat = file.stat()
        stamp.append([file.name, stat.st_size, stat.st_mtime_ns])
    record = json.dumps([QUANTIZER_VERSION, stamp, str(settings)])
    return hashlib.sha256(record.encode()).hexdigest()[:12]
