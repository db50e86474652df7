"""What does `bonsai_ft.load_model` do beyond loading? It lets PEFT know our layers."""

from typing import Any

from transformers import PreTrainedModel

from bonsai_ft.adapter import register_peft
from bonsai_ft.model import load_model as _load_model


def load_model(*args: Any, **kwargs: Any) -> PreTrainedModel:
    register_peft()
    return _load_model(*args, **kwargs)


load_model.__doc__ = _load_model.__doc__
