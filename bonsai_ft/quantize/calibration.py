"""What do the layers of a model see? Token sequences, block by block, and second moments of inputs.

Calibration and error report never share a sequence: every ninth one is held out.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

HELD_OUT_PART = 9
SHORTEST_SEQUENCE = 32
LONGEST_SEQUENCE = 2048
# Activations of this many tokens exist at a time, whatever the length of a sequence is.
TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class CalibrationSet:
    """Token ids [sequences, length] for fitting and, apart from them, for the error report."""

    fit: Tensor
    held_out: Tensor

    @property
    def length(self) -> int:
        return self.fit.shape[1]


def read_text(path: Path) -> str:
    """A text file as it is, or every string of a JSON or JSONL file.

    Raises ValueError naming file and line for what cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 (byte {error.start}); save the file as UTF-8"
        ) from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    if path.suffix not in (".jsonl", ".json"):
        return text
    # splitlines() would also break at separators that JSON allows inside a string
    lines = text.split("\n") if path.suffix == ".jsonl" else [text]
    parts = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            place = f"{path}:{number + error.lineno}"
            raise ValueError(f"{place}: not JSON ({error.msg})") from error
        parts.append("\n".join(_strings(row)))
    return "\n\n".join(parts)


def calibration_set(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int,
    length: int | None,
    most: int | None,
) -> CalibrationSet:
    """Cuts a text into `sequences` + held-out sequences of equal length.

    `length` None means the longest (up to 2048 and `most`, what the model can take) for which the
    text is enough; a shorter text gives fewer sequences. Raises ValueError if it is not enough for
    9 sequences of 32 tokens.
    """
    most = most or LONGEST_SEQUENCE
    if length is not None and length > most:
        raise ValueError(f"--length {length}: the model takes at most {most} tokens")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    held_out = max(1, sequences // (HELD_OUT_PART - 1))
    wanted = sequences + held_out
    if length is None:
        length = max(SHORTEST_SEQUENCE, min(LONGEST_SEQUENCE, len(ids) // wanted))
        length = min(length, most)
    count = min(wanted, len(ids) // length)
    if count < HELD_OUT_PART:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens; {HELD_OUT_PART} sequences of {length} "
            f"need {HELD_OUT_PART * length}: give a longer text"
        )
    held_out = max(1, count // HELD_OUT_PART)
    rows = ids[: count * length].view(count, length)
    # every ninth sequence, so that both parts cover the whole text
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.arange(held_out) * (count // held_out)] = True
    return CalibrationSet(fit=rows[~chosen], held_out=rows[chosen])


@dataclass
class InputStatistics:
    """E[x x^T] and range of one layer's inputs: x [tokens, in]."""

    moment: Tensor
    tokens: int = 0
    smallest: float = float("inf")
    largest: float = float("-inf")

    def add(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        low, high = x.aminmax()
        self.smallest = min(self.smallest, low.item())
        self.largest = max(self.largest, high.item())
        self.tokens += x.shape[0]
        with _exact_products(x.dtype):
            x = x.float()
            self.moment.addmm_(x.T, x)

    def second_moment(self) -> Tensor:
        return self.moment / max(self.tokens, 1)


@contextmanager
def _exact_products(dtype: torch.dtype) -> Iterator[None]:
    """float32 products of values that are bfloat16 already: twice as fast on some processors.

    Rounding them to bfloat16 first, as oneDNN is allowed to here, changes nothing.
    """
    setting = getattr(torch.backends.mkldnn, "matmul", None)
    if setting is None or dtype != torch.bfloat16:
        yield
        return
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


@dataclass
class BlockInputs:
    """Hidden states at the entry of one decoder block, and the block's other arguments."""

    hidden: Tensor
    arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def run(self, index: int, block: nn.Module, rows: range | None = None) -> Iterator[Tensor]:
        """Outputs of `block` for batches of rows, in order."""
        args, kwargs = self.arguments[index]
        rows = range(len(self.hidden)) if rows is None else rows
        for part in _batches(rows, self.hidden.shape[1]):
            out = block(self.hidden[part], *args, **kwargs)
            yield out[0] if isinstance(out, tuple) else out

    def advance(self, index: int, block: nn.Module) -> None:
        """Replaces the hidden states by the block's outputs, batch by batch in place."""
        start = 0
        for out in self.run(index, block):
            self.hidden[start : start + len(out)] = out
            start += len(out)


class _Recorder(nn.Module):
    """Stands for a decoder block and notes what the model hands it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # past nn.Module, which would make the block a child
        object.__setattr__(self, "block", block)
        self.hidden = torch.empty(0)
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "block"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # A cache would grow with every batch; blocks are run without one.
        kwargs = {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}
        self.hidden, self.arguments = hidden, (args, kwargs)
        return hidden


@torch.no_grad()
def first_block_inputs(
    model: PreTrainedModel, blocks: nn.ModuleList, ids: Tensor, dtype: torch.dtype
) -> BlockInputs:
    """Embeds `ids` [sequences, length] and records every block's masks and positions.

    The blocks may be on the meta device; the embedding and what precedes the blocks must be real.
    Raises ValueError for a model whose blocks are handed more than that.
    """
    recorders = [_Recorder(block) for block in blocks]
    originals = list(blocks)
    entry: list[Tensor] = []
    decoder = model.get_decoder()
    final_norm = {n: m for n, m in decoder.named_children() if n in ("norm", "final_layernorm")}
    try:
        for i, recorder in enumerate(recorders):
            blocks[i] = recorder
        for name in final_norm:
            setattr(decoder, name, nn.Identity())
        # one row records the arguments: masks and positions broadcast over rows
        decoder(input_ids=ids[:1], use_cache=False)
        arguments = {i: recorder.arguments for i, recorder in enumerate(recorders)}
        for part in _batches(range(len(ids)), ids.shape[1]):
            decoder(input_ids=ids[part], use_cache=False)
            entry.append(recorders[0].hidden)
        if not all(_broadcasts(arguments[i], r.arguments) for i, r in enumerate(recorders)):
            raise ValueError(
                f"the blocks of {type(model).__name__} need more than hidden states, masks and "
                "positions, so they cannot be run one by one; use --calibration none"
            )
    finally:
        for i, block in enumerate(originals):
            blocks[i] = block
        for name, module in final_norm.items():
            setattr(decoder, name, module)
    return BlockInputs(torch.cat(entry).to(dtype), arguments)


def watch(
    linears: dict[str, nn.Linear], statistics: dict[str, InputStatistics]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that add every input of a layer to its statistics.

    Layers fed with the same tensor (q, k, v; gate, up) share one InputStatistics.
    """
    last: dict[str, Any] = {"x": None, "owner": None}

    def hook(name: str) -> Any:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            if last["x"] is x:
                statistics[name] = statistics[last["owner"]]
                return
            if name not in statistics:
                statistics[name] = InputStatistics(torch.zeros(x.shape[-1], x.shape[-1]))
            statistics[name].add(x)
            last["x"], last["owner"] = x, name

        return see

    return [m.register_forward_pre_hook(hook(n)) for n, m in linears.items()]


def _batches(rows: range, length: int) -> Iterator[slice]:
    step = max(1, TOKENS_AT_ONCE // length)
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def _broadcasts(one: Any, many: Any) -> bool:
    """Whether a block's arguments for one row are, spread over rows, those for many."""
    if isinstance(one, Tensor) and isinstance(many, Tensor):
        if one.dim() != many.dim():
            return False
        return all(a in (1, b) for a, b in zip(one.shape, many.shape, strict=True)) and bool(
            (one == many).all()
        )
    if isinstance(one, (tuple, list)) and isinstance(many, (tuple, list)):
        return len(one) == len(many) and all(map(_broadcasts, one, many))
    if isinstance(one, dict) and isinstance(many, dict):
        return one.keys() == many.keys() and all(_broadcasts(one[k], many[k]) for k in one)
    return True


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value.strip() else []
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    return []
