"""Does the loop learn what it should, nothing else, and the same however it is cut into pieces?"""

import io
import json
import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import bonsai_ft
from bonsai_ft.adapter import TernaryLoraConfig, attach, trainable_groups
from bonsai_ft.config import Logger, Optimizer, Schedule, TrainSection
from bonsai_ft.data.batches import StepPlan
from bonsai_ft.data.chat import Example
from bonsai_ft.model import TernaryLinear
from bonsai_ft.train import checkpoint
from bonsai_ft.train.checkpoint import newest_checkpoint
from bonsai_ft.train.loop import Progress, StopRequest, train
from bonsai_ft.train.optimizer import build_optimizer, lr_factor, set_learning_rates
from bonsai_ft.train.report import Console, RunFolder, open_tracker

TARGETS = ["q_proj", "v_proj", "down_proj"]


def section(**changes) -> TrainSection:
    usual = {
        "total_steps": 7,
        "batch_size": 2,
        "accumulation": 2,
        "learning_rate": 5e-3,
        "codebook_learning_rate": 1e-2,
        "warmup_ratio": 0.0,
        "schedule": Schedule.linear,
        "save_every": 100,
        "eval_every": 100,
    }
    return TrainSection(**(usual | changes))


def make_examples(lengths, targets=None, first_line=1) -> list[Example]:
    """Rows of random bytes; `targets` says how many tokens at a row's end are trained."""
    generator = torch.Generator().manual_seed(7)
    targets = targets or [length // 2 for length in lengths]
    return [
        Example(
            torch.randint(0, 256, (length,), generator=generator).tolist(),
            [index >= length - count for index in range(length)],
            line,
            "rows.jsonl",
        )
        for line, (length, count) in enumerate(zip(lengths, targets, strict=True), first_line)
    ]


# 11 rows, 4 a step: 2 steps an epoch, and 3 rows that wait for another one
ROWS = make_examples([6, 9, 12, 8, 14, 7, 10, 20, 5, 11, 16])
HELD_OUT = make_examples([10, 13], first_line=50)


@dataclass
class Run:
    progress: Progress
    model: Any
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    folder: RunFolder
    said: str

    def steps(self) -> list[dict[str, Any]]:
        return [m for m in self.folder.metrics() if "loss" in m]

    def losses(self) -> list[float]:
        return [m["loss"] for m in self.steps()]

    def values(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}


class StopAt(Console):
    """Presses Ctrl-C in time for `step` to be the last one."""

    def __init__(self, step, file):
        super().__init__(file=file)
        self._last = step

    def start(self, total_steps, first_step=0):
        super().start(total_steps, first_step)
        self._done = first_step

    def update(self, metrics):
        super().update(metrics)
        if metrics.step == self._last - 1:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def loop(tiny_base, tmp_path):
    """`loop(folder, ...)` trains a fresh copy of the tiny base and returns a `Run`."""

    def run(
        folder="run",
        settings=None,
        *,
        rows=ROWS,
        dropout=0.0,
        stop_at=None,
        resume=False,
        prepare=None,
        dtype=torch.float32,
        console=None,
        codebooks=True,
    ):
        settings = settings or section()
        model = bonsai_ft.load_model(tiny_base("llama"), dtype=dtype)
        torch.manual_seed(settings.seed)
        attach(
            model,
            TernaryLoraConfig(
                r=4,
                lora_alpha=8,
                lora_dropout=dropout,
                target_modules=TARGETS,
                codebooks=codebooks,
            ),
        )
        optimizer = build_optimizer(trainable_groups(model), settings, Optimizer.adamw, "cpu")
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if prepare is not None:
            prepare(model, parameters)
        path = tmp_path / folder
        opened = RunFolder.open(path) if resume else RunFolder.create(path, "", "train: {}\n")
        file = io.StringIO()
        if console is None:
            console = Console(file=file) if stop_at is None else StopAt(stop_at, file)
        progress = train(
            model=model,
            parameters=parameters,
            optimizer=optimizer,
            examples=rows,
            held_out=HELD_OUT,
            settings=settings,
            total_steps=settings.total_steps,
            accelerator=Accelerator(cpu=True),
            folder=opened,
            console=console,
            tracker=open_tracker(Logger.none, opened, {}, "test"),
            is_resumed=resume,
            pad_token_id=258,
        )
        return Run(progress, model, parameters, optimizer, opened, file.getvalue())

    return run


def assert_same(ours: Run, theirs: Run) -> None:
    """Parameters and moments, bit for bit."""
    assert set(ours.parameters) == set(theirs.parameters)
    for name, expected in theirs.parameters.items():
        actual = ours.parameters[name]
        assert torch.equal(actual, expected), name
        moments = ours.optimizer.state[actual]
        assert set(moments) == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in theirs.optimizer.state[expected].items():
            assert torch.equal(moments[key], value), f"{name} {key}"


# ---------------------------------------------------------------- learning


def test_loss_falls(loop):
    run = loop(settings=section(total_steps=20, schedule=Schedule.constant))
    assert run.progress.last_train_loss < 0.7 * run.progress.first_train_loss
    assert run.losses()[-1] == run.progress.last_train_loss
    assert run.losses()[0] == run.progress.first_train_loss


def test_held_out_loss_falls_on_rows_that_were_trained(loop):
    settings = section(total_steps=10, schedule=Schedule.constant, accumulation=1)
    run = loop(settings=settings, rows=HELD_OUT)
    assert run.progress.final_eval_loss < 0.8 * run.progress.base_eval_loss


def test_base_does_not_move_while_lora_and_codebooks_do(loop):
    before = {}

    def remember(model, parameters):
        before.update({name: t.detach().clone() for name, t in model.state_dict().items()})
        before.update(dict(model.named_buffers()))

    run = loop(settings=section(total_steps=3, weight_decay=0.1), prepare=remember)
    after = dict(run.model.state_dict()) | dict(run.model.named_buffers())
    assert set(after) == set(before)
    assert any(name.endswith(".ternary") for name in before)
    for name, value in before.items():
        if name in run.parameters:
            assert not torch.equal(after[name], value), f"{name} did not learn"
        else:
            assert after[name].dtype == value.dtype
            assert torch.equal(after[name], value), f"{name} moved"
    kinds = {name.rsplit(".", 2)[-2] for name in run.parameters}
    assert kinds == {"default", "lora_residual_codebook"}


def test_trainable_tensor_that_gets_no_gradient_is_an_error(loop):
    def add(model, parameters):
        parameters["model.layers.9.lora_A"] = nn.Parameter(torch.zeros(2))

    with pytest.raises(ValueError, match=r"1 of \d+ trainable tensors.*model\.layers\.9\.lora_A"):
        loop(prepare=add)


# ---------------------------------------------------------------- one mean over all targets


@pytest.fixture
def first_step(loop):
    """Loss, gradient norm and parameters after one step on all rows, in the given layout."""

    def run(batch_size, accumulation, rows):
        settings = section(
            total_steps=1, batch_size=batch_size, accumulation=accumulation, max_grad_norm=1e9
        )
        name = f"{batch_size}x{accumulation}"
        gradients = {}

        def remember(model, parameters):
            for key, parameter in parameters.items():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, key=key: gradients.__setitem__(key, p.grad.clone())
                )

        run = loop(name, settings, rows=rows, prepare=remember)
        return run.steps()[0], gradients, run

    return run


