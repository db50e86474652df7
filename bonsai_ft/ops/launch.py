"""What does `cuda_kernels.py` need of whoever runs its kernels: one method.

On a GPU that is `nvrtc.py`; in tests the host shim, which runs the same sources on CPU tensors.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Argument = Tensor | int | float


class Launcher(Protocol):
    """Runs kernels of `kernels/cuda`."""

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        block: int,
        arguments: Sequence[Argument],
        device: torch.device,
        shared_bytes: int = 0,
    ) -> None:
        """Enqueues `kernel` of the file `source` on the current stream of `device`.

        A Tensor is passed as the address of its first element, an int as int64, a float as
        float32; the int 0 stands for an address that the kernel does not use. `shared_bytes` is
        dynamic shared memory per block.
        """
