"""Does a run's state come back exactly, and is a checkpoint whole or not there at all?"""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from torch import nn

from bonsai_ft.train import checkpoint
from bonsai_ft.train.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint

FILES = ["manifest.json", "optimizer.safetensors", "parameters.safetensors", "state.json"]


def make(seed=0, kind=torch.optim.AdamW, steps=3):
    """Parameters in two groups, and an optimiser that has moved them `steps` times."""
    torch.manual_seed(seed)
    parameters = {
        "a.lora_A": nn.Parameter(torch.randn(4, 6)),
        "a.lora_B": nn.Parameter(torch.randn(6, 4)),
        # large enough for 8-bit moments
        "a.codebook": nn.Parameter(torch.randn(2, 16, 128)),
    }
    *lora, codebook = parameters.values()
    optimizer = kind([{"params": lora, "lr": 1e-2}, {"params": [codebook], "lr": 1e-3}])
    advance(parameters, optimizer, steps)
    return parameters, optimizer


def advance(parameters, optimizer, steps):
    for step in range(steps):
        for number, parameter in enumerate(parameters.values()):
            generator = torch.Generator().manual_seed(1000 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def save(root, step, keep=2, seed=0, **state):
    parameters, optimizer = make(seed)
    return save_checkpoint(root, step, parameters, optimizer, state, keep)


def snapshot(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def names(root):
    return sorted(p.name for p in root.iterdir())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW8bit], ids=["adamw", "adamw_8bit"])
def test_parameters_and_moments_come_back_bit_for_bit_and_go_on_alike(tmp_path, kind):
    parameters, optimizer = make(kind=kind)
    state = {"progress": {"tokens": 7, "loss": 0.1 + 0.2}, "scaler": {}}
    folder = save_checkpoint(tmp_path, 3, parameters, optimizer, state, 2)
    others, other = make(seed=9, kind=kind, steps=0)
    loaded = load_checkpoint(folder, others, other)

    assert loaded["step"] == 3
    assert {key: loaded[key] for key in state} == state
    for name, parameter in parameters.items():
        assert torch.equal(parameter, others[name]), name
    for ours, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            same = torch.equal(value, theirs[key]) if torch.is_tensor(value) else None
            assert same if same is not None else value == theirs[key], key

    for pair in ((parameters, optimizer), (others, other)):
        advance(*pair, steps=2)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, others[name]), name


def test_learning_rates_are_those_of_the_run_that_resumes(tmp_path):
    folder = save(tmp_path, 1)
    parameters, optimizer = make(steps=0)
    optimizer.param_groups[0]["lr"] = 0.5
    load_checkpoint(folder, parameters, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3]


def test_nothing_is_pickled(tmp_path):
    folder = save(tmp_path, 1)
    assert names(folder) == FILES
    for file in FILES:
        content = (folder / file).read_bytes()
        if file.endswith(".json"):
            json.loads(content)
        else:
            header = int.from_bytes(content[:8], "little")
            json.loads(content[8 : 8 + header])
    assert "pickle" not in sys.modules[checkpoint.__name__].__dict__


def test_manifest_lists_size_and_hash_of_every_other_file(tmp_path):
    folder = save(tmp_path, 12)
    assert folder.name == "step-000012"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [name for name in FILES if name != "manifest.json"]
    for name, record in manifest["files"].items():
        assert record["bytes"] == (folder / name).stat().st_size
        assert len(record["sha256"]) == 64


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def empty(file):
    file.write_bytes(b"")


def remove(file):
    file.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, empty, remove])
@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, name, damage):
    good = save(tmp_path, 4)
    newest = save(tmp_path, 8)
    damage(newest / name)
    found, complaints = newest_checkpoint(tmp_path)
    assert found == good
    assert len(complaints) == 1
    assert complaints[0].startswith("step-000008 is damaged (")
    # a manifest with one changed bit may blame the file it describes
    if (name, damage) != ("manifest.json", flip):
        assert name in complaints[0]


def test_intact_newest_checkpoint_is_taken_without_a_word(tmp_path):
    save(tmp_path, 999_999, keep=3)
    newest = save(tmp_path, 1_000_000, keep=3)
    assert newest_checkpoint(tmp_path) == (newest, [])


def test_manifest_that_lists_nothing_verifies_nothing(tmp_path):
    newest = save(tmp_path, 8)
    (newest / "manifest.json").write_text('{"files": {}}')
    with pytest.raises(ValueError, match="no complete checkpoint"):
        newest_checkpoint(tmp_path)