def test_any_split_into_micro_batches_gives_the_same_step(first_step):
    # the row with 61 targets must weigh as much beside one with 3 as apart from it
    rows = make_examples([8, 64, 30, 16], targets=[3, 61, 11, 15])
    expected, gradients, _ = first_step(4, 1, rows)
    assert expected["tokens"] == 90
    for layout in ((1, 4), (2, 2)):
        actual, others, _ = first_step(*layout, rows)
        assert actual["tokens"] == 90
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        for name, gradient in gradients.items():
            size = gradient.abs().max().item()
            torch.testing.assert_close(
                others[name], gradient, rtol=0, atol=1e-6 * max(size, 1), msg=name
            )


def test_loss_is_the_mean_over_target_tokens_not_over_rows(first_step, tiny_base):
    rows = make_examples([8, 64], targets=[3, 61])
    metrics, _, _ = first_step(1, 2, rows)
    model = bonsai_ft.load_model(tiny_base("llama"), dtype=torch.float32)
    total = 0.0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        losses = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total += losses[torch.tensor(row.labels_mask[1:])].sum().item()
    assert metrics["loss"] == pytest.approx(total / 64, rel=1e-5)


# ---------------------------------------------------------------- stop and resume


@pytest.mark.parametrize("stop_at", [2, 3, 6], ids=["epoch_end", "mid_epoch", "late"])
def test_stopped_and_resumed_run_equals_the_uninterrupted_one_with_dropout(loop, stop_at):
    whole = loop("whole", dropout=0.3)
    first = loop("cut", dropout=0.3, stop_at=stop_at)
    assert first.progress.is_stopped
    assert first.progress.step == stop_at
    assert "stopping after this step" in first.said
    rest = loop("cut", dropout=0.3, resume=True)
    assert not rest.progress.is_stopped
    assert f"resuming from {rest.folder.checkpoints / f'step-{stop_at:06d}'}" in rest.said

    assert rest.losses() == whole.losses()
    assert [m["step"] for m in rest.steps()] == [1, 2, 3, 4, 5, 6, 7]
    for key in ("lr", "codebook_lr", "grad_norm", "tokens", "epoch"):
        assert [m[key] for m in rest.steps()] == [m[key] for m in whole.steps()], key
    assert_same(rest, whole)
    for key in ("base_eval_loss", "final_eval_loss", "first_train_loss", "last_train_loss"):
        assert getattr(rest.progress, key) == getattr(whole.progress, key), key
    for key in ("step", "tokens", "input_tokens"):
        assert getattr(rest.progress, key) == getattr(whole.progress, key), key


