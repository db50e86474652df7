"""What happens at every optimiser step? The training loop, top to bottom.

It knows tensors that train, rows and a folder; not what an adapter is, nor how weights are packed.
A step's loss is the mean over all target tokens of its batch_size * accumulation rows, however
they are spread over micro-batches and processes. Data order and dropout depend on the step's number
alone, so a resumed run, or one on more processes, does what the uninterrupted one would have done.
"""

import hashlib
import math
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from bonsai_ft.config import TrainSection
from bonsai_ft.data.batches import StepPlan, collate, evaluation_batches
from bonsai_ft.data.chat import Example
from bonsai_ft.train.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from bonsai_ft.train.loss import mean_loss, sum_loss
from bonsai_ft.train.memory import peak_memory_bytes
from bonsai_ft.train.optimizer import lr_factor, set_learning_rates
from bonsai_ft.train.report import Console, EvalMetrics, RunFolder, StepMetrics, Tracker


@dataclass(kw_only=True)
class Progress:
    """What a run has done so far; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    input_tokens: int = 0
    seconds: float = 0.0
    base_eval_loss: float = math.nan
    final_eval_loss: float = math.nan
    first_train_loss: float = math.nan
    last_train_loss: float = math.nan
    is_stopped: bool = False

    def saved(self) -> dict[str, Any]:
        kept = ("tokens", "input_tokens", "seconds", "base_eval_loss", "first_train_loss")
        return {key: getattr(self, key) for key in ("step", *kept, "last_train_loss")}


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a flag, so that a step ends before the run does."""

    def __init__(self, console: Console) -> None:
        self.is_set = False
        self._console = console
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        # Python delivers signals to the main thread only, and only it may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        # the signal may have come while the same stream was being written to
        with suppress(RuntimeError):
            self._console.print("stopping after this step; press Ctrl-C again to quit at once")


