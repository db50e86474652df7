"""What is the loss of a batch, without ever holding logits for the whole vocabulary and batch?

Only target positions reach the head, a slice at a time. A frozen head needs the gradient of its
input alone, so that is made while a slice's logits are there (as Liger-Kernel's fused linear cross
entropy does); a head that trains computes its logits again in backward. Losses are sums in nats
over target tokens, so that any grouping of rows into batches, micro-batches and processes gives the
same mean.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from bonsai_ft.data.batches import Batch

# Float32 logits of one slice: 528 tokens of 32,000 words, 67 of 248,320.
SLICE_BYTES = 64 << 20


def slice_tokens(vocabulary: int) -> int:
    """Tokens whose logits are held at a time."""
    return max(1, SLICE_BYTES // (4 * vocabulary))


def sum_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Sum of the negative log-likelihoods, in nats, of the batch's target tokens."""
    device = _input_device(model)
    # Rows are padded on the right, and no token of a causal model sees a later one: without a
    # mask the result is the same, and attention skips the upper triangle.
    hidden = model.get_decoder()(
        input_ids=batch.input_ids.to(device), use_cache=False
    ).last_hidden_state
    targets = batch.target_mask[:, 1:].to(device)
    states = hidden[:, :-1][targets]
    labels = batch.input_ids[:, 1:].to(device)[targets]
    return sliced_cross_entropy(model, states, labels)


def sliced_cross_entropy(model: PreTrainedModel, states: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of -log p(label): states [N, hidden], labels [N]."""
    head = model.get_output_embeddings()
    if _is_plain_and_frozen(model, head):
        return _FrozenHeadLoss.apply(states, head.weight, labels)
    # the sum of nothing: 0, but with a way back to the states if there are no targets at all
    total = states[:0].sum(dtype=_at_least_float32(states.dtype))
    size = slice_tokens(model.config.get_text_config().vocab_size)
    for start in range(0, len(labels), size):
        piece = slice(start, start + size)
        total = total + checkpoint(
            _slice_loss, model, states[piece], labels[piece], use_reentrant=False
        )
    return total


def _is_plain_and_frozen(model: PreTrainedModel, head: nn.Module) -> bool:
    """Whether the logits are states @ weight.T and nothing else, of a frozen weight."""
    nothing = torch.empty(0)
    return (
        type(head) is nn.Linear
        and head.bias is None
        and not head.weight.requires_grad
        and not (head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__)
        and adjust_logits(model, nothing) is nothing
        and not torch.is_autocast_enabled(head.weight.device.type)
    )


class _FrozenHeadLoss(torch.autograd.Function):
    """Sum of -log softmax(states @ weight.T)[label]; its gradient is (softmax - one_hot) @ weight.

    Keeps that gradient [N, hidden] alone; upstream, a scalar, multiplies it in float32.
    """

    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        dtype = _at_least_float32(states.dtype)
        total = torch.zeros((), dtype=dtype, device=states.device)
        gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        size = slice_tokens(weight.shape[0])
        for start in range(0, len(labels), size):
            piece = slice(start, start + size)
            logits = (states[piece] @ weight.T).to(dtype)
            picked = labels[piece, None]
            # a label outside the vocabulary would be written elsewhere; gather refuses it
            total += (logits.logsumexp(1, keepdim=True) - logits.gather(1, picked)).sum()
            if gradient is not None:
                logits = torch.softmax(logits, dim=1, out=logits)
                logits.scatter_add_(1, picked, logits.new_full(picked.shape, -1.0))
                torch.mm(logits.to(weight.dtype), weight, out=gradient[piece])
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(gradient.dtype), None, None


def _slice_loss(model: PreTrainedModel, states: Tensor, labels: Tensor) -> Tensor:
    logits = model.get_output_embeddings()(states)
    logits = adjust_logits(model, logits.to(_at_least_float32(logits.dtype)))
    return F.cross_entropy(logits, labels, reduction="sum")


def adjust_logits(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """What some architectures do to the head's output (Gemma, Cohere, Granite).

    The logits themselves where that is nothing.
    """
    config = model.config.get_text_config()
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.no_grad()
def check_head(model: PreTrainedModel, input_ids: list[int]) -> None:
    """Compares the logits behind the loss with those of the model's own forward pass.

    Raises ValueError for an architecture that does to them what `adjust_logits` does not know.
    """
    ids = torch.tensor([input_ids], device=_input_device(model))
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    ours = adjust_logits(model, model.get_output_embeddings()(hidden).float())
    # rounding of 16-bit logits is far below this, a forgotten factor far above
    is_far = (ours - theirs).square().mean() > 0.02**2 * theirs.square().mean()
    # what is not finite is reported with step and rows
    if theirs.isfinite().all() and is_far:
        raise ValueError(
            f"{type(model).__name__} changes the output of its head in a way that bonsai-ft does "
            "not know, so that losses would be wrong; this architecture cannot be trained yet"
        )


def _input_device(model: PreTrainedModel) -> torch.device:
    return next(model.get_input_embeddings().parameters()).device


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss in nats per target token, and the number of those tokens."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        total += sum_loss(model, batch).item()
        count += batch.num_targets
    model.train(was_training)
    return (total / count if count else math.nan), count
