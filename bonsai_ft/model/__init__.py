"""How does a packed file become a model?"""

from bonsai_ft.model.linear import TernaryLinear, decode_weight
from bonsai_ft.model.load import (
    BaseInfo,
    base_info,
    load_model,
    load_tokenizer,
    save_model,
    tokenizer_from_files,
)

__all__ = [
    "BaseInfo",
    "TernaryLinear",
    "base_info",
    "decode_weight",
    "load_model",
    "load_tokenizer",
    "save_model",
    "tokenizer_from_files",
]
