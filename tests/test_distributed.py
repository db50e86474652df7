"""Does a run survive Ctrl-C, kill -9 and a second process? By the command line, as users run it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from bonsai_ft.format import open_bonsai
from bonsai_ft.resources import PACKAGE
from bonsai_ft.train.checkpoint import newest_checkpoint
from bonsai_ft.train.report import RunFolder

pytestmark = pytest.mark.slow

TRAIN = str(PACKAGE.parent / "train.py")
STEPS = 30
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def command(tiny_base, tmp_path_factory):
    """`command(folder, *more)`: the words after `python` that train on the tiny base."""
    folder = tmp_path_factory.mktemp("rows")
    rows = folder / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for number in range(50):
            output = f"{number + 1}." + " Yes!" * (number % 9)
            file.write(json.dumps({"instruction": f"{number} + 1 = ?", "output": output}) + "\n")
    # the length is left to the recipe's rule for CPUs, so that a resumed run has to know it too
    words = [
        "recipe=alpaca_cn",
        "hardware=cpu",
        "hardware.dtype=float32",
        f"model.source={tiny_base('llama')}",
        f"data.path={rows}",
        "data.sequence_length=128",
        "adapter.dropout=0.1",
        f"train.cpu_steps={STEPS}",
        "train.batch_size=2",
        "train.accumulation=4",
        "train.learning_rate=5e-3",
        "train.save_every=8",
        "train.eval_every=10",
        "train.probe_tokens=1",
    ]
    return lambda folder, *more: [TRAIN, *words, f"run_dir={folder}", *more]


def start(arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
    )


def finish(process):
    """Exit code, stdout and stderr; never leaves a process behind."""
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for_step(process, folder, step):
    """Returns once `step` is in metrics.jsonl."""
    end = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < end:
        if any(m["step"] >= step and "loss" in m for m in RunFolder(folder).metrics()):
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"step {step} did not come:\n{process.communicate()[1]}")


def steps(folder):
    return [m for m in RunFolder(folder).metrics() if "loss" in m]


def losses(folder):
    return [m["loss"] for m in steps(folder)]


def evals(folder):
    return {m["step"]: m["eval_loss"] for m in RunFolder(folder).metrics() if "eval_loss" in m}


def tensors(folder):
    with open_bonsai(folder / "adapter.bonsai") as file:
        return {name: file.tensor(name).view(torch.uint8).tolist() for name in file.names()}


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The folder of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, out, err = finish(start(command(folder)))
    assert code == 0, err
    assert out == ""
    assert [m["step"] for m in steps(folder)] == list(range(1, STEPS + 1))
    return folder


def test_two_processes_write_one_folder_and_do_what_one_does_with_dropout(command, whole, tmp_path):
    folder = tmp_path / "two"
    code, _, err = finish(start([*TWO_PROCESSES, *command(folder)]))
    assert code == 0, err
    assert [p.name for p in tmp_path.iterdir()] == ["two"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in whole.iterdir())
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-4)
    assert evals(folder) == pytest.approx(evals(whole), rel=1e-4)
    assert [m["tokens"] for m in steps(folder)] == [m["tokens"] for m in steps(whole)]
    # one of them speaks
    assert err.count("finished after") == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS


def test_micro_batches_that_cannot_be_shared_are_refused_before_there_is_a_folder(
    command, tmp_path
):
    folder = tmp_path / "odd"
    arguments = command(folder, "train.accumulation=3")
    arguments.remove("train.accumulation=4")
    code, _, err = finish(start([*TWO_PROCESSES, *arguments]))
    assert code != 0
    assert "error: train.accumulation=3 cannot be dealt to 2 processes" in err
    # what a user's mistake ends with; torchrun reports it and returns a code of its own
    assert "exitcode  : 2" in err
    assert "Traceback" not in err.split("error: train.accumulation")[0]
    assert not folder.exists()


def test_run_goes_on_exactly_after_ctrl_c_and_after_kill_9(command, whole, tmp_path):
    folder = tmp_path / "cut"
    process = start(command(folder))
    wait_for_step(process, folder, 2)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "Traceback" not in err
    assert "stopping after this step" in err
    stopped = len(steps(folder))
    assert 2 <= stopped < STEPS
    assert newest_checkpoint(folder / "checkpoints")[0].name == f"step-{stopped:06d}"
    assert (folder / "adapter.bonsai").is_file()
    assert json.loads((folder / "summary.json").read_text())["steps"] == stopped
    config = (folder / "config.yaml").read_bytes()

    code, _, err = finish(start([TRAIN, f"resume={folder}", "train.learning_rate=1"]))
    assert code == 2
    assert "leave out train.learning_rate=1" in err
    assert "Traceback" not in err

    process = start([TRAIN, f"resume={folder}"])
    # past the next checkpoint, so that something is lost
    wait_for_step(process, folder, 8 * (stopped // 8 + 1) + 1)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    saved = newest_checkpoint(folder / "checkpoints")[0]
    assert stopped < int(saved.name.removeprefix("step-")) < STEPS

    code, _, err = finish(start([TRAIN, f"resume={folder}"]))
    assert code == 0, err
    assert f"resuming from {saved}" in err
    assert [m["step"] for m in steps(folder)] == list(range(1, STEPS + 1))
    assert losses(folder) == losses(whole)
    final = {step: loss for step, loss in evals(folder).items() if step != stopped}
    expected = {step: loss for step, loss in evals(whole).items() if step != stopped}
    assert final == expected
    assert (folder / "config.yaml").read_bytes() == config
    assert tensors(folder) == tensors(whole)
