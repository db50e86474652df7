"""How does a packed weight behave as a layer of a torch model?

`TernaryLinear` stands where an `nn.Linear` stood. Signs, scales and codes are parameters that never
train (parameters rather than buffers: DDP would broadcast buffers at every forward, FSDP shards
only parameters, and users freeze by name); the codebook is the one tensor here that may.
"""

import torch
from torch import Tensor, nn

from bonsai_ft.format.weight import Residual, TernaryWeight
from bonsai_ft.ops import ternary_linear


@torch.library.custom_op("bonsai::round_to_storage", mutates_args=())
def round_to_storage(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to the dtype the file stores; the gradient passes straight through.

    Forward sees exactly what will be exported, the optimiser keeps its small steps in float32. An
    operator, because Inductor takes a cast there and back for nothing and leaves it out.
    """
    return master.to(dtype).to(master.dtype) if master.dtype != dtype else master.clone()


@round_to_storage.register_fake
def _(master: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(master)


def _pass_through(ctx, gradient: Tensor):
    return gradient, None


round_to_storage.register_autograd(_pass_through)


class TernaryLinear(nn.Module):
    """y = x (S*T + R)^T + bias on packed weights: x [..., in] -> y [..., out] in the dtype of x.

    `ternary`, `scale`, `codes`, `residual_mu`, `residual_sigma` are stored bits and keep their
    dtype whatever `.to()` asks; `residual_codebook` is the float32 master of the stored codebook.
    `kernel` names the implementation (`bonsai_ft.ops.choose_kernel`).
    """

    residual_mu: Tensor
    residual_sigma: Tensor

    def __init__(self, weight: TernaryWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.packing = weight.packing
        self.kernel = "auto"
        self.ternary = _frozen(weight.ternary)
        self.scale = _frozen(weight.scale)
        if weight.residual is None:
            self.codebook_dtype = torch.float16
            self.register_parameter("codes", None)
            self.register_parameter("residual_codebook", None)
            self.register_buffer("residual_mu", None)
            self.register_buffer("residual_sigma", None)
        else:
            self.codebook_dtype = weight.residual.codebook.dtype
            self.codes = _frozen(weight.residual.codes)
            self.residual_codebook = nn.Parameter(weight.residual.codebook.float())
            # Copied, a few bytes per group: a deep copy of a buffer copies all of its storage,
            # which for a mapped tensor is the whole file. Parameters copy what they show.
            self.register_buffer("residual_mu", weight.residual.mu.clone())
            self.register_buffer("residual_sigma", weight.residual.sigma.clone())
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def qweight(self) -> Tensor:
        """The packed signs, under the name by which PEFT and others find a layer's device."""
        return self.ternary

    def codewords(self, codebook: Tensor | None = None) -> Tensor | None:
        """Effective codewords mu + sigma * codebook, [G, K, d] float32, as they will be stored."""
        codebook = self.residual_codebook if codebook is None else codebook
        if codebook is None:
            return None
        rounded = round_to_storage(codebook, self.codebook_dtype)
        mu, sigma = self.residual_mu.to(codebook.dtype), self.residual_sigma.to(codebook.dtype)
        return torch.addcmul(mu[:, None, None], sigma[:, None, None], rounded)

    def forward(self, x: Tensor, codebook: Tensor | None = None) -> Tensor:
        """An adapter passes its own `codebook` [G, K, d]; by default the layer's own is used."""
        device = x.device.type
        # what autocast does for nn.Linear; the meta device knows no autocast, float64 is left alone
        if device != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        y = ternary_linear(
            x,
            self.ternary,
            self.scale,
            self.codes,
            self.codewords(codebook),
            self.in_features,
            self.packing,
            self.kernel,
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def packed(self, codebook: Tensor | None = None) -> TernaryWeight:
        """The layer as stored, with `codebook` in place of its own if one is given."""
        residual = None
        if self.residual_codebook is not None:
            values = self.residual_codebook if codebook is None else codebook
            residual = Residual(
                codes=self.codes.detach(),
                codebook=values.detach().to(self.codebook_dtype),
                mu=self.residual_mu,
                sigma=self.residual_sigma,
            )
        return TernaryWeight(
            out_features=self.out_features,
            in_features=self.in_features,
            packing=self.packing,
            ternary=self.ternary.detach(),
            scale=self.scale.detach(),
            residual=residual,
        )

    def _apply(self, fn, recurse=True):
        # `.to(bfloat16)`, `.half()` and friends must move the packed tensors without rounding
        # them: their dtypes are the file format's. The bias and its gradient follow the model.
        follows = () if self.bias is None else (self.bias, self.bias.grad)

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or any(tensor is one for one in follows):
                return moved
            return tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        residual = "none"
        if self.residual_codebook is not None:
            _, k, dim = self.residual_codebook.shape
            residual = f"K={k}, d={dim}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, packing={self.packing}, residual: {residual}"
        )


def decode_weight(module: TernaryLinear, dtype: torch.dtype = torch.float32) -> Tensor:
    """S*T (+ R) of a layer as a float [out, in] tensor, for inspection and export."""
    return module.packed().dequantize(dtype=dtype)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
