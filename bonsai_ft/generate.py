"""What does a model answer? Streaming generation for a prompt, or several prompts at once."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import TextStreamer

from bonsai_ft.data.chat import encode_prompt, stop_token_ids
from bonsai_ft.data.sources import Message
from bonsai_ft.decode import Decoding, start_decoding
from bonsai_ft.model import TernaryLinear

_log = logging.getLogger(__name__)

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
    # below this, dividing by it overflows, and the likeliest token wins anyway
    is_greedy = temperature <= 1e-4
    streamer = _Stream(tokenizer, show) if show is not None and len(prompts) == 1 else None
    was_training = model.training
    model.eval()
    started = time.perf_counter()
    try:
        processors = _logits_processors(model, temperature, top_p, is_greedy)
        decoding = None
        if processors is not None:
            decoding = start_decoding(model, ids, mask, max_new_tokens)
        if decoding is not None and processors is not None:
            out = _decode(
                decoding, ids, max_new_tokens, (stops, pad), processors, is_greedy, streamer
            )
        else:
            with _few_threads(model):
                out = cast(Any, model).generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=stops,
                    pad_token_id=pad,
                    streamer=streamer,
                    **_sampling(temperature, top_p, is_greedy),
                )
    finally:
        model.train(was_training)
    seconds = time.perf_counter() - started
    return [_finished(row[longest:].tolist(), stops, tokenizer, seconds) for row in out]


def _sampling(temperature: float, top_p: float, is_greedy: bool) -> dict[str, Any]:
    """The same choice of tokens in the words of transformers' `generate`."""
    if is_greedy:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


# Settings of a generation config that change no token, or that `answer` sets itself.
_HARMLESS = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "cache_implementation", "return_dict_in_generate", "output_scores", "output_logits",
    "output_attentions", "output_hidden_states", "transformers_version", "repetition_penalty",
    "is_assistant", "disable_compile", "remove_invalid_values", "_from_model_config",
}  # fmt: skip


def _logits_processors(
    model: PreTrainedModel, temperature: float, top_p: float, is_greedy: bool
) -> list[Any] | None:
    """What transformers would do to the logits before a token is chosen.

    None if the model's generation config asks for more than is known here.
    """
    config = model.generation_config
    if config is None:
        return None
    unknown = set(config.to_diff_dict()) - _HARMLESS
    if unknown:
        _log.info("tokens are chosen by transformers: %s is set", ", ".join(sorted(unknown)))
        return None
    processors: list[Any] = []
    penalty = config.repetition_penalty
    if penalty is not None and penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=penalty))
    if not is_greedy:
        if temperature != 1.0:
            processors.append(TemperatureLogitsWarper(temperature))
        if top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p))
    return processors


def _decode(
    decoding: Decoding,
    ids: Tensor,
    max_new_tokens: int,
    special: tuple[list[int], int],
    processors: list[Any],
    is_greedy: bool,
    streamer: _Stream | None,
) -> Tensor:
    """Prompts and answers, [B, T]; a finished row goes on with padding, as transformers does.

    `special` holds the tokens that end an answer, and the padding.
    """
    stops, pad = special
    if streamer is not None:
        streamer.put(ids)
    stop = torch.tensor(stops, device=ids.device)
    is_running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    logits = decoding.logits
    for count in range(1, max_new_tokens + 1):
        scores = logits
        for processor in processors:
            scores = processor(ids, scores)
        if is_greedy:
            tokens = scores.argmax(-1)
        else:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        tokens = torch.where(is_running, tokens, pad)
        ids = torch.cat((ids, tokens[:, None]), dim=1)
        if streamer is not None:
            streamer.put(tokens)
        is_running &= ~torch.isin(tokens, stop)
        if count == max_new_tokens or not is_running.any():
            break
        logits = decoding.step(tokens)
    if streamer is not None:
        streamer.end()
    return ids


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
