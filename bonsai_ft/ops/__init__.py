"""How is y = x W^T computed on packed weights, and which implementation does it?

One operator, `bonsai::ternary_linear`, declared through torch.library with a shape-only version and
its gradients; implementations register behind it. The formulas are in `reference.py`.
"""

import torch
from torch import Tensor

from bonsai_ft.ops import reference

KERNELS = ("auto", "reference", "cpu", "cuda")
AVAILABLE = ("auto", "reference")


def choose_kernel(name: str) -> str:
    """The implementation that will run for `kernel=<name>`.

    Raises ValueError for a name that is unknown or has no implementation in this version.
    """
    if name not in KERNELS:
        raise ValueError(f"kernel={name} is not known; choose one of {', '.join(KERNELS)}")
    if name not in AVAILABLE:
        raise ValueError(
            f"kernel={name} has no implementation in this version of bonsai-ft; "
            f"choose one of {', '.join(AVAILABLE)}"
        )
    return "reference"


@torch.library.custom_op("bonsai::ternary_linear", mutates_args=())
def ternary_linear(
    x: Tensor,
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
) -> Tensor:
    """y = x (S*T + R)^T for x [..., in], in the dtype of x; R comes from `codes` and `codewords`.

    ternary u8 [out, bytes], scale f16 [out, G] or [out, 1], codes u8 [out, bytes],
    codewords [G, K, d] = mu + sigma * codebook. Differentiable in x and codewords.
    """
    return reference.forward(x, ternary, scale, codes, codewords, in_features, packing)


@ternary_linear.register_fake
def _(
    x: Tensor,
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], ternary.shape[0])


@torch.library.custom_op("bonsai::ternary_linear_backward", mutates_args=())
def ternary_linear_backward(
    dy: Tensor,
    x: Tensor,
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
    need_dx: bool,
    need_dcodewords: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of `ternary_linear` for x and for the codewords (empty where not needed)."""
    return reference.backward(
        dy, x, ternary, scale, codes, codewords, in_features, packing, need_dx, need_dcodewords
    )


@ternary_linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
    need_dx: bool,
    need_dcodewords: bool,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else x.new_empty(0)
    if need_dcodewords and codewords is not None:
        dcodewords = torch.empty_like(codewords, memory_format=torch.contiguous_format)
    else:
        dcodewords = x.new_empty(0)
    return dx, dcodewords


def _setup_context(ctx, inputs, output) -> None:
    x, ternary, scale, codes, codewords, in_features, packing = inputs
    ctx.save_for_backward(x, ternary, scale, codes, codewords)
    ctx.in_features, ctx.packing = in_features, packing


def _backward(ctx, dy):
    x, ternary, scale, codes, codewords = ctx.saved_tensors
    need_dx = ctx.needs_input_grad[0]
    need_dcodewords = codewords is not None and ctx.needs_input_grad[4]
    dx, dcodewords = ternary_linear_backward(
        dy.contiguous(),
        x,
        ternary,
        scale,
        codes,
        codewords,
        ctx.in_features,
        ctx.packing,
        need_dx,
        need_dcodewords,
    )
    return (
        dx if need_dx else None,
        None,
        None,
        None,
        dcodewords if need_dcodewords else None,
        None,
        None,
    )


ternary_linear.register_autograd(_backward, setup_context=_setup_context)
