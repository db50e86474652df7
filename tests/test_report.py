"""What a run writes and prints: the folder, the metrics, the page, the trackers, the console."""

import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bonsai_ft.config import Logger
from bonsai_ft.train.page import linear_axis, log_axis, smooth, thin, unbroken, write_html
from bonsai_ft.train.report import (
    Console,
    EvalMetrics,
    RunFolder,
    StepMetrics,
    environment,
    format_bytes,
    format_seconds,
    open_tracker,
    write_atomically,
)

VOID = {"meta", "link", "br"}
SVG_LEAVES = {"line", "polyline", "circle"}


def step_metrics(step: int, loss: float = 3.0, **changes: Any) -> StepMetrics:
    fields: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "lr": 2e-4,
        "codebook_lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 100 * step,
        "tokens_per_second": 812.0,
        "peak_memory_bytes": 1_400_000_000,
        "epoch": step / 10,
    }
    return StepMetrics(**{**fields, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "alpaca_cn", "train: {}\n")


class Page(HTMLParser):
    """Collects tags and text, and fails on a tag that is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SVG_LEAVES, f"<{tag}/> does not close itself in HTML"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def attributes(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attrs for name, attrs in self.tags if name == tag)


def rendered(tmp_path: Path, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "title": "a run",
        "settings": {"train": {"total_steps": 20}, "kernel": "auto"},
        "summary": {
            "base_eval_loss": 3.4,
            "final_eval_loss": 2.8,
            "first_train_loss": 3.5,
            "last_train_loss": 2.7,
            "steps": 20,
            "tokens": 123_456,
            "seconds": 190.0,
            "planned_memory_bytes": 1.3e9,
            "peak_memory_bytes": 1.4e9,
            "trainable_parameters": 2_442_240,
            "adapter": "adapter.bonsai",
            "adapter_bytes": 4_900_000,
        },
        "steps": [vars(step_metrics(step, 3.5 - 0.03 * step)) for step in range(1, 21)],
        "evals": [
            {"step": 0, "eval_loss": 3.4, "eval_tokens": 500},
            {"step": 20, "eval_loss": 2.8, "eval_tokens": 500},
        ],
        "samples": [("2 + 2?", "5", "4")],
        "notes": ["3 rows were cut"],
        "commands": ["bonsai-ft chat base.bonsai --adapter adapter.bonsai"],
    }
    path = tmp_path / "report.html"
    write_html(path, **{**arguments, **changes})
    return path.read_text(encoding="utf-8")


# run folder


def test_the_exact_folder_is_used_when_run_dir_is_given(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b", "alpaca_cn", "x: 1\n")
    assert folder.path == tmp_path / "a" / "b"
    assert folder.config.read_text() == "x: 1\n"


def test_an_empty_run_dir_is_accepted(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path, "alpaca_cn", "").config.exists()


def test_a_run_dir_in_use_is_refused_and_left_alone(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match=r"run_dir=.* is not empty; choose another.*resume="):
        RunFolder.create(folder.path, "alpaca_cn", "other\n")
    assert folder.config.read_text() == "train: {}\n"


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.create(tmp_path / "file", "alpaca_cn", "")


@pytest.mark.parametrize(
    ("recipe", "name"), [("alpaca_cn", "alpaca_cn"), ("mine/own.py", "own"), ("", "custom")]
)
def test_without_run_dir_two_runs_get_two_folders_under_their_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (RunFolder.create(None, recipe, "").path for _ in range(2))
    assert first != second
    assert first.parent == second.parent == Path("runs") / name


def test_resuming_what_is_not_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume=.*no config\.yaml"):
        RunFolder.open(tmp_path)
    with pytest.raises(ValueError, match=r"resume=.*no such folder"):
        RunFolder.open(tmp_path / "missing")


def test_an_opened_folder_is_the_created_one(folder: RunFolder) -> None:
    assert RunFolder.open(folder.path) == folder


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


# metrics


def test_metrics_are_read_back_as_logged(folder: RunFolder) -> None:
    folder.log(EvalMetrics(step=0, eval_loss=3.4, eval_tokens=50))
    folder.log(step_metrics(1))
    assert folder.metrics() == [
        {"step": 0, "eval_loss": 3.4, "eval_tokens": 50},
        vars(step_metrics(1)),
    ]


def test_a_line_can_be_read_as_soon_as_it_is_logged(folder: RunFolder) -> None:
    folder.log(step_metrics(1))
    assert folder.metrics_file.read_text().endswith("}\n")


def test_a_loss_that_is_not_finite_is_logged_as_valid_json(folder: RunFolder) -> None:
    folder.log(step_metrics(1, math.nan, grad_norm=math.inf))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(folder.metrics_file.read_text(), parse_constant=refuse)
    assert record["loss"] is None
    assert record["grad_norm"] is None


def test_a_run_without_metrics_has_none(folder: RunFolder) -> None:
    folder.truncate_metrics(5)
    assert folder.metrics() == []


def test_truncation_keeps_what_was_logged_up_to_the_step(folder: RunFolder) -> None:
    folder.log(EvalMetrics(step=0, eval_loss=3.4, eval_tokens=50))
    for step in range(1, 7):
        folder.log(step_metrics(step))
    folder.log(EvalMetrics(step=6, eval_loss=3.0, eval_tokens=50))
    before = folder.metrics_file.read_text().splitlines(keepends=True)
    folder.truncate_metrics(4)
    assert folder.metrics_file.read_text() == "".join(before[:5])


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', "\0\0\0", '{"step": 3', "3"])
def test_a_torn_last_line_is_dropped_and_the_log_goes_on(folder: RunFolder, tail: str) -> None:
    folder.log(step_metrics(1))
    folder.log(step_metrics(2))
    with folder.metrics_file.open("a") as file:
        file.write(tail)
    assert [record["step"] for record in folder.metrics()] == [1, 2]
    folder.truncate_metrics(2)
    folder.log(step_metrics(3))
    assert [record["step"] for record in folder.metrics()] == [1, 2, 3]


def test_a_last_line_that_lacks_only_its_newline_is_kept(folder: RunFolder) -> None:
    folder.metrics_file.write_text('{"step": 1}\n{"step": 2}')
    folder.truncate_metrics(2)
    assert folder.metrics_file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_broken_line_in_the_middle_is_named(folder: RunFolder) -> None:
    folder.metrics_file.write_text('{"step": 1}\nbroken\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2"):
        folder.metrics()


def test_the_summary_keeps_its_order_and_is_valid_json(folder: RunFolder) -> None:
    folder.write_summary({"z": math.nan, "a": Path("x/y"), "logger": Logger.none, "m": [1.5]})
    text = folder.summary.read_text()
    assert list(json.loads(text)) == ["z", "a", "logger", "m"]
    assert json.loads(text) == {"z": None, "a": "x/y", "logger": "none", "m": [1.5]}


def test_the_report_draws_the_folders_metrics_and_weighs_its_adapter(folder: RunFolder) -> None:
    folder.log(EvalMetrics(step=0, eval_loss=3.412, eval_tokens=50))
    folder.log(step_metrics(1, 3.25))
    folder.adapter.write_bytes(bytes(4_900_000))
    folder.write_report(title="t", settings={}, summary={"steps": 1})
    page = Page(folder.report.read_text())
    labels = [attrs.get("aria-label") or "" for attrs in page.attributes("svg")]
    assert any("held-out 3.412 at step 0" in x and "training 3.250" in x for x in labels)
    assert "4.9 MB" in page.text


# environment


def test_the_environment_names_versions_and_machine() -> None:
    record = environment()
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["packages"]["torch"]
    assert json.loads(json.dumps(record)) == record


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_environment_holds_the_commit_and_says_if_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *arguments]
        result = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return result.stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert environment(tmp_path)["git_commit"] == commit
    (tmp_path / "file").write_text("22")
    assert environment(tmp_path)["git_commit"] == f"{commit}-dirty"


def test_no_repository_or_no_git_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment(tmp_path)["git_commit"] is None
    monkeypatch.setenv("PATH", "")
    assert environment(tmp_path)["git_commit"] is None


# trackers


def test_no_tracker_accepts_everything_and_writes_nothing(folder: RunFolder) -> None:
    tracker = open_tracker(Logger.none, folder, {}, "name")
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert [p.name for p in folder.path.iterdir()] == ["config.yaml"]


def test_tensorboard_writes_events_into_the_run_folder(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = open_tracker(Logger.tensorboard, folder, {"train": {"seed": 0}}, "name")
    tracker.log({"loss": 2.5}, 7)
    tracker.close()
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 2.5)]


@pytest.mark.parametrize(
    ("logger", "module", "install"),
    [
        (Logger.tensorboard, "torch.utils.tensorboard", r'pip install "bonsai-ft\[tensorboard\]"'),
        (Logger.wandb, "wandb", "pip install wandb"),
    ],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_tracker_package_says_how_to_install_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, logger: Logger, module: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"logger={logger.value} needs the package.*{install}"):
        open_tracker(logger, folder, {}, "name")


class FakeWandb:
    """The part of wandb that we call."""

    class Error(Exception):
        pass

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **arguments: Any) -> SimpleNamespace:
        if self.failure:
            raise self.Error(self.failure)
        self.calls.append(("init", arguments))
        return SimpleNamespace(
            log=lambda metrics, step: self.calls.append(("log", metrics, step)),
            finish=lambda: self.calls.append(("finish",)),
        )


@pytest.mark.parametrize(("variable", "mode"), [(None, "offline"), ("online", "online")])
def test_wandb_stays_offline_unless_asked_and_writes_into_the_run_folder(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, variable: str | None, mode: str
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    if variable is None:
        monkeypatch.delenv("WANDB_MODE", raising=False)
    else:
        monkeypatch.setenv("WANDB_MODE", variable)
    tracker = open_tracker(Logger.wandb, folder, {"seed": 0}, "alpaca")
    tracker.log({"loss": 1.0}, 3)
    tracker.close()
    (_, arguments), *rest = wandb.calls
    assert arguments["mode"] == mode
    assert arguments["dir"] == str(folder.path)
    assert arguments["name"] == "alpaca"
    assert arguments["config"] == {"seed": 0}
    assert rest == [("log", {"loss": 1.0}, 3), ("finish",)]


def test_wandb_that_cannot_start_is_a_users_error(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("not logged in"))
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match="WANDB_MODE=online: not logged in; run `wandb login`"):
        open_tracker(Logger.wandb, folder, {}, "name")


# numbers with units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (12_345, "12.3 kB"),
        (512e6, "512 MB"),
        (999.7e6, "1.0 GB"),
        (1.4e9, "1.4 GB"),
        (139e9, "139 GB"),
        (math.nan, "?"),
    ],
)
def test_bytes_are_shown_in_decimal_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0s"),
        (45.4, "45s"),
        (59.6, "1m00s"),
        (190, "3m10s"),
        (7500, "2h05m"),
        (273_600, "3d04h"),
        (math.inf, "?"),
    ],
)
def test_seconds_are_shown_in_their_two_largest_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ticking(seconds_per_call: float) -> Any:
    times = iter(range(10**6))
    return lambda: next(times) * seconds_per_call


def test_a_log_file_gets_one_plain_line_now_and_then() -> None:
    file = io.StringIO()
    with Console(file=file, clock=ticking(1.0)) as console:
        console.start(100)
        for step in range(1, 101):
            console.update(step_metrics(step, 3.21))
    lines = file.getvalue().splitlines()
    assert lines[1:3] == [
        "step 5/100  loss 3.21  812 tok/s  1.4 GB  1m35s left",
        "step 10/100  loss 3.21  812 tok/s  1.4 GB  1m30s left",
    ]
    assert [line.split()[1] for line in lines] == ["1/100"] + [f"{s}/100" for s in range(5, 101, 5)]
    assert lines[-1].endswith("done in 1m40s")


def test_plain_lines_follow_when_only_some_steps_are_logged() -> None:
    file = io.StringIO()
    console = Console(file=file)
    console.start(100)
    for step in range(3, 100, 3):
        console.update(step_metrics(step))
    shown = [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert shown == [3, 6, 12, 15, 21, 27, 30, 36, 42, 45, 51, 57, 60, 66, 72, 75, 81, 87, 90, 96]


def test_time_left_ignores_the_slow_first_step_and_the_steps_of_the_run_resumed() -> None:
    file = io.StringIO()
    times = iter([0.0, 100.0, 102.0])
    console = Console(file=file, clock=lambda: next(times))
    console.start(54, first_step=50)
    console.update(step_metrics(51))
    console.update(step_metrics(52))
    assert [line.split("  ")[-1] for line in file.getvalue().splitlines()] == [
        "5m00s left",
        "4s left",
    ]


def test_a_terminal_gets_one_live_line_and_messages_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a dumb terminal, which a test runner may be, gets plain lines
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    with Console(file=file) as console:
        console.print("loading [model]")
        console.start(10)
        console.status("measuring")
        console.update(step_metrics(4, 3.21))
        console.print("saved " + "x" * 200)
    text = file.getvalue()
    assert "loading [model]\n" in text
    assert "saved " + "x" * 200 + "\n" in text
    assert "measuring" in text
    assert "step 4/10" in text
    assert "loss 3.21  812 tok/s  1.4 GB" in text


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_other_ranks_are_silent(file: io.StringIO) -> None:
    with Console(enabled=False, file=file) as console:
        console.print("text")
        console.start(10)
        console.status("text")
        console.update(step_metrics(1))
    assert file.getvalue() == ""


# the page


def test_the_page_is_well_formed_and_declares_its_charset(tmp_path: Path) -> None:
    page = Page(rendered(tmp_path))
    assert {"charset": "utf-8"} in list(page.attributes("meta"))


def test_the_page_loads_and_runs_nothing(tmp_path: Path) -> None:
    text = rendered(tmp_path)
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "embed", "image", "use", "base"}
    for _, attrs in page.tags:
        assert not {"src", "srcset", "action", "xlink:href", "style"} & attrs.keys()
        assert attrs.get("href", "data:,") == "data:,"
        assert not [name for name in attrs if name.startswith("on")]
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_the_page_forbids_the_browser_to_load_anything(tmp_path: Path) -> None:
    policies = [
        attrs["content"]
        for attrs in Page(rendered(tmp_path)).attributes("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_everything_that_comes_from_outside_is_escaped(tmp_path: Path) -> None:
    evil = "</code></pre><script>alert('x')</script>\"&amp;"
    text = rendered(
        tmp_path,
        title=evil,
        settings={evil: {evil: evil, "list": [evil]}, "loose" + evil: None},
        samples=[(evil, evil, evil)],
        notes=[evil],
        commands=[evil],
        summary={"adapter": evil, "adapter_bytes": 1, "steps": evil},
    )
    page = Page(text)
    assert "<script" not in text
    # title, heading, three cells, note, command, two keys and a value at least
    assert page.text.count("&amp;") >= 10


def test_the_page_shows_the_key_figures(tmp_path: Path) -> None:
    text = " ".join(Page(rendered(tmp_path)).text.split())
    for figure in (
        "3.400 \N{RIGHTWARDS ARROW} 2.800",
        "0.600 lower (\N{MINUS SIGN}17.6%)",
        "29.96 \N{RIGHTWARDS ARROW} 16.44",
        "3m10s",
        "812 tokens/s",
        "1.4 GBplanned 1.3 GB, 8% over",
        "2.44 M",
        "123 k123,456",
        "4.9 MB",
    ):
        assert figure in text


def test_a_loss_that_rose_is_called_higher(tmp_path: Path) -> None:
    summary = {"base_eval_loss": 2.0, "final_eval_loss": 2.5}
    assert "0.500 higher (+25.0%)" in Page(rendered(tmp_path, summary=summary)).text


def test_every_chart_says_in_words_what_it_shows(tmp_path: Path) -> None:
    page = Page(rendered(tmp_path))
    charts = [attrs for attrs in page.attributes("svg") if attrs.get("aria-hidden") != "true"]
    assert len(charts) == 4
    assert all(chart["role"] == "img" for chart in charts)
    assert charts[0]["aria-label"] == (
        "Loss by step: training 3.470 at step 1, 2.900 at step 20; training, smoothed 3.440 at "
        "step 2, 2.930 at step 19; held-out 3.400 at step 0, 2.800 at step 20"
    )


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [3.0],
        [0.0],
        [math.nan],
        [None],
        [math.inf, -math.inf],
        [3.0] * 30,
        [math.nan] * 30,
        [3.0, None, 2.0, math.nan] * 10,
        [1e-30, 1e30],
        [-1.0, 0.0, 1.0],
    ],
    ids=repr,
)
def test_no_series_of_values_breaks_the_page(tmp_path: Path, losses: list[Any]) -> None:
    keys = ("loss", "lr", "codebook_lr", "grad_norm", "tokens_per_second")
    steps = [
        {"step": step, **dict.fromkeys(keys, loss), "epoch": loss}
        for step, loss in enumerate(losses, 1)
    ]
    evals = [{"step": s["step"], "eval_loss": s["loss"], "eval_tokens": None} for s in steps]
    text = rendered(tmp_path, steps=steps, evals=evals)
    page = Page(text)
    for tag in ("polyline", "circle", "line", "text"):
        for attrs in page.attributes(tag):
            assert "nan" not in str(attrs)
            assert "inf" not in str(attrs)


def test_a_page_with_nothing_to_tell_is_still_a_page(tmp_path: Path) -> None:
    page = Page(
        rendered(
            tmp_path,
            summary={},
            settings={},
            steps=[],
            evals=[],
            samples=[],
            notes=[],
            commands=[],
        )
    )
    assert page.text.count("no values were recorded") == 4


def test_chinese_and_broken_text_survive(tmp_path: Path) -> None:
    chinese = "\u5b88\u682a\u5f85\u5154"
    text = rendered(tmp_path, samples=[(chinese, "broken \ud800", "")])
    assert chinese in text
    assert "broken ?" in text
    assert "(nothing)" in text


def test_a_very_long_run_makes_no_heavy_page(tmp_path: Path) -> None:
    steps = [vars(step_metrics(step, 3 + step % 7)) for step in range(1, 20_001)]
    assert len(rendered(tmp_path, steps=steps)) < 200_000


# curves


def test_nan_breaks_the_line() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, math.nan), (5, 3.0)]
    assert unbroken(points) == [[(1, 1.0), (2, 2.0)], [(5, 3.0)]]


def test_thinning_keeps_the_extremes() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[1234], points[7777] = (1234.0, 9.0), (7777.0, -9.0)
    kept = thin(points, 100)
    assert len(kept) <= 100
    assert points[1234] in kept
    assert points[7777] in kept
    assert kept == sorted(kept)


def test_smoothing_does_not_lag_behind_a_straight_line() -> None:
    points = [(float(x), 2.0 * x) for x in range(200)]
    smoothed = smooth(points)
    assert len(smoothed) > 190
    assert [y for _, y in smoothed] == pytest.approx([2 * x for x, _ in smoothed])


def test_smoothing_does_not_spread_nan() -> None:
    points = [(float(x), math.nan if x == 50 else 1.0) for x in range(100)]
    assert [x for x, y in smooth(points) if math.isnan(y)] == [50.0]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (2.4, 4.0, ["2.4", "2.6", "2.8", "3.0", "3.2", "3.4", "3.6", "3.8", "4.0"]),
        (0, 1e-3, ["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]),
        (0, 812, ["0", "200", "400", "600", "800", "1,000"]),
        (0, 52_000, ["0", "20k", "40k", "60k"]),
        (-0.3, 0.31, ["-0.4", "-0.2", "0", "0.2", "0.4"]),
        (0, 0, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (3, 3, ["2.6", "2.8", "3.0", "3.2", "3.4"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, labels: list[str]) -> None:
    axis = linear_axis(low, high, 8 if low == 2.4 else 5)
    assert [axis.label(tick) for tick in axis.ticks] == labels


def test_ticks_of_a_logarithmic_axis_are_round_numbers() -> None:
    axis = log_axis(0.3, 40)
    assert [axis.label(tick) for tick in axis.ticks] == ["1", "10"]
    assert axis.share(0.3) > 0
    assert axis.share(40) < 1
    axis = log_axis(0.3, 3)
    assert [axis.label(tick) for tick in axis.ticks] == ["0.2", "0.5", "1", "2", "5"]
