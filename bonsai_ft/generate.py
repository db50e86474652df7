"""What does a model answer? Streaming generation for a prompt, or several prompts at once."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import TextStreamer

from bonsai_ft.data.chat import encode_prompt, stop_token_ids
from bonsai_ft.data.sources import Message
from bonsai_ft.model import TernaryLinear

# 2 Mi signs: below it one thread decodes a layer in less than a millisecond.
SMALL_LAYER_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer; `tokens` counts generated tokens, the stop token included."""

    text: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class _Stream(TextStreamer):
    """Hands over finished pieces of text instead of printing them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._show(text)


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[Message]],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    template: str | None = None,
    show: Callable[[str], None] | None = None,
) -> list[Answer]:
    """Answers every conversation; `show` receives the text as it comes (one conversation only).

    Temperature 0 is greedy. Raises ValueError for numbers out of range.
    """
    check_sampling(max_new_tokens, temperature, top_p, seed)
    if seed is not None:
        torch.manual_seed(seed)
    prompts = [encode_prompt(messages, tokenizer, template) for messages in conversations]
    stops = stop_token_ids(tokenizer, template)
    pad = pad_token_id(tokenizer)
    longest = max(map(len, prompts))
    device = model.device
    ids = torch.full((len(prompts), longest), pad, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        # answers start together, so padding stands on the left
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, longest - len(prompt) :] = 1
    sampling: dict[str, Any] = {
        "do_sample": False,
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }
    # below this, dividing by it overflows, and the likeliest token wins anyway
    if temperature > 1e-4:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    streamer = _Stream(tokenizer, show) if show is not None and len(prompts) == 1 else None
    was_training = model.training
    model.eval()
    started = time.perf_counter()
    try:
        with _few_threads(model):
            out = cast(Any, model).generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                eos_token_id=stops,
                pad_token_id=pad,
                streamer=streamer,
                **sampling,
            )
    finally:
        model.train(was_training)
    seconds = time.perf_counter() - started
    return [_finished(row[longest:].tolist(), stops, tokenizer, seconds) for row in out]


@contextmanager
def _few_threads(model: PreTrainedModel) -> Iterator[None]:
    """One thread while small layers are decoded token by token on a CPU.

    There a parallel region costs more than it saves, and far more on a busy machine.
    """
    threads = torch.get_num_threads()
    sizes = [m.ternary.numel() for m in model.modules() if isinstance(m, TernaryLinear)]
    if model.device.type == "cpu" and sizes and max(sizes) < SMALL_LAYER_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_sampling(
    max_new_tokens: int, temperature: float, top_p: float, seed: int | None = None
) -> None:
    """Raises ValueError for numbers out of range; before a model is loaded, that costs no wait."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: it must be 1 or more")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature {temperature}: give a number from 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p}: give a number above 0, at most 1")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: give a whole number from 0, below 2**63")


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token; where there is none, any token does, because it is masked."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def _finished(
    tokens: list[int], stops: list[int], tokenizer: PreTrainedTokenizerBase, seconds: float
) -> Answer:
    end = next((i for i, token in enumerate(tokens) if token in stops), None)
    count = len(tokens) if end is None else end + 1
    text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
    return Answer(text=str(text).strip(), tokens=count, seconds=seconds)
