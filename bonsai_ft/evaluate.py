"""How well does a model predict a text? Mean loss in nats per token, and perplexity.

A plain text is cut into sequences and every token but each sequence's first is a target. A file of
rows (JSONL, JSON, CSV, Parquet) goes through the chat template, and answers are the targets,
exactly as the trainer evaluates its held-out rows.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bonsai_ft.data.batches import evaluation_batches
from bonsai_ft.data.chat import Example, encode_rows
from bonsai_ft.data.sources import count_rows, dropped_lines, read_rows
from bonsai_ft.generate import pad_token_id
from bonsai_ft.quantize.calibration import read_text
from bonsai_ft.train.loss import check_head, mean_loss

TEXT_SUFFIXES = (".txt", ".md", ".text")


@dataclass(frozen=True, kw_only=True)
class TextLoss:
    """`loss` in nats per target token over `tokens` targets in `rows` sequences or rows.

    `notes` say which rows were left out or cut, and why.
    """

    loss: float
    perplexity: float
    tokens: int
    rows: int
    notes: list[str]


def evaluate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    sequence_length: int = 512,
    batch_size: int = 8,
    template: str | None = None,
) -> TextLoss:
    """Loss of `model` on a text file or a file of rows.

    Raises ValueError naming file and line for what cannot be read.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--text {path}: there is no such file")
    notes: list[str] = []
    if file.suffix.lower() in TEXT_SUFFIXES:
        examples = text_examples(file, tokenizer, sequence_length)
    else:
        rows, read = read_rows(path)
        examples, encoded = encode_rows(
            rows, tokenizer, sequence_length=sequence_length, chat_template=template
        )
        notes = dropped_lines(read.dropped) + dropped_lines(encoded.dropped)
        if encoded.answers_cut:
            notes.append(f"{count_rows(len(encoded.answers_cut))} cut at {sequence_length} tokens")
    check_head(model, examples[0].input_ids[:16])
    loss, tokens = mean_loss(
        model, evaluation_batches(examples, batch_size, pad_token_id(tokenizer))
    )
    return TextLoss(
        loss=loss, perplexity=safe_exp(loss), tokens=tokens, rows=len(examples), notes=notes
    )


def text_examples(
    file: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> list[Example]:
    """A plain text as sequences of `sequence_length` tokens, the last one shorter."""
    ids = tokenizer(read_text(file), add_special_tokens=False).input_ids
    examples = [
        Example(piece, [True] * len(piece), start // sequence_length + 1, str(file))
        for start in range(0, len(ids), sequence_length)
        if len(piece := ids[start : start + sequence_length]) > 1
    ]
    if not examples:
        raise ValueError(f"{file}: the text has {len(ids)} tokens; a loss needs at least 2")
    return examples


def safe_exp(loss: float) -> float:
    """exp, with infinity where it does not fit."""
    return math.exp(loss) if loss < 700 else math.inf
