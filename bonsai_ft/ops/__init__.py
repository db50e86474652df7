"""How is y = x W^T computed on packed weights, and which implementation does it?

One operator, `bonsai::ternary_linear`, declared through torch.library with a shape-only version and
its gradients; implementations stand behind it, each a module with the two functions of
`reference.py`, where the formulas are. `kernel="auto"` takes the fastest one that works on the
tensors' device; a kernel asked for by name works or raises.
"""

import importlib
import logging
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from bonsai_ft.ops import reference
from bonsai_ft.ops.sources import KernelUnavailable

KERNELS = ("auto", "reference", "cpu", "cuda")
COMPILED = ("cpu", "cuda")
_MODULES = {"reference": "reference", "cpu": "cpu_kernels", "cuda": "cuda_kernels"}
# What the compiled kernels compute in; float64 is the reference's.
COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One implementation on this machine: if not available, `reason` says why."""

    name: str
    is_available: bool
    reason: str = ""
    detail: str = ""


def available_kernels() -> list[KernelReport]:
    """Every implementation, tried out (the CPU's is compiled if it was not before)."""
    reports = [
        KernelReport(name="reference", is_available=True, detail="plain torch, any device"),
    ]
    for name in COMPILED:
        try:
            detail = _module(name).describe()
        except KernelUnavailable as error:
            reports.append(KernelReport(name=name, is_available=False, reason=str(error)))
        else:
            reports.append(KernelReport(name=name, is_available=True, detail=detail))
    return reports


def check_kernel(name: str) -> None:
    """ValueError for a name that is not one of KERNELS."""
    if name not in KERNELS:
        raise ValueError(f"kernel={name} is not known; choose one of {', '.join(KERNELS)}")


@lru_cache(maxsize=32)
def choose_kernel(name: str, device: str = "cpu") -> str:
    """The implementation that will run for `kernel=<name>` on a kind of device ("cpu", "cuda").

    "auto" falls back on the reference and says once why. Raises ValueError for a name that is
    unknown, or that cannot be had on this machine or for this kind of device.
    """
    check_kernel(name)
    if name == "reference" or device == "meta":
        return "reference"
    if name != "auto" and name != device:
        raise ValueError(
            f"kernel={name} was asked for, but the model is on {device}; use kernel=auto"
        )
    if device not in COMPILED:
        _log.info("kernel: reference (there is none of our own for %s)", device)
        return "reference"
    try:
        detail = _module(device).describe()
    except KernelUnavailable as error:
        if name != "auto":
            raise ValueError(f"kernel={name} cannot be used: {error}") from error
        _log.warning("kernel: reference, slower than kernel=%s, because %s", device, error)
        return "reference"
    _log.info("kernel: %s (%s)", device, detail)
    return device


def _implementation(kernel: str, x: Tensor) -> ModuleType:
    if x.dtype not in COMPILED_DTYPES:
        if kernel in ("cpu", "cuda"):
            raise ValueError(
                f"kernel={kernel} computes in float32, bfloat16 and float16, not "
                f"{str(x.dtype).removeprefix('torch.')}; use kernel=reference"
            )
        return reference
    return _module(choose_kernel(kernel, x.device.type))


def _check_width(x: Tensor, in_features: int) -> None:
    if not x.dim() or x.shape[-1] != in_features:
        raise ValueError(
            f"x has shape {list(x.shape)}, but the layer has {in_features} inputs; "
            f"give [..., {in_features}]"
        )


def _check_stored(ternary: Tensor, scale: Tensor, codes: Tensor | None) -> None:
    for name, tensor, dtype in (
        ("ternary", ternary, torch.uint8),
        ("scale", scale, torch.float16),
        ("codes", codes, torch.uint8),
    ):
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {tensor.dtype}; compiled kernels read {dtype}, as files hold it"
            )


@lru_cache(maxsize=8)
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"bonsai_ft.ops.{_MODULES[name]}")


@torch.library.custom_op("bonsai::ternary_linear", mutates_args=())
def ternary_linear(
    x: Tensor,
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
    implementation: str = "auto",
) -> Tensor:
    """y = x (S*T + R)^T for x [..., in], in the dtype of x; R comes from `codes` and `codewords`.

    ternary u8 [out, bytes], scale f16 [out, G] or [out, 1], codes u8 [out, bytes],
    codewords [G, K, d] = mu + sigma * codebook. Differentiable in x and codewords.
    `implementation` is one of KERNELS; Inductor has an argument `kernel` of its own.
    """
    _check_width(x, in_features)
    module = _implementation(implementation, x)
    if module is not reference:
        _check_stored(ternary, scale, codes)
    return module.forward(x, ternary, scale, codes, codewords, in_features, packing)


@ternary_linear.register_fake
def _(
    x: Tensor,
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
    implementation: str = "auto",
) -> Tensor:
    _check_width(x, in_features)
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
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gradients of `ternary_linear` for x and for the codewords (empty where not needed)."""
    backward = _implementation(implementation, x).backward
    return backward(
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
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else x.new_empty(0)
    if need_dcodewords and codewords is not None:
        dcodewords = torch.empty_like(codewords, memory_format=torch.contiguous_format)
    else:
        dcodewords = x.new_empty(0)
    return dx, dcodewords


def _setup_context(ctx, inputs, output) -> None:
    x, ternary, scale, codes, codewords, in_features, packing, implementation = inputs
    ctx.save_for_backward(x, ternary, scale, codes, codewords)
    ctx.in_features, ctx.packing, ctx.implementation = in_features, packing, implementation


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
        ctx.implementation,
    )
    return (
        dx if need_dx else None,
        None,
        None,
        None,
        dcodewords if need_dcodewords else None,
        None,
        None,
        None,
    )


ternary_linear.register_autograd(_backward, setup_context=_setup_context)
