"""Which implementations of the operator work here, and which one is taken?"""

import os
import shutil
from dataclasses import dataclass

import torch

from bonsai_ft.ops import available_kernels, choose_kernel
from bonsai_ft.resources import cache_folder


@dataclass(frozen=True, kw_only=True)
class KernelLine:
    """One implementation; `detail` is its instruction set or card, or why it cannot be had."""

    name: str
    is_available: bool
    is_auto: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class KernelSummary:
    """All of them, and what compiles them."""

    device: str
    auto: str
    kernels: list[KernelLine]
    compiler: str | None
    cache: str

    def text(self) -> str:
        width = max(len(line.name) for line in self.kernels)
        lines = []
        for line in self.kernels:
            state = "available" if line.is_available else "not available"
            chosen = " (auto)" if line.is_auto else ""
            lines.append(f"{line.name:<{width}}  {state}{chosen}: {line.detail}")
        return "\n".join(
            [
                *lines,
                f"compiler  {self.compiler or 'none found; install g++ or clang'}",
                f"cache  {self.cache}",
                f"kernel=auto takes {self.auto} on {self.device}",
            ]
        )


def kernel_summary() -> KernelSummary:
    """Tries every implementation; what must be compiled first is compiled now."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reports = available_kernels()
    auto = choose_kernel("auto", device)
    return KernelSummary(
        device=device,
        auto=auto,
        kernels=[
            KernelLine(
                name=report.name,
                is_available=report.is_available,
                is_auto=report.name == auto,
                detail=report.detail if report.is_available else report.reason,
            )
            for report in reports
        ],
        compiler=shutil.which(os.environ.get("CXX", "c++")),
        cache=str(cache_folder() / "kernels"),
    )