def test_dropout_is_on_in_training_and_differs_between_steps(loop):
    # one row, repeated: without dropout and learning, every step would have the same loss
    settings = section(
        total_steps=3, batch_size=1, accumulation=1, learning_rate=1e-12, codebook_learning_rate=1
    )

    def prepare(model, parameters):
        for name, parameter in parameters.items():
            if "lora_B" in name:
                nn.init.normal_(parameter)

    run = loop(settings=settings, rows=ROWS[:1], dropout=0.5, prepare=prepare, codebooks=False)
    assert len(set(run.losses())) == 3


def test_run_can_be_stopped_and_resumed_again_and_again(loop):
    whole = loop("whole", dropout=0.3)
    for resume, stop_at in ((False, 2), (True, 4), (True, 5), (True, None)):
        run = loop("cut", dropout=0.3, resume=resume, stop_at=stop_at)
    assert run.losses() == whole.losses()
    assert_same(run, whole)


def test_run_that_died_between_two_checkpoints_repeats_what_was_lost(loop, monkeypatch):
    settings = section(save_every=2, eval_every=2)
    whole = loop("whole", settings, dropout=0.3)

    class Crash(Console):
        def update(self, metrics):
            if metrics.step == 6:
                raise MemoryError

    # dies before step 6 is logged, after step 4 was saved and step 5 logged
    with pytest.raises(MemoryError):
        loop("cut", settings, dropout=0.3, console=Crash(file=io.StringIO()))
    rest = loop("cut", settings, dropout=0.3, resume=True)
    assert [m["step"] for m in rest.steps()] == [1, 2, 3, 4, 5, 6, 7]
    assert rest.losses() == whole.losses()
    evals = [m for m in rest.folder.metrics() if "eval_loss" in m]
    assert [m["step"] for m in evals] == [0, 2, 4, 6, 7]
    assert evals == [m for m in whole.folder.metrics() if "eval_loss" in m]
    assert_same(rest, whole)


def test_damaged_newest_checkpoint_costs_some_steps_and_not_the_run(loop):
    settings = section(save_every=2)
    whole = loop("whole", settings, dropout=0.3)
    loop("cut", settings, dropout=0.3, stop_at=5)
    file = newest_checkpoint(whole.folder.path.parent / "cut" / "checkpoints")[0] / "state.json"
    file.write_bytes(file.read_bytes()[:-3])
    rest = loop("cut", settings, dropout=0.3, resume=True)
    assert "step-000005 is damaged (state.json" in rest.said
    assert "resuming from" in rest.said
    assert "step-000004" in rest.said
    assert rest.losses() == whole.losses()
    assert [m["step"] for m in rest.steps()] == [1, 2, 3, 4, 5, 6, 7]
    assert_same(rest, whole)


def test_resuming_a_finished_run_changes_nothing(loop):
    whole = loop("whole", dropout=0.3)
    metrics = whole.folder.metrics_file.read_text()
    again = loop("whole", dropout=0.3, resume=True)
    assert again.folder.metrics_file.read_text() == metrics
    assert again.progress == whole.progress
    for name, value in whole.values().items():
        assert torch.equal(again.values()[name], value), name


def test_every_row_is_seen_as_often_after_a_stop_inside_an_epoch(loop, monkeypatch):
    import bonsai_ft.train.loop as module

    seen = []
    real = module.collate

    def spy(examples, pad):
        seen.extend(example.line for example in examples)
        return real(examples, pad)

    monkeypatch.setattr(module, "collate", spy)
    loop("cut", stop_at=3)
    loop("cut", resume=True)
    plan = StepPlan([len(row.input_ids) for row in ROWS], 2, 2, 0)
    planned = [ROWS[row].line for step in range(7) for rows in plan.step(step) for row in rows]
    assert seen == planned


