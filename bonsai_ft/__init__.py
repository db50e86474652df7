"""Fine-tune ternary language models: a frozen packed body, trainable codebooks and LoRA on top.

The public names below are imported when they are first used, so that `import bonsai_ft` and the
command line's `--help` stay quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bonsai_ft.adapter import load_adapter, save_adapter, set_adapter
    from bonsai_ft.api import load_model
    from bonsai_ft.format import BonsaiFormatError
    from bonsai_ft.model import decode_weight, load_tokenizer, save_model
    from bonsai_ft.quantize import quantize

_HOME = {
    "BonsaiFormatError": "bonsai_ft.format",
    "decode_weight": "bonsai_ft.model",
    "load_adapter": "bonsai_ft.adapter",
    "load_model": "bonsai_ft.api",
    "load_tokenizer": "bonsai_ft.model",
    "quantize": "bonsai_ft.quantize",
    "save_adapter": "bonsai_ft.adapter",
    "save_model": "bonsai_ft.model",
    "set_adapter": "bonsai_ft.adapter",
}

__all__ = [
    "BonsaiFormatError",
    "decode_weight",
    "load_adapter",
    "load_model",
    "load_tokenizer",
    "quantize",
    "save_adapter",
    "save_model",
    "set_adapter",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bonsai_ft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
