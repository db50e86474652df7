"""What does a training run write and print? Its folder, its metrics, its progress line.

Only the main process of a run writes; curves are drawn in `html.py`, weights are saved elsewhere.
"""

import importlib.metadata
import json
import math
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import rich.console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from bonsai_ft.config import Logger
from bonsai_ft.train.page import (
    Sample,
    format_bytes,
    format_seconds,
    write_atomically,
    write_html,
)

__all__ = [
    "Console",
    "EvalMetrics",
    "RunFolder",
    "StepMetrics",
    "Tracker",
    "environment",
    "format_bytes",
    "format_seconds",
    "open_tracker",
    "write_atomically",
]

PACKAGES = ("bonsai-ft", "torch", "transformers", "peft", "accelerate")
# a log file of a long run should stay readable: about this many lines, whatever its steps
PLAIN_LINES = 20


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. `tokens` were trained on since the run began; the speed counts
    all input tokens, also those that carry no loss."""

    step: int
    loss: float
    lr: float
    codebook_lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    peak_memory_bytes: int
    epoch: float


@dataclass(frozen=True)
class EvalMetrics:
    """The held-out loss after `step` steps, in nats per token."""

    step: int
    eval_loss: float
    eval_tokens: int


@dataclass(frozen=True)
class RunFolder:
    """The one folder of a run, by the names of DESIGN 4.4."""

    path: Path

    @staticmethod
    def create(run_dir: Path | None, recipe: str, config_yaml: str) -> "RunFolder":
        """Exactly `run_dir` if given, else a new folder runs/<recipe>/<UTC time>-<id>."""
        if run_dir is None:
            # a recipe of the user's own is given by the path of its file
            name = Path(recipe).stem or "custom"
            now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
            path = Path("runs") / name / f"{now}-{secrets.token_hex(3)}"
            path.mkdir(parents=True)
        else:
            path = run_dir
            check_unused(path)
            path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path)
        write_atomically(folder.config, config_yaml)
        return folder

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """The folder of a run that was started before."""
        folder = RunFolder(path)
        if not folder.config.is_file():
            reason = "it has no config.yaml" if path.is_dir() else "there is no such folder"
            raise ValueError(
                f"resume={path} is not the folder of a run: {reason}; give the folder that holds "
                "config.yaml and checkpoints/, such as runs/<recipe>/<time>-<id>"
            )
        return folder

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter.bonsai"

    @property
    def peft(self) -> Path:
        return self.path / "peft"

    @property
    def held_out(self) -> Path:
        return self.path / "heldout.jsonl"

    def log(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Append one line; it is on its way to the disk when this returns."""
        # opened per line: nothing to close, and a folder moved in between is noticed at once
        with self.metrics_file.open("a", encoding="utf-8", newline="\n") as file:
            file.write(_to_json(asdict(metrics)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines so far; a last line that a killed process left torn is not one."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_bytes().decode("utf-8", "replace").split("\n")
        # what follows the last newline is empty, or torn
        *whole, last = lines
        records = []
        for number, line in enumerate(whole, 1):
            if (record := _parse_record(line)) is None:
                raise ValueError(
                    f"{self.metrics_file} line {number} is not a JSON object with a step; "
                    "delete that line"
                )
            records.append(record)
        # only the newline may be missing
        if (record := _parse_record(last)) is not None:
            records.append(record)
        return records

    def truncate_metrics(self, step: int) -> None:
        """Forget what was logged after `step`, because the resumed run will log it again."""
        if self.metrics_file.exists():
            kept = [record for record in self.metrics() if record["step"] <= step]
            text = "".join(_to_json(record) + "\n" for record in kept)
            write_atomically(self.metrics_file, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, keys in the order given."""
        write_atomically(self.summary, _to_json(summary, indent=2) + "\n")

    def write_report(
        self,
        *,
        title: str,
        settings: Mapping[str, Any],
        summary: Mapping[str, Any],
        samples: Sequence[Sample] = (),
        notes: Sequence[str] = (),
        commands: Sequence[str] = (),
    ) -> None:
        """Draw report.html from metrics.jsonl and what is given; samples are (prompt, before,
        after)."""
        records = self.metrics()
        if self.adapter.is_file():
            summary = {"adapter_bytes": self.adapter.stat().st_size, **summary}
        write_html(
            self.report,
            title=title,
            settings=settings,
            summary=summary,
            steps=[record for record in records if "eval_loss" not in record],
            evals=[record for record in records if "eval_loss" in record],
            samples=samples,
            notes=notes,
            commands=commands,
        )


def environment(folder: Path | None = None) -> dict[str, Any]:
    """What a run depends on besides its settings; `folder` (default: the current one) is asked
    for its git commit."""
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "git_commit": _git_commit(folder or Path.cwd()),
    }


@dataclass(frozen=True)
class Tracker:
    """Where metrics go besides metrics.jsonl."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


def open_tracker(logger: Logger, folder: RunFolder, config: dict[str, Any], name: str) -> Tracker:
    """The tracker that `logger` names, its files inside the run folder."""
    if logger is Logger.wandb:
        return _open_wandb(folder, config, name)
    if logger is Logger.tensorboard:
        return _open_tensorboard(folder, config)
    return Tracker(log=lambda metrics, step: None, close=lambda: None)


def check_tracker(logger: Logger) -> None:
    """ValueError if the package that `logger` needs is not installed."""
    if logger is Logger.wandb:
        _import_wandb()
    elif logger is Logger.tensorboard:
        _import_summary_writer()


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "logger=wandb needs the package wandb: pip install wandb (or use logger=none)"
        ) from error
    return wandb


def _import_summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            'logger=tensorboard needs the package tensorboard: pip install "bonsai-ft[tensorboard]"'
        ) from error
    return SummaryWriter


def _open_wandb(folder: RunFolder, config: dict[str, Any], name: str) -> Tracker:
    wandb = _import_wandb()
    # wandb checks the value itself
    mode: Any = os.environ.get("WANDB_MODE") or "offline"
    try:
        run = wandb.init(
            project="bonsai-ft", name=name, dir=str(folder.path), config=config, mode=mode
        )
    except wandb.Error as error:
        raise ValueError(
            f"logger=wandb could not start with WANDB_MODE={mode}: {error}; run `wandb login`, "
            "or unset WANDB_MODE to record offline, or use logger=none"
        ) from error
    return Tracker(log=lambda metrics, step: run.log(dict(metrics), step=step), close=run.finish)


def _open_tensorboard(folder: RunFolder, config: dict[str, Any]) -> Tracker:
    writer = _import_summary_writer()(str(folder.path / "tensorboard"))
    # four spaces make a code block of it
    settings = _to_json(config, indent=2).replace("\n", "\n    ")
    writer.add_text("config", "    " + settings)

    def log(metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)

    return Tracker(log=log, close=writer.close)


class Console:
    """The progress of a run on stderr: one live line on a terminal, now and then a plain line in
    a log file, nothing where `enabled` is false (all ranks but the main one)."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = sys.stderr if file is None else file
        self._enabled = enabled
        self._clock = clock
        is_terminal = self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._progress = _progress_line(self._file) if enabled and is_terminal else None
        self._task: TaskID | None = None
        self._figures = ""
        self._total = self._next_line = 0
        self._started = 0.0
        self._first: tuple[int, float] = (0, 0.0)
        self._is_first_update = True

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """Begin the progress line; `first_step` steps were done before, by the run resumed."""
        self._total = total_steps
        self._started = self._clock()
        self._first = (first_step, self._started)
        self._is_first_update = True
        self._next_line = 0
        if self._progress is not None:
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._show("first step ...")
            self._progress.start()

    def update(self, metrics: StepMetrics) -> None:
        """Show the newest step."""
        if not self._enabled:
            return
        self._figures = "  ".join(
            (
                f"loss {metrics.loss:#.3g}",
                f"{_speed(metrics.tokens_per_second)} tok/s",
                format_bytes(metrics.peak_memory_bytes),
                self._time_left(metrics.step),
            )
        )
        if self._progress is not None:
            self._show(self._figures, completed=metrics.step)
        elif metrics.step >= self._next_line or metrics.step >= self._total:
            # the first step is shown too: it tells that all is well, and how long it will take
            every = max(1, self._total // PLAIN_LINES)
            self._next_line = (metrics.step // every + 1) * every
            self.print(f"step {metrics.step}/{self._total}  {self._figures}")

    def status(self, text: str) -> None:
        """Say on the live line what is going on between two steps; the next update ends it."""
        if self._progress is not None:
            self._show(f"{self._figures}  {text}".strip())

    def print(self, text: str) -> None:
        """Write lines above the progress line, exactly as given."""
        if not self._enabled:
            return
        if self._progress is not None:
            self._progress.console.out(text, highlight=False)
        else:
            self._file.write(text + "\n")
            self._file.flush()

    def stop(self) -> None:
        """End the progress line; it stays on the screen."""
        if self._progress is not None and self._task is not None:
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None

    def _show(self, text: str, completed: int | None = None) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=completed, figures=text, refresh=True)

    def _time_left(self, step: int) -> str:
        now = self._clock()
        if step >= self._total:
            return f"done in {format_seconds(now - self._started)}"
        first_step, first_time = self._first
        pace = (now - first_time) / max(1, step - first_step)
        if self._is_first_update:
            # compiling and warming up belong to the first step only: measure from its end
            self._is_first_update = False
            self._first = (step, now)
        return f"{format_seconds(pace * (self._total - step))} left"


def _progress_line(file: TextIO) -> Progress:
    return Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[figures]}", markup=False),
        console=rich.console.Console(file=file, force_terminal=True),
        # drawn when a step ends: no thread that takes time from training
        auto_refresh=False,
        # stdout may be piped, and is not ours
        redirect_stdout=False,
    )


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"


def check_unused(path: Path) -> None:
    """ValueError if `path` cannot become a run folder because something is there."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"run_dir={path} is a file; choose another folder")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(
            f"run_dir={path} is not empty; choose another folder, or continue the run in it with "
            f"resume={path}"
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    """The commit checked out, "-dirty" added if tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            # looking must not write to the user's index
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def _parse_record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record else None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