def test_second_ctrl_c_quits_at_once():
    console = Console(file=io.StringIO())
    with StopRequest(console) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_signal_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest(Console(file=io.StringIO())):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_terminate_is_treated_like_ctrl_c(loop):
    class Terminate(Console):
        def update(self, metrics):
            if metrics.step == 1:
                signal.raise_signal(signal.SIGTERM)

    run = loop(console=Terminate(file=io.StringIO()))
    assert run.progress.is_stopped
    assert newest_checkpoint(run.folder.checkpoints)[0].name == "step-000002"


def test_ctrl_c_in_the_last_step_still_finishes(loop):
    run = loop(stop_at=7)
    assert not run.progress.is_stopped
    assert newest_checkpoint(run.folder.checkpoints)[0].name == "step-000007"


# ---------------------------------------------------------------- numbers that are none


def first_step_with(line, rows, settings) -> int:
    plan = StepPlan([len(r.input_ids) for r in rows], settings.batch_size, settings.accumulation, 0)
    return next(
        step
        for step in range(100)
        if any(rows[row].line == line for batch in plan.step(step) for row in batch)
    )


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=["overflow", "nan"])
def test_row_that_overflows_stops_the_run_at_its_step_with_step_and_lines(
    loop, tmp_path, monkeypatch, value
):
    # token 270 is in no other row, and its embedding is not finite
    bad = Example([1, 2, 270, 4, 5, 6], [False] * 3 + [True] * 3, 77, "rows.jsonl")
    settings = section(total_steps=30, batch_size=1, accumulation=2, save_every=1)
    rows = next(
        rows
        for place in range(len(ROWS))
        if first_step_with(77, rows := [*ROWS[:place], bad, *ROWS[place:]], settings) >= 2
    )
    step = first_step_with(77, rows, settings)

    def poison(model, parameters):
        embedding = model.get_input_embeddings()
        weight = embedding.weight.detach().clone()
        weight[270] = value
        embedding.weight = nn.Parameter(weight, requires_grad=False)

    with pytest.raises(ValueError, match=rf"^step {step + 1}: the loss is nan.*lines .*\b77\b"):
        loop(settings=settings, rows=rows, prepare=poison)
    folder = RunFolder(tmp_path / "run")
    newest, complaints = newest_checkpoint(folder.checkpoints)
    assert newest.name == f"step-{step:06d}"
    assert complaints == []
    saved = checkpoint.load_file(newest / checkpoint.PARAMETERS)
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert [m["step"] for m in folder.metrics() if "loss" in m] == list(range(1, step + 1))


def test_gradient_that_is_not_finite_stops_the_run_before_the_update(loop):
    kept = {}

    def break_gradients(model, parameters):
        kept.update(parameters)
        kept["before"] = {name: p.detach().clone() for name, p in parameters.items()}
        next(iter(parameters.values())).register_hook(lambda gradient: gradient * math.nan)

    with pytest.raises(ValueError, match=r"step 1: .* the gradient norm nan"):
        loop(prepare=break_gradients)
    for name, value in kept["before"].items():
        assert torch.equal(kept[name], value), name


# ---------------------------------------------------------------- float16


def test_float16_trains_with_loss_scaling_and_resumes_exactly(loop):
    def with_float16_sums(model, parameters):
        # torch's own float16 products overflow at the first scales; the compiled ones do not
        for module in model.modules():
            if isinstance(module, TernaryLinear):
                module.kernel = "reference"

    settings = section(total_steps=6, learning_rate=1e-3, codebook_learning_rate=1e-3)
    whole = loop("whole", settings, dtype=torch.float16, dropout=0.2, prepare=with_float16_sums)
    assert all(math.isfinite(loss) for loss in whole.losses())
    assert {p.dtype for p in whole.parameters.values()} == {torch.float32}
    loop("cut", settings, dtype=torch.float16, dropout=0.2, prepare=with_float16_sums, stop_at=3)
    state = json.loads((checkpoint_of(whole.folder, "cut") / "state.json").read_text())
    # the first steps find the scale; starting again from the highest one would skip step 4
    skipped = sum(m["grad_norm"] is None for m in whole.steps()[:3])
    assert skipped > 0
    assert state["scaler"]["scale"] == 2.0 ** (16 - skipped)
    rest = loop(
        "cut", settings, dtype=torch.float16, dropout=0.2, prepare=with_float16_sums, resume=True
    )
    assert rest.losses() == whole.losses()
    assert_same(rest, whole)


def checkpoint_of(folder: RunFolder, other: str) -> Path:
    return newest_checkpoint(folder.path.parent / other / "checkpoints")[0]