def train(
    *,
    model: PreTrainedModel,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    examples: list[Example],
    held_out: list[Example],
    settings: TrainSection,
    total_steps: int,
    accelerator: Accelerator,
    folder: RunFolder,
    console: Console,
    tracker: Tracker,
    is_resumed: bool,
    pad_token_id: int,
) -> Progress:
    """Runs steps up to `total_steps` (or a stop request) and returns what happened.

    Raises ValueError when a loss or gradient is not finite (naming step and rows) and when a
    trainable tensor gets no gradient.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    is_main = accelerator.is_main_process
    lengths = [len(example.input_ids) for example in examples]
    plan = StepPlan(lengths, settings.batch_size, settings.accumulation, settings.seed)
    plan.step(0, rank, world)
    trainable = list(parameters.values())
    scaler = torch.amp.GradScaler(accelerator.device.type, enabled=model.dtype == torch.float16)
    eval_every = settings.eval_every or max(1, -(-total_steps // 4))
    save_every = settings.save_every or max(1, total_steps // 4)

    progress = Progress()
    evaluated: set[int] = set()
    if is_resumed:
        progress = _resume(folder, parameters, optimizer, scaler, console)
        if is_main:
            folder.truncate_metrics(progress.step)
            evaluated = {m["step"] for m in folder.metrics() if "eval_loss" in m}

    def evaluate(step: int) -> float:
        loss = math.nan
        if is_main:
            console.status("held-out loss ...")
            batches = evaluation_batches(held_out, settings.eval_batch_size, pad_token_id)
            loss, tokens = mean_loss(model, batches)
            if step not in evaluated:
                # a finished run that is resumed comes here again
                folder.log(EvalMetrics(step=step, eval_loss=loss, eval_tokens=tokens))
                evaluated.add(step)
            tracker.log({"eval_loss": loss}, step)
            console.print(f"step {step}: held-out loss {loss:.4f} ({tokens} tokens)")
        accelerator.wait_for_everyone()
        return loss

    def checkpoint() -> None:
        if is_main:
            save_checkpoint(
                folder.checkpoints,
                progress.step,
                parameters,
                optimizer,
                {"progress": progress.saved(), "scaler": scaler.state_dict()},
                settings.keep_checkpoints,
            )
        accelerator.wait_for_everyone()

    if not is_resumed:
        progress.base_eval_loss = evaluate(0)
    progress.final_eval_loss = progress.base_eval_loss
    model.train()
    console.start(total_steps, progress.step)
    with StopRequest(console) as stop:
        while progress.step < total_steps:
            started = time.perf_counter()
            step = progress.step
            everything = plan.step(step)
            step_tokens = sum(_targets(examples[row]) for rows in everything for row in rows)
            rates = set_learning_rates(optimizer, lr_factor(step, settings, total_steps))

            loss = torch.zeros((), device=accelerator.device)
            for index, rows in enumerate(everything):
                if index % world != rank:
                    continue
                # dropout is a function of seed, step and micro-batch, on however many processes
                torch.manual_seed(_mix(settings.seed, step, index))
                batch = collate([examples[row] for row in rows], pad_token_id)
                part = sum_loss(model, batch) / max(step_tokens, 1)
                scaler.scale(part).backward()
                loss += part.detach()
            if step == 0:
                # before gradients are summed, which would put zeros in their place
                _check_gradients(parameters)
            stop_flag = torch.tensor(float(stop.is_set), device=accelerator.device)
            if world > 1:
                loss = accelerator.reduce(loss, "sum")
                stop_flag = accelerator.reduce(stop_flag, "sum")
                _sum_gradients(trainable, accelerator)
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(trainable, settings.max_grad_norm).item()
            # an overflow skips the step and halves the scale; at a scale of 1 it is none
            may_overflow = scaler.is_enabled() and scaler.get_scale() > 1
            _check_finite(loss.item(), grad_norm, step, everything, examples, may_overflow)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

            seconds = time.perf_counter() - started
            input_tokens = sum(lengths[row] for rows in everything for row in rows)
            progress.step += 1
            progress.tokens += step_tokens
            progress.input_tokens += input_tokens
            progress.seconds += seconds
            progress.last_train_loss = loss.item()
            if step == 0:
                progress.first_train_loss = loss.item()
            metrics = StepMetrics(
                step=progress.step,
                loss=loss.item(),
                lr=rates.get("lora", rates.get("other", 0.0)),
                codebook_lr=rates.get("codebook", 0.0),
                grad_norm=grad_norm,
                tokens=progress.tokens,
                tokens_per_second=input_tokens / seconds,
                peak_memory_bytes=peak_memory_bytes(accelerator.device.type),
                epoch=progress.step / plan.steps_per_epoch,
            )
            console.update(metrics)
            is_last = progress.step == total_steps
            if is_main and (is_last or progress.step % settings.log_every == 0):
                folder.log(metrics)
                tracker.log(
                    {"loss": metrics.loss, "lr": metrics.lr, "grad_norm": grad_norm}, step + 1
                )
            if stop_flag.item() > 0:
                progress.is_stopped = not is_last
                checkpoint()
                break
            if not is_last and progress.step % eval_every == 0:
                progress.final_eval_loss = evaluate(progress.step)
            if is_last or progress.step % save_every == 0:
                checkpoint()
    console.stop()
    progress.final_eval_loss = evaluate(progress.step)
    return progress


def _resume(
    folder: RunFolder,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    console: Console,
) -> Progress:
    path, complaints = newest_checkpoint(folder.checkpoints)
    for complaint in complaints:
        console.print(complaint)
    state = load_checkpoint(path, parameters, optimizer)
    console.print(f"resuming from {path}")
    if scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    return Progress(**state["progress"])


def _targets(example: Example) -> int:
    # the first token has no predecessor that could predict it
    return sum(example.labels_mask[1:])


def _mix(seed: int, step: int, index: int) -> int:
    digest = hashlib.sha256(f"{seed} {step} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _sum_gradients(trainable: list[nn.Parameter], accelerator: Accelerator) -> None:
    """Adds up all processes' gradients in one message."""
    for parameter in trainable:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([p.grad.reshape(-1).float() for p in trainable if p.grad is not None])
    flat = accelerator.reduce(flat, "sum")
    start = 0
    for parameter in trainable:
        count = parameter.numel()
        parameter.grad = flat[start : start + count].view_as(parameter).to(parameter.dtype)
        start += count


def _check_gradients(parameters: dict[str, nn.Parameter]) -> None:
    missing = [name for name, p in parameters.items() if p.grad is None]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(parameters)} trainable tensors got no gradient in the first "
            f"step, the first is {missing[0]}; nothing would be learnt there"
        )


def _check_finite(
    loss: float,
    grad_norm: float,
    step: int,
    batches: list[list[int]],
    examples: list[Example],
    may_overflow: bool,
) -> None:
    if math.isfinite(loss) and (math.isfinite(grad_norm) or may_overflow):
        return
    lines = sorted(examples[row].line for rows in batches for row in rows)
    raise ValueError(
        f"step {step + 1}: the loss is {loss} and the gradient norm {grad_norm}; the rows of this "
        f"step are on lines {', '.join(map(str, lines))} of the training data. "
        "Try a lower train.learning_rate, or hardware.dtype=float32; resume continues from the "
        "last checkpoint"
    )
