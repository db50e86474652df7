"""How do PEFT's LoRA and a trainable codebook live on a packed layer?

An adapter is LoRA matrices plus its own copy of the codebooks. `TernaryLora` keeps both by adapter
name, so the base is never written to: choosing an adapter, or none, is choosing which tensors the
forward pass reads. `TernaryLoraModel` is PEFT's LoRA tuner taught about `TernaryLinear`; registered
once (`register_peft`), plain `peft.get_peft_model(model, LoraConfig(...))` works as users write it.
"""

import warnings
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bonsai_ft.model import TernaryLinear
from bonsai_ft.ops.dropout import dropout

# Variants of LoRA that read or rewrite the float weight, or that `TernaryLora.forward` lacks.
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "megatron_config",
    "layer_replication",
)


class _AddLowRank(torch.autograd.Function):
    """y + scaling * dropout(x) A^T B^T; x [..., in], A [r, in], B [out, r], y [..., out].

    Added in place where y is not a view (autograd forbids those to change in a function like this).
    Keeps x, which the layer below keeps as well, and the r numbers per token between A and B; what
    dropout leaves of x is made again from the seed.
    """

    @staticmethod
    def forward(ctx, y, x, a, b, scaling: float, p: float, seed: int):
        h = F.linear(_rows(_dropped(x, p, seed)), a.to(x.dtype))
        y2, b2 = y.view(-1, y.shape[-1]), b.to(h.dtype).T
        if y._is_view():
            y = torch.addmm(y2, h, b2, alpha=scaling).view(y.shape)
        else:
            y2.addmm_(h, b2, alpha=scaling)
            ctx.mark_dirty(y)
        ctx.save_for_backward(x, a, b, h)
        ctx.scaling, ctx.p, ctx.seed = scaling, p, seed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, a, b, h = ctx.saved_tensors
        da = db = dx = None
        dy2 = _rows(dy)
        if ctx.needs_input_grad[3]:
            db = (dy2.T @ h).to(b.dtype).mul_(ctx.scaling)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dh = (dy2 @ b.to(dy.dtype)).mul_(ctx.scaling)
            if ctx.needs_input_grad[2]:
                da = (dh.T @ _rows(_dropped(x, ctx.p, ctx.seed))).to(a.dtype)
            if ctx.needs_input_grad[1]:
                dx = _dropped(dh @ a.to(dh.dtype), ctx.p, ctx.seed).view(x.shape)
        return dy, dx, da, db, None, None, None


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [tokens, n], one token for a vector."""
    return x.reshape(-1, x.shape[-1])


def _dropped(x: Tensor, p: float, seed: int) -> Tensor:
    return dropout(x, p, seed) if p else x


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
        r: int | None = None,
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
        if r is None:
            self.add_codebook(adapter_name, config)
        else:
            self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    @property
    def ternary_layer(self) -> TernaryLinear:
        return cast(TernaryLinear, self.get_base_layer())

    def update_layer(self, adapter_name, r, lora_alpha, config, **kwargs) -> None:
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        self.add_codebook(adapter_name, config)

    def add_codebook(self, adapter_name: str, config: LoraConfig) -> None:
        """A trainable copy of the base's codebook, unless the adapter is LoRA alone."""
        base = self.ternary_layer.residual_codebook
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
        base = self.ternary_layer.residual_codebook
        return base + sum(codebook - base for codebook in own)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        rows = kwargs.pop("adapter_names", None)
        if self.disable_adapters:
            return self.base_layer(x)
        if rows is None:
            return self._adapted(x, list(self.active_adapters))
        y = None
        for name in dict.fromkeys(rows):
            chosen = torch.tensor([row == name for row in rows], device=x.device)
            part = x[chosen]
            part = self.base_layer(part) if name == "__base__" else self._adapted(part, [name])
            if y is None:
                # of the results' dtype, which under autocast is not that of x
                y = part.new_empty(*x.shape[:-1], part.shape[-1])
            y[chosen] = part
        return self.base_layer(x) if y is None else y

    def _adapted(self, x: Tensor, names: list[str]) -> Tensor:
        y = self.base_layer(x, codebook=self.codebook(names))
        for name in names:
            if name not in self.lora_A:
                continue
            p, seed = 0.0, 0
            if self.training and isinstance(drop := self.lora_dropout[name], nn.Dropout):
                p, seed = drop.p, int(torch.randint(2**63 - 1, ()))
            a, b = (cast(Tensor, part[name].weight) for part in (self.lora_A, self.lora_B))
            y = _AddLowRank.apply(y, x.to(y.dtype), a, b, self.scaling[name], p, seed)
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

    def _check_new_adapter_config(self, config) -> None:
        super()._check_new_adapter_config(config)
        if any(isinstance(module, TernaryLinear) for module in self.model.modules()):
            _check_supported(config)
            _check_saved_modules(self.model, config)

    def _check_tied_modules(self, model, config) -> None:
        saved = {name.rsplit(".", 1)[-1] for name in config.modules_to_save or ()}
        tied = {name.rsplit(".", 1)[-1] for name in self._get_module_names_tied_with_embedding()}
        if tied and saved & {"embed_tokens", *tied}:
            # embedding and head of a tied model stay tied when they are trained
            config.modules_to_save = list(config.modules_to_save)
            config.ensure_weight_tying = True
        super()._check_tied_modules(model, config)

    def _get_module_names_tied_with_embedding(self) -> list[str]:
        # PEFT's own search finds nothing once an earlier adapter has wrapped the embedding
        tied = getattr(self.model, "all_tied_weights_keys", None)
        if not tied:
            return super()._get_module_names_tied_with_embedding()
        embedding = self.model.get_input_embeddings()
        name = next(name for name, module in self.model.named_modules() if module is embedding)
        return sorted(
            target.rpartition(".")[0]
            for target, source in tied.items()
            if source == f"{name}.weight"
        )

    def _prepare_adapter_config(self, config, model_config):
        if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
            # PEFT would look for nn.Linear
            names = [
                name.removesuffix(".base_layer")
                for name, module in self.model.named_modules()
                if isinstance(module, TernaryLinear)
            ]
            config.target_modules = set(names) or config.target_modules
        return super()._prepare_adapter_config(config, model_config)

    @staticmethod
    def _create_new_module(lora_config, adapter_name, target, **kwargs):
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, TernaryLinear):
            return TernaryLora(target, adapter_name, config=lora_config, **kwargs)
        return LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)

    def add_weighted_adapter(self, adapters, weights, adapter_name, *args, **kwargs) -> None:
        """PEFT combines the LoRA matrices; codebooks add their weighted changes."""
        super().add_weighted_adapter(adapters, weights, adapter_name, *args, **kwargs)
        for module in self.model.modules():
            if not isinstance(module, TernaryLora):
                continue
            own = module.lora_residual_codebook
            if adapter_name not in own:
                continue
            base = module.ternary_layer.residual_codebook
            pairs = [(n, w) for n, w in zip(adapters, weights, strict=True) if n in own]
            with torch.no_grad():
                own[adapter_name].copy_(base + sum(w * (own[n] - base) for n, w in pairs))

    def inject_adapter(self, model, adapter_name, *args, **kwargs) -> None:
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        config = cast(LoraConfig, self.peft_config[adapter_name])
        if not trains_codebooks(config):
            return
        # Layers that LoRA does not target have codebooks too, and those train as well.
        for name, module in list(model.named_modules()):
            if isinstance(module, TernaryLora):
                if adapter_name in module.lora_residual_codebook:
                    continue
                module.add_codebook(adapter_name, config)
            elif (
                isinstance(module, TernaryLinear)
                and module.residual_codebook is not None
                and not name.endswith("base_layer")
            ):
                module = TernaryLora(module, adapter_name, config)
                module.train(model.training)
                model.set_submodule(name, module)
            else:
                continue
            module.set_adapter(self.active_adapters)
            if adapter_name in module.lora_residual_codebook:
                is_trained = adapter_name in self.active_adapters and not config.inference_mode
                module.lora_residual_codebook[adapter_name].requires_grad_(is_trained)