def test_float16_skips_a_step_that_overflows_and_goes_on(loop):
    kept = {}

    def overflow_once(model, parameters):
        calls = []

        def hook(gradient):
            calls.append(None)
            return gradient * math.inf if len(calls) == 1 else gradient

        name, parameter = next((n, p) for n, p in parameters.items() if "lora_B" in n)
        parameter.register_hook(hook)
        kept["name"] = name

    run = loop(settings=section(total_steps=3), dtype=torch.float16, prepare=overflow_once)
    assert run.progress.step == 3
    norms = [m["grad_norm"] for m in run.steps()]
    assert norms[0] is None
    assert all(norm is not None for norm in norms[1:])
    assert all(p.isfinite().all() for p in run.parameters.values())


def test_float16_stops_when_no_scale_helps(loop):
    def break_gradients(model, parameters):
        next(iter(parameters.values())).register_hook(lambda gradient: gradient * math.nan)

    with pytest.raises(ValueError, match=r"step 17: the loss is \d.* the gradient norm nan"):
        loop(
            settings=section(total_steps=50, batch_size=1, accumulation=1),
            rows=ROWS[:1],
            dtype=torch.float16,
            prepare=break_gradients,
        )


# ---------------------------------------------------------------- rates


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.constant, [0.5, 1, 1, 1, 1, 1, 1, 1]),
        (Schedule.linear, [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (
            Schedule.cosine,
            [0.5, 1, *(0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(6))],
        ),
    ],
    ids=lambda value: getattr(value, "value", ""),
)
def test_learning_rate_warms_up_and_then_follows_its_schedule(schedule, expected):
    settings = section(warmup_ratio=0.25, schedule=schedule)
    factors = [lr_factor(step, settings, 8) for step in range(8)]
    assert factors == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert lr_factor(0, section(warmup_ratio=0.0), 8) == 1


def test_codebooks_have_their_own_rate_and_no_weight_decay():
    groups = {name: [nn.Parameter(torch.ones(2))] for name in ("lora", "codebook", "other")}
    settings = section(learning_rate=1e-4, codebook_learning_rate=3e-3, weight_decay=0.1)
    optimizer = build_optimizer(groups, settings, Optimizer.adamw, "cpu")
    seen = {g["name"]: (g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups}
    assert seen == {
        "lora": (1e-4, 0.1, (0.9, 0.95)),
        "codebook": (3e-3, 0.0, (0.9, 0.95)),
        "other": (1e-4, 0.1, (0.9, 0.95)),
    }
    rates = set_learning_rates(optimizer, 0.5)
    assert rates == {"lora": 0.5e-4, "codebook": 1.5e-3, "other": 0.5e-4}
    # factors do not pile up
    assert set_learning_rates(optimizer, 0.5) == rates


def test_metrics_tell_the_rates_of_each_step(loop):
    run = loop(settings=section(total_steps=4, warmup_ratio=0.5))
    assert [m["lr"] for m in run.steps()] == pytest.approx([2.5e-3, 5e-3, 5e-3, 2.5e-3])
    assert [m["codebook_lr"] for m in run.steps()] == pytest.approx([5e-3, 1e-2, 1e-2, 5e-3])


def test_automatic_optimizer_is_plain_adamw_without_a_gpu():
    groups = {"lora": [nn.Parameter(torch.ones(2))]}
    optimizer = build_optimizer(groups, section(), Optimizer.auto, "cpu")
    assert type(optimizer) is torch.optim.AdamW


def test_8_bit_adamw_without_a_gpu_is_refused_with_what_to_use():
    groups = {"lora": [nn.Parameter(torch.ones(2))]}
    with pytest.raises(ValueError, match=r"hardware\.optimizer=adamw_8bit needs a GPU.*use adamw"):
        build_optimizer(groups, section(), Optimizer.adamw_8bit, "cpu")


def test_nothing_to_train_is_refused_with_the_settings_to_check():
    with pytest.raises(ValueError, match=r"adapter\.lora and adapter\.codebooks"):
        build_optimizer({"lora": [], "codebook": []}, section(), Optimizer.adamw, "cpu")


def test_gradients_are_clipped_to_the_norm_that_is_set(loop):
    sizes = []

    def watch(model, parameters):
        for parameter in parameters.values():
            parameter.register_hook(lambda gradient: None)
        sizes.append(parameters)

    run = loop(settings=section(total_steps=1, max_grad_norm=1e-3), prepare=watch)
    assert run.steps()[0]["grad_norm"] > 1e-3
    moments = [s["exp_avg"].square().sum() for s in run.optimizer.state.values()]
    # the first moment is a tenth of the clipped gradient
    assert math.sqrt(sum(moments)) == pytest.approx(0.1 * 1e-3, rel=1e-2)
