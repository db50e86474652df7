"""What do the layers of a model see? Token sequences, block by block, and second moments of inputs.

Calibration and error report never share a sequence: the last ninth of the text is held out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

HELD_OUT_PART = 9
SHORTEST_SEQUENCE = 32
ROWS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class CalibrationSet:
    """Token ids [sequences, length] for fitting and, apart from them, for the error report."""

    fit: Tensor
    held_out: Tensor

    @property
    def length(self) -> int:
        return self.fit.shape[1]


def read_text(path: Path) -> str:
    """A text file as it is, or every string of a JSONL file's rows.

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
    parts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error.msg})") from error
        parts.append("\n".join(_strings(row)))
    return "\n\n".join(parts)


def calibration_set(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int,
    length: int | None,
    most: int,
) -> CalibrationSet:
    """Cuts a text into `sequences` + held-out sequences of equal length.

    `length` None means the longest (up to 2048 and `most`) for which the text is enough; a shorter
    text gives fewer sequences. Raises ValueError if it is not enough for 9 sequences of 32 tokens.
    """
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    held_out = max(1, sequences // (HELD_OUT_PART - 1))
    wanted = sequences + held_out
    if length is None:
        length = max(SHORTEST_SEQUENCE, min(2048, most, len(ids) // wanted))
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
        x = x.reshape(-1, x.shape[-1]).float()
        self.moment.addmm_(x.T, x)
        self.tokens += x.shape[0]
        self.smallest = min(self.smallest, x.min().item())
        self.largest = max(self.largest, x.max().item())

    def second_moment(self) -> Tensor:
        return self.moment / max(self.tokens, 1)


@dataclass
class BlockInputs:
    """Hidden states at the entry of one decoder block, and the block's other arguments."""

    hidden: Tensor
    arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def run(self, index: int, block: nn.Module, rows: range | None = None) -> Iterator[Tensor]:
        """Outputs of `block` for batches of rows, in order."""
        args, kwargs = self.arguments[index]
        rows = range(len(self.hidden)) if rows is None else rows
        for start in range(rows.start, rows.stop, ROWS_AT_ONCE):
            out = block(self.hidden[start : min(start + ROWS_AT_ONCE, rows.stop)], *args, **kwargs)
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
        object.__setattr__(self, "block", block)
        self.seen: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "block"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # A cache would grow with every batch; blocks are run without one.
        self.seen = (args, {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()})
        return hidden


@torch.no_grad()
def first_block_inputs(
    model: PreTrainedModel, blocks: nn.ModuleList, ids: Tensor, dtype: torch.dtype
) -> BlockInputs:
    """Embeds `ids` [sequences, length] and records every block's masks and positions.

    The blocks may be on the meta device; the embedding and what precedes the blocks must be real.
    """
    recorders = [_Recorder(block) for block in blocks]
    originals = list(blocks)
    entry: list[Tensor] = []
    recorders[0].register_forward_pre_hook(lambda _, args: entry.append(args[0]))
    decoder = model.get_decoder()
    final_norm = {n: m for n, m in decoder.named_children() if n in ("norm", "final_layernorm")}
    try:
        for i, recorder in enumerate(recorders):
            blocks[i] = recorder
        for name in final_norm:
            setattr(decoder, name, nn.Identity())
        # one row records the arguments: masks and positions broadcast over rows
        decoder(input_ids=ids[:1], use_cache=False)
        arguments = {i: recorder.seen for i, recorder in enumerate(recorders)}
        entry.clear()
        for start in range(0, len(ids), ROWS_AT_ONCE):
            decoder(input_ids=ids[start : start + ROWS_AT_ONCE], use_cache=False)
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


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value.strip() else []
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    return []
