"""How do PEFT's LoRA and a trainable codebook live on a packed layer?

An adapter is LoRA matrices plus its own copy of the codebooks. `TernaryLora` keeps both by adapter
name, so the base is never written to: choosing an adapter, or none, is choosing which tensors the
forward pass reads. `TernaryLoraModel` is PEFT's LoRA tuner taught about `TernaryLinear`; registered
once (`register_peft`), plain `peft.get_peft_model(model, LoraConfig(...))` works as users write it.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from bonsai_ft.model import TernaryLinear

TIED = ("embed_tokens", "lm_head")


class TernaryLora(nn.Module, LoraLayer):
    """y = base(x; adapter's codebook) + scaling * dropout(x) A^T B^T over a frozen TernaryLinear.

    Master weights are float32; products run in the dtype of the activations.
    """

    adapter_layer_names = (*LoraLayer.adapter_layer_names, "lora_residual_codebook")

    def __init__(
        self,
        base_layer: TernaryLinear,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # PEFT warns about every layer class it did not define
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self.lora_residual_codebook = nn.ParameterDict({})
        self._active_adapter = adapter_name
        if r > 0:
            self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        else:
            self.add_codebook(adapter_name, config)

    def update_layer(self, adapter_name, r, lora_alpha, config, **kwargs) -> None:
        for field in ("use_dora", "lora_bias"):
            if getattr(config, field, False):
                raise ValueError(f"{field}=True is not supported on a ternary base")
        if (
            not isinstance(config.init_lora_weights, bool)
            and config.init_lora_weights != "gaussian"
        ):
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} needs the float weight; "
                "a ternary base takes True, False or 'gaussian'"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        self.add_codebook(adapter_name, config)

    def add_codebook(self, adapter_name: str, config: LoraConfig) -> None:
        """A trainable copy of the base's codebook, unless the adapter is LoRA alone."""
        base = self.get_base_layer().residual_codebook
        if base is None or not trains_codebooks(config):
            return
        copy = nn.Parameter(base.detach().clone(), requires_grad=not config.inference_mode)
        self.lora_residual_codebook[adapter_name] = copy

    def codebook(self, names: list[str]) -> Tensor | None:
        """The codebook that the named adapters ask for; None means the base's own.

        Several adapters at once add their changes.
        """
        own = [self.lora_residual_codebook[n] for n in names if n in self.lora_residual_codebook]
        if len(own) <= 1:
            return own[0] if own else None
        base = self.get_base_layer().residual_codebook
        return base + sum(codebook - base for codebook in own)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        rows = kwargs.pop("adapter_names", None)
        if self.disable_adapters:
            return self.base_layer(x)
        if rows is None:
            return self._adapted(x, list(self.active_adapters))
        y = x.new_empty(*x.shape[:-1], self.out_features)
        for name in dict.fromkeys(rows):
            chosen = torch.tensor([row == name for row in rows], device=x.device)
            part = x[chosen]
            y[chosen] = self.base_layer(part) if name == "__base__" else self._adapted(part, [name])
        return y

    def _adapted(self, x: Tensor, names: list[str]) -> Tensor:
        y = self.base_layer(x, codebook=self.codebook(names))
        for name in names:
            if name not in self.lora_A:
                continue
            h = self.lora_dropout[name](x).to(y.dtype)
            h = F.linear(h, self.lora_A[name].weight.to(y.dtype))
            y = torch.add(
                y, F.linear(h, self.lora_B[name].weight.to(y.dtype)), alpha=self.scaling[name]
            )
        return y

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Always refused: requantising would round the adapter away."""
        raise ValueError(
            "an adapter cannot be merged into packed signs: the change is smaller than a step of "
            "the grid and would be lost; keep it as an adapter"
        )

    def unmerge(self) -> None:
        """Nothing can have been merged."""

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return False

    def __repr__(self) -> str:
        return "lora." + super().__repr__()


class TernaryLoraModel(LoraModel):
    """PEFT's LoRA tuner; ternary layers get `TernaryLora`, everything else what PEFT gives it."""

    def __init__(self, model, config, adapter_name, **kwargs) -> None:
        configs = config if isinstance(config, dict) else {adapter_name: config}
        for one in configs.values():
            _tie_saved_modules(model, one)
        super().__init__(model, config, adapter_name, **kwargs)

    @staticmethod
    def _create_new_module(lora_config, adapter_name, target, **kwargs):
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, TernaryLinear):
            return TernaryLora(target, adapter_name, config=lora_config, **kwargs)
        return LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)

    def inject_adapter(self, model, adapter_name, *args, **kwargs) -> None:
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        if not trains_codebooks(config):
            return
        # Layers that LoRA does not target have codebooks too, and those train as well.
        for name, module in list(model.named_modules()):
            if isinstance(module, TernaryLora):
                if adapter_name not in module.lora_residual_codebook:
                    module.add_codebook(adapter_name, config)
            elif isinstance(module, TernaryLinear) and not name.endswith("base_layer"):
                if module.residual_codebook is not None:
                    model.set_submodule(name, TernaryLora(module, adapter_name, config))
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)


def trains_codebooks(config: LoraConfig) -> bool:
    """Plain LoraConfigs train codebooks; `TernaryLoraConfig(codebooks=False)` does not."""
    return getattr(config, "codebooks", True)


def register_peft() -> None:
    """Makes PEFT use `TernaryLoraModel` for LoRA; without ternary layers it changes nothing."""
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = TernaryLoraModel


def _tie_saved_modules(model: nn.Module, config: LoraConfig) -> None:
    """Embedding and head of a tied model stay tied when they are trained."""
    saved = set(config.modules_to_save or ())
    if not saved & set(TIED) or not getattr(model, "all_tied_weights_keys", None):
        return
    config.ensure_weight_tying = True