def trains_codebooks(config: LoraConfig) -> bool:
    """Plain LoraConfigs train codebooks; `TernaryLoraConfig(codebooks=False)` does not."""
    return getattr(config, "codebooks", True)


def register_peft() -> None:
    """Makes PEFT use `TernaryLoraModel` for LoRA; without ternary layers it changes nothing."""
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = TernaryLoraModel


def _check_supported(config: LoraConfig) -> None:
    """ValueError for settings that a ternary base cannot honour."""
    for field in _UNSUPPORTED:
        if value := getattr(config, field, None):
            raise ValueError(f"{field}={value!r} is not supported on a ternary base; leave it out")
    if config.bias != "none":
        raise ValueError(
            f"bias={config.bias!r} would train the base itself, which adapters share; use 'none'"
        )
    initial = config.init_lora_weights
    if not isinstance(initial, bool) and initial != "gaussian":
        raise ValueError(
            f"init_lora_weights={initial!r} needs the float weight; "
            "a ternary base takes True, False or 'gaussian'"
        )


def _check_saved_modules(model: nn.Module, config: LoraConfig) -> None:
    saved = tuple(config.modules_to_save or ())
    for path, module in model.named_modules():
        name = next((n for n in saved if path == n or path.endswith(f".{n}")), None)
        if name and any(isinstance(inner, TernaryLinear) for inner in module.modules()):
            raise ValueError(
                f"modules_to_save: {name!r} holds packed weights, which never train whole; "
                "make it a target of LoRA instead"
            )