def test_without_any_complete_checkpoint_the_message_names_folder_and_reasons(tmp_path):
    with pytest.raises(ValueError, match="checkpoints: there is no complete checkpoint"):
        newest_checkpoint(tmp_path / "checkpoints")
    (tmp_path / "step-000004").mkdir()
    with pytest.raises(ValueError, match="step-000004 is damaged"):
        newest_checkpoint(tmp_path)


def test_leftovers_of_a_killed_writer_are_ignored_and_swept(tmp_path):
    good = save(tmp_path, 4)
    leftover = tmp_path / "step-000008.tmp-0a1b2c3d"
    shutil.copytree(good, leftover)
    assert newest_checkpoint(tmp_path) == (good, [])
    save(tmp_path, 8)
    assert names(tmp_path) == ["step-000004", "step-000008"]


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000006", "step-000008"]


def test_damaged_newer_checkpoints_do_not_crowd_out_the_one_just_written(tmp_path):
    save(tmp_path, 4, keep=3)
    truncate(save(tmp_path, 8, keep=3) / "state.json")
    # the run went back to step 4 and stops at step 6
    written = save(tmp_path, 6, keep=1)
    assert newest_checkpoint(tmp_path) == (written, [])
    assert names(tmp_path) == ["step-000006"]


def test_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    truncate(save(tmp_path, 8, seed=1) / "state.json")
    written = save(tmp_path, 8)
    assert newest_checkpoint(tmp_path) == (written, [])


@pytest.mark.parametrize("fatal", [1, 2], ids=["parameters", "optimizer"])
def test_full_disk_leaves_older_checkpoints_as_they_were(tmp_path, monkeypatch, fatal):
    olds = [save(tmp_path, step) for step in (2, 4)]
    before = [snapshot(old) for old in olds]
    real, calls = checkpoint.save_file, []

    def fails(values, path):
        calls.append(path)
        real(values, path)
        if len(calls) == fatal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoint, "save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 6)
    assert names(tmp_path) == ["step-000002", "step-000004"]
    assert [snapshot(old) for old in olds] == before


def test_failure_at_the_last_moment_leaves_older_checkpoints_as_they_were(tmp_path, monkeypatch):
    old = save(tmp_path, 4, keep=1)
    before = snapshot(old)

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.Path, "rename", fails)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-000004"]
    assert snapshot(old) == before


def test_old_ones_go_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    old = save(tmp_path, 4, keep=1)
    real, removed = shutil.rmtree, []

    def spy(path, *args, **kwargs):
        removed.append(path)
        assert newest_checkpoint(tmp_path) == (tmp_path / "step-000006", [])
        real(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", spy)
    save(tmp_path, 6, keep=1)
    assert removed == [old]


def test_system_that_refuses_to_write_gives_an_oserror_with_the_path(tmp_path):
    # safetensors has an error of its own, which the command line would show as a traceback
    (tmp_path / "limited").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        with pytest.raises(OSError, match=r"step-000001 could not be written.*File too large"):
            save(tmp_path / "limited", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path / "limited") == []


def test_writer_killed_in_the_middle_leaves_the_old_checkpoint(tmp_path):
    old = save(tmp_path, 4, keep=1)
    program = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from bonsai_ft.train import checkpoint\n"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
        "o = torch.optim.AdamW([p]); o.step()\n"
        "checkpoint._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save_checkpoint(Path(sys.argv[1]), 6, {'p': p}, o, {}, 1)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert result.returncode == -9
    assert len(names(tmp_path)) == 2
    assert newest_checkpoint(tmp_path) == (old, [])
    save(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-000006"]


def test_checkpoint_of_other_parameters_is_refused_by_name(tmp_path):
    folder = save(tmp_path, 1)
    parameters, optimizer = make()
    parameters["b.lora_A"] = parameters.pop("a.lora_A")
    with pytest.raises(ValueError, match=r"other parameters \(a\.lora_A\)"):
        load_checkpoint(folder, parameters, optimizer)


def test_checkpoint_of_another_shape_is_refused_by_name(tmp_path):
    folder = save(tmp_path, 1)
    parameters, optimizer = make()
    parameters["a.lora_A"] = nn.Parameter(torch.zeros(8, 6))
    with pytest.raises(ValueError, match=r"a\.lora_A has another shape"):
        load_checkpoint(folder, parameters, optimizer)


def test_checkpoint_of_another_optimizer_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    parameters, optimizer = make(kind=AdamW8bit, steps=0)
    with pytest.raises(ValueError, match="made with AdamW, but this run would use AdamW8bit"):
        load_checkpoint(folder, parameters, optimizer)
