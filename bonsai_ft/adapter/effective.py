"""What does a layer compute, once its adapters have been chosen? Tensors, without the wrappers.

For code that runs a model without calling its modules (the compiled decoder).
"""

from dataclasses import dataclass
from typing import cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from bonsai_ft.adapter.lora import TernaryLora
from bonsai_ft.model import TernaryLinear


@dataclass(frozen=True, kw_only=True)
class EffectiveLinear:
    """y = x (S*T + R(codewords))^T + bias + (x lora_a^T) lora_b^T.

    codewords float32 [G, K, d]; lora_a float32 [r, in], lora_b float32 [out, r], scaled.
    """

    layer: TernaryLinear
    codewords: Tensor | None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None


def packed_layer(module: nn.Module) -> TernaryLinear | None:
    """The layer below; None for what is not packed, or whose adapters are not LoRA of ours."""
    if isinstance(module, TernaryLora):
        return module.ternary_layer
    return module if isinstance(module, TernaryLinear) else None


def effective_linear(module: TernaryLinear | TernaryLora) -> EffectiveLinear:
    """What a module that has a `packed_layer` computes now."""
    if isinstance(module, TernaryLinear):
        return EffectiveLinear(layer=module, codewords=module.codewords())
    layer = module.ternary_layer
    names = [] if module.disable_adapters else list(module.active_adapters)
    codewords = layer.codewords(module.codebook(names))
    names = [name for name in names if name in module.lora_A]
    if not names:
        return EffectiveLinear(layer=layer, codewords=codewords)
    down = [cast(Tensor, module.lora_A[name].weight).float() for name in names]
    up = [cast(Tensor, module.lora_B[n].weight).float() * module.scaling[n] for n in names]
    return EffectiveLinear(
        layer=layer, codewords=codewords, lora_a=torch.cat(down), lora_b=torch.cat(up, dim=1)
    )


def effective_module(module: nn.Module) -> nn.Module | None:
    """The module that an adapter's `modules_to_save` puts in its place; None for other wrappers."""
    if isinstance(module, ModulesToSaveWrapper):
        names = [] if module.disable_adapters else module.active_adapters
        chosen = [name for name in names if name in module.modules_to_save]
        return module.modules_to_save[chosen[0]] if chosen else module.original_module
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        return None
    return module
