"""How do LoRA and codebooks train, travel and swap as one adapter? No other floor knows PEFT."""

from bonsai_ft.adapter import _noise  # noqa: F401 - before anything imports PEFT
from bonsai_ft.adapter.attach import (
    TernaryLoraConfig,
    adapter_names,
    adapter_state,
    attach,
    detach,
    linear_names,
    load_adapter_state,
    set_adapter,
    trainable_groups,
)
from bonsai_ft.adapter.effective import (
    EffectiveLinear,
    effective_linear,
    effective_module,
    packed_layer,
)
from bonsai_ft.adapter.files import load_adapter, save_adapter, save_peft
from bonsai_ft.adapter.lora import TernaryLora, register_peft

__all__ = [
    "EffectiveLinear",
    "TernaryLora",
    "TernaryLoraConfig",
    "adapter_names",
    "adapter_state",
    "attach",
    "detach",
    "effective_linear",
    "effective_module",
    "linear_names",
    "load_adapter",
    "load_adapter_state",
    "packed_layer",
    "register_peft",
    "save_adapter",
    "save_peft",
    "set_adapter",
    "trainable_groups",
]
