"""Which rows does an optimiser step see, and how do they become tensors?

The order is a pure function of (seed, step): a run that was stopped, or that runs on more
processes, sees the rows it would have seen. Rows of similar length share a micro-batch, so that
little is spent on padding.

Shapes: B rows of a batch, T tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bonsai_ft.data.chat import Example

PAD_MULTIPLE = 8
# Rows are sorted by length within this many micro-batches: enough for little padding, and few
# enough that neighbours stay random.
_BATCHES_PER_POOL = 16

MicroBatch = list[int]


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64
    target_mask: Tensor  # [B, T] bool
    lines: list[int]

    @property
    def num_targets(self) -> int:
        """Targets of the batch; the first token of a row has no predecessor and is none."""
        return int(self.target_mask[:, 1:].sum())


def collate(examples: Sequence[Example], pad_token_id: int = 0) -> Batch:
    """Examples as one batch, padded on the right."""
    longest = max(len(example.input_ids) for example in examples)
    width = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    input_ids = torch.full((len(examples), width), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(examples), width), dtype=torch.int64)
    target_mask = torch.zeros((len(examples), width), dtype=torch.bool)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = torch.tensor(example.input_ids, dtype=torch.int64)
        attention_mask[row, :length] = 1
        target_mask[row, :length] = torch.tensor(example.labels_mask, dtype=torch.bool)
    return Batch(input_ids, attention_mask, target_mask, [example.line for example in examples])


def plan_epoch(
    lengths: Sequence[int], rows_per_step: int, batch_size: int, seed: int, epoch: int
) -> list[list[MicroBatch]]:
    """The steps of an epoch, each a list of micro-batches of row indices.

    Rows beyond a multiple of `rows_per_step` wait for another epoch, which shuffles differently.
    If there are fewer rows than one step takes, they are repeated until it is full.
    """
    if rows_per_step % batch_size:
        raise ValueError(f"{rows_per_step} rows per step are no multiple of {batch_size} per batch")
    # A text as seed goes through SHA-512, so that (1, 0) and (0, 1) have nothing in common.
    shuffle = random.Random(f"order {seed} {epoch}")
    order = list(range(len(lengths)))
    shuffle.shuffle(order)
    num_steps = max(len(order) // rows_per_step, 1)
    if len(order) < rows_per_step:
        order *= -(-rows_per_step // len(order))
    order = order[: num_steps * rows_per_step]

    batches: list[MicroBatch] = []
    pool_size = _BATCHES_PER_POOL * batch_size
    for start in range(0, len(order), pool_size):
        pool = sorted(order[start : start + pool_size], key=lambda row: lengths[row])
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    shuffle.shuffle(batches)
    per_step = rows_per_step // batch_size
    return [batches[i : i + per_step] for i in range(0, len(batches), per_step)]


class StepPlan:
    """The micro-batches of every optimiser step, endless over epochs."""

    def __init__(
        self, lengths: Sequence[int], batch_size: int, accumulation: int, seed: int
    ) -> None:
        if not lengths:
            raise ValueError("there are no rows to train on")
        for key, value in (("batch_size", batch_size), ("accumulation", accumulation)):
            if value < 1:
                raise ValueError(f"train.{key}={value} must be at least 1")
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.seed = seed
        self.steps_per_epoch = max(len(self.lengths) // (batch_size * accumulation), 1)
        self._planned_epoch = -1
        self._steps: list[list[MicroBatch]] = []

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def step(self, step: int, rank: int = 0, num_processes: int = 1) -> list[MicroBatch]:
        """The micro-batches of one step for one process; all ranks together see every one."""
        if step < 0:
            raise ValueError(f"step {step} does not exist; the first step is 0")
        if self.accumulation % num_processes:
            raise ValueError(
                f"train.accumulation={self.accumulation} cannot be dealt to {num_processes} "
                "processes; it must be a multiple of their number"
            )
        if not 0 <= rank < num_processes:
            raise ValueError(f"rank {rank} does not exist among {num_processes} processes")
        epoch = self.epoch(step)
        if epoch != self._planned_epoch:
            rows_per_step = self.batch_size * self.accumulation
            self._steps = plan_epoch(self.lengths, rows_per_step, self.batch_size, self.seed, epoch)
            self._planned_epoch = epoch
        return self._steps[step % self.steps_per_epoch][rank::num_processes]


def evaluation_batches(
    examples: Sequence[Example], batch_size: int, pad_token_id: int = 0
) -> Iterator[Batch]:
    """Every example exactly once, the longest first, so that memory runs out early or never."""
    if batch_size < 1:
        raise ValueError(f"the batch size for evaluation is {batch_size}, but must be at least 1")
    order = sorted(range(len(examples)), key=lambda row: (-len(examples[row].input_ids), row))
    for start in range(0, len(order), batch_size):
        yield collate([examples[row] for row in order[start : start + batch_size]], pad_token_id)
