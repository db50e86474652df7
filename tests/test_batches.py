"""Every step sees the rows it would have seen, however the run is cut, dealt or resumed."""

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from bonsai_ft.data.batches import Batch, StepPlan, collate, evaluation_batches, plan_epoch
from bonsai_ft.data.chat import Example


def example(length: int, num_targets: int, line: int = 1) -> Example:
    mask = [False] * (length - num_targets) + [True] * num_targets
    return Example(list(range(100, 100 + length)), mask, line, "rows.jsonl")


def flat(step: list[list[int]]) -> list[int]:
    return [row for batch in step for row in batch]


def test_a_batch_is_padded_on_the_right_to_a_multiple_of_eight():
    batch = collate([example(3, 1, line=7), example(9, 4, line=2)], pad_token_id=5)
    assert batch.input_ids.shape == batch.attention_mask.shape == batch.target_mask.shape == (2, 16)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    assert batch.target_mask.dtype == torch.bool
    assert batch.input_ids[0].tolist() == [100, 101, 102] + [5] * 13
    assert batch.attention_mask.sum(dim=1).tolist() == [3, 9]
    assert batch.target_mask[1].nonzero().flatten().tolist() == [5, 6, 7, 8]
    assert batch.lines == [7, 2]
    assert not batch.target_mask[batch.attention_mask == 0].any()


def test_uneven_rows_have_the_same_targets_in_one_batch_as_in_two():
    rows = [example(10, 3), example(70, 61)]
    assert collate(rows).num_targets == 64
    assert sum(collate([row]).num_targets for row in rows) == 64


def test_the_first_token_of_a_row_is_never_counted_as_a_target():
    assert collate([example(4, 4)]).num_targets == 3


def test_an_epoch_uses_no_row_twice_and_fills_every_step():
    steps = plan_epoch([1] * 103, rows_per_step=8, batch_size=4, seed=0, epoch=0)
    assert len(steps) == 12
    assert all(len(step) == 2 and all(len(batch) == 4 for batch in step) for step in steps)
    rows = [row for step in steps for row in flat(step)]
    assert len(set(rows)) == len(rows) == 96


def test_rows_left_out_of_an_epoch_come_in_another():
    seen = set()
    for epoch in range(12):
        for step in plan_epoch([1] * 10, 4, 2, seed=0, epoch=epoch):
            seen |= set(flat(step))
    assert seen == set(range(10))


def test_three_epochs_over_ten_rows_see_every_row_three_times_wherever_the_run_stops():
    whole = StepPlan([3] * 10, batch_size=1, accumulation=5, seed=7)
    assert whole.steps_per_epoch == 2
    steps = [whole.step(i) for i in range(6)]
    assert Counter(row for step in steps for row in flat(step)) == Counter([*range(10)] * 3)
    for stop in range(6):
        resumed = StepPlan([3] * 10, batch_size=1, accumulation=5, seed=7)
        assert [resumed.step(i) for i in range(stop, 6)] == steps[stop:]


def test_the_order_depends_on_seed_and_epoch_and_nothing_else():
    lengths = [random.Random(0).randrange(5, 500) for _ in range(64)]
    plan = plan_epoch(lengths, 8, 4, seed=1, epoch=2)
    random.seed(99)
    torch.manual_seed(99)
    assert plan_epoch(lengths, 8, 4, seed=1, epoch=2) == plan
    assert plan_epoch(lengths, 8, 4, seed=2, epoch=2) != plan
    assert plan_epoch(lengths, 8, 4, seed=1, epoch=3) != plan
    assert plan_epoch(lengths, 8, 4, seed=2, epoch=1) != plan


def test_steps_may_be_asked_for_in_any_order():
    plan = StepPlan(list(range(1, 41)), batch_size=2, accumulation=2, seed=3)
    forward = [plan.step(i) for i in range(25)]
    assert [plan.step(i) for i in reversed(range(25))] == forward[::-1]
    assert plan.epoch(9) == 0
    assert plan.epoch(10) == 1


def test_rows_of_similar_length_share_a_batch_but_batches_stay_in_random_order():
    lengths = [random.Random(i).randrange(10, 1000) for i in range(512)]
    batches = [batch for step in plan_epoch(lengths, 8, 8, seed=0, epoch=0) for batch in step]
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
    assert padded < 1.15 * sum(lengths)
    longest = [max(lengths[row] for row in batch) for batch in batches]
    rises = sum(a < b for a, b in pairwise(longest))
    assert 0.25 * len(batches) < rises < 0.75 * len(batches)


@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_fewer_rows_than_a_step_takes_are_repeated_until_it_is_full(num_rows):
    plan = StepPlan([4] * num_rows, batch_size=4, accumulation=2, seed=0)
    assert plan.steps_per_epoch == 1
    counts = Counter(flat(plan.step(5)))
    assert sum(counts.values()) == 8
    assert set(counts) == set(range(num_rows))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_all_processes_together_see_the_micro_batches_of_a_single_one(num_processes):
    lengths = list(range(1, 65))
    single = StepPlan(lengths, batch_size=2, accumulation=4, seed=0)
    for i in range(20):
        dealt = [
            StepPlan(lengths, 2, 4, seed=0).step(i, rank, num_processes)
            for rank in range(num_processes)
        ]
        assert {len(part) for part in dealt} == {4 // num_processes}
        together = [dealt[k % num_processes][k // num_processes] for k in range(4)]
        assert together == single.step(i)


def test_an_accumulation_that_cannot_be_dealt_out_is_refused_with_advice():
    plan = StepPlan([4] * 10, batch_size=1, accumulation=3, seed=0)
    with pytest.raises(ValueError, match=r"train\.accumulation=3 .* multiple of their number"):
        plan.step(0, rank=0, num_processes=2)
    with pytest.raises(ValueError, match="rank 3 does not exist among 3"):
        plan.step(0, rank=3, num_processes=3)
    with pytest.raises(ValueError, match="step -1"):
        plan.step(-1)


@pytest.mark.parametrize(
    ("lengths", "batch_size", "accumulation", "message"),
    [
        ([], 1, 1, "no rows to train on"),
        ([4], 0, 1, r"train\.batch_size=0 must be at least 1"),
        ([4], 1, 0, r"train\.accumulation=0 must be at least 1"),
    ],
)
def test_a_plan_checks_its_settings(lengths, batch_size, accumulation, message):
    with pytest.raises(ValueError, match=message):
        StepPlan(lengths, batch_size, accumulation, seed=0)


def test_evaluation_sees_every_row_exactly_once_in_the_same_order():
    rows = [example(5 + line * 7 % 31, 2, line) for line in range(23)]
    batches = list(evaluation_batches(rows, batch_size=4))
    lines = [line for batch in batches for line in batch.lines]
    assert sorted(lines) == list(range(23))
    lengths = [int(batch.attention_mask.sum(dim=1).max()) for batch in batches]
    assert lengths == sorted(lengths, reverse=True)
    again = list(evaluation_batches(rows, batch_size=4))
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(batches, again, strict=True))
    assert sum(batch.num_targets for batch in batches) == 46
    assert list(evaluation_batches([], batch_size=4)) == []
    with pytest.raises(ValueError, match="batch size for evaluation is 0"):
        list(evaluation_batches(rows, batch_size=0))


def test_a_batch_cannot_be_changed_by_accident():
    batch = collate([example(4, 1)])
    assert isinstance(batch, Batch)
    with pytest.raises(AttributeError):
        batch.lines = []
