"""How much memory will a training step need, and how much did it take?

The plan adds what must exist at once: the packed base, everything trainable with its gradient and
two moments, what is saved for backward, and the largest temporary. It is an estimate made before
the first step and is shown beside the measured peak.
"""

import ctypes
import resource
import sys
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from bonsai_ft.config import TrainSection
from bonsai_ft.model import TernaryLinear
from bonsai_ft.train.loss import slice_tokens

# Measured on Linux (glibc) with SmolLM2: peak over what the plan's other lines explain.
HEAP_OVERHEAD = 0.8
# Blocks from this size on go back to the system when they are freed. Left alone, glibc moves its
# limit up to 32 MiB and keeps what lies below: a tenth of the peak at the shape of a 1B model.
RETURNED_BYTES = 8 << 20
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose.

    `runtime_bytes` is what the process held before the model came, `heap_bytes` what the CPU's
    allocator keeps beyond what is in use.
    """

    base_bytes: int
    trainable_bytes: int
    activation_bytes: int
    workspace_bytes: int
    runtime_bytes: int = 0
    heap_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())


def plan_memory(
    model: PreTrainedModel,
    groups: dict[str, list[nn.Parameter]],
    settings: TrainSection,
    longest: int,
    *,
    optimizer_bytes_per_moment: int = 4,
    runtime_bytes: int = 0,
) -> MemoryPlan:
    """The plan for micro-batches of `batch_size` rows of `longest` tokens."""
    trainable = [p for tensors in groups.values() for p in tensors]
    known = {id(p) for p in trainable}
    base = sum(t.nbytes for t in model.parameters() if id(t) not in known)
    base += sum(t.nbytes for t in model.buffers())
    states = sum(p.nbytes * 2 + 2 * p.numel() * optimizer_bytes_per_moment for p in trainable)
    tokens = settings.batch_size * longest
    config = model.config.get_text_config()
    element = 2 if model.dtype != torch.float32 else 4
    layers, hidden = config.num_hidden_layers, config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    # per token and block: float32 inputs of norms, queries, keys, values and attention output,
    # and for every layer LoRA's dropped-out input with its mask
    per_layer = tokens * element * (36 * hidden + 7 * inner)
    saved = layers * tokens * element * hidden if settings.gradient_checkpointing else 0
    activations = saved + (1 if settings.gradient_checkpointing else layers) * per_layer
    decoded = max(
        (
            2 * m.out_features * m.in_features * element
            for m in model.modules()
            if isinstance(m, TernaryLinear)
        ),
        default=0,
    )
    # a slice's logits as computed, in float32, their softmax and its gradient
    held = min(slice_tokens(config.vocab_size), tokens)
    logits = held * config.vocab_size * (2 * element + 3 * 4)
    plan = MemoryPlan(
        base_bytes=base,
        trainable_bytes=states,
        activation_bytes=activations,
        workspace_bytes=decoded + logits,
        runtime_bytes=runtime_bytes,
    )
    if model.device.type != "cpu":
        return plan
    # The C heap keeps freed blocks of one batch's shapes while it serves the next batch's.
    kept = round(HEAP_OVERHEAD * (activations + plan.workspace_bytes))
    return replace(plan, heap_bytes=kept)


def return_large_blocks(at_least: int = RETURNED_BYTES) -> bool:
    """Makes the C heap give freed blocks back from this size on; False where there is no glibc.

    For the whole process, see mallopt(3): a limit that was set no longer moves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, at_least))


def peak_memory_bytes(device: str) -> int:
    """Peak of the device (CUDA) or of this process (CPU) so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """What this process holds now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
