"""Does a config become a run folder that says what happened and can be repeated?"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import bonsai_ft
from bonsai_ft.cli import schema
from bonsai_ft.config import (
    AdapterConfig,
    DataConfig,
    Device,
    Dtype,
    HardwareConfig,
    Logger,
    ModelConfig,
    Optimizer,
    RecipeConfig,
    TrainConfig,
    TrainSection,
)
from bonsai_ft.evaluate import evaluate_text
from bonsai_ft.finetune import choose_dtype, finetune, next_commands, run_length
from bonsai_ft.format import open_bonsai
from bonsai_ft.train.report import RunFolder

# DESIGN 4.4, and the held-out rows, so that the evaluation can be repeated
FILES = [
    "adapter.bonsai",
    "checkpoints",
    "config.yaml",
    "heldout.jsonl",
    "metrics.jsonl",
    "peft",
    "report.html",
    "summary.json",
]
# DESIGN 4.3
SUMMARY = {
    "base_eval_loss",
    "final_eval_loss",
    "first_train_loss",
    "last_train_loss",
    "steps",
    "tokens",
    "seconds",
    "planned_memory_bytes",
    "peak_memory_bytes",
    "trainable_parameters",
    "adapter",
}


@pytest.fixture
def rows(tmp_path):
    """40 rows in Alpaca's columns, short enough for 128 bytes."""
    path = tmp_path / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(40):
            row = {
                "instruction": f"{number} + 1 = ?",
                "input": "",
                "output": f"The sum is {number + 1}." + " Yes!" * (number % 4),
            }
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def config(tiny_base, tmp_path, rows):
    """`config(section={...}, ...)`: five small steps on the tiny base, in float32."""

    def make(**sections) -> TrainConfig:
        usual = {
            "model": ModelConfig(name="tiny", source=str(tiny_base("llama"))),
            "data": DataConfig(path=str(rows), sequence_length=128, held_out_fraction=0.2),
            "adapter": AdapterConfig(rank=4, alpha=8.0, dropout=0.1),
            "train": TrainSection(
                total_steps=5,
                batch_size=2,
                accumulation=2,
                learning_rate=5e-3,
                codebook_learning_rate=1e-2,
                eval_every=2,
            ),
            "hardware": HardwareConfig(device=Device.cpu, dtype=Dtype.float32),
            "run_dir": str(tmp_path / "run"),
        }
        for name, changes in sections.items():
            if isinstance(changes, dict):
                usual[name] = replace(usual[name], **changes)
            else:
                usual[name] = changes
        return TrainConfig(**usual)

    return make


def run(config, is_length_explicit=True):
    return finetune(config, is_length_explicit=is_length_explicit)


def losses(path):
    return [m["loss"] for m in RunFolder(path).metrics() if "loss" in m]


def tensors(path):
    with open_bonsai(path) as file:
        return {name: file.tensor(name).clone() for name in file.names()}


def evaluated(config, tmp_path, adapter=None):
    """The loss on a run's held-out rows, as `bonsai-ft evaluate` computes it."""
    model = bonsai_ft.load_model(config.model.source, dtype=torch.float32)
    if adapter is not None:
        bonsai_ft.load_adapter(model, adapter)
    return evaluate_text(
        model,
        bonsai_ft.load_tokenizer(config.model.source),
        str(tmp_path / "run" / "heldout.jsonl"),
        sequence_length=config.data.sequence_length,
        batch_size=3,
    ).loss


# ---------------------------------------------------------------- the folder


def test_run_folder_has_exactly_the_files_it_promises(config, tmp_path):
    run(config())
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == FILES
    assert sorted(p.name for p in (tmp_path / "run" / "peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005"]


def test_summary_has_the_keys_that_others_read_and_is_what_is_returned(config, tmp_path):
    result = run(config())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary) >= SUMMARY
    assert not result.pop("is_stopped")
    assert json.loads(json.dumps(result)) == summary
    assert summary["steps"] == 5
    assert summary["adapter"] == str(tmp_path / "run" / "adapter.bonsai")
    for key in (
        "tokens",
        "seconds",
        "planned_memory_bytes",
        "peak_memory_bytes",
        "trainable_parameters",
    ):
        assert summary[key] > 0, key
    for name in ("base", "final"):
        assert summary[f"{name}_perplexity"] == pytest.approx(
            math.exp(summary[f"{name}_eval_loss"])
        )
    steps = [m for m in RunFolder(tmp_path / "run").metrics() if "loss" in m]
    assert summary["first_train_loss"] == steps[0]["loss"]
    assert summary["last_train_loss"] == steps[-1]["loss"]
    assert summary["tokens"] == steps[-1]["tokens"]


def test_losses_in_the_summary_are_those_of_the_files_it_names(config, tmp_path):
    settings = config()
    summary = run(settings)
    base = evaluated(settings, tmp_path)
    final = evaluated(settings, tmp_path, summary["adapter"])
    assert summary["base_eval_loss"] == pytest.approx(base, rel=1e-6)
    assert summary["final_eval_loss"] == pytest.approx(final, rel=1e-6)
    assert final < base - 0.05


def test_trainable_parameters_are_those_of_the_adapter(config):
    summary = run(config())
    values = tensors(summary["adapter"])
    assert summary["trainable_parameters"] == sum(v.numel() for v in values.values())


def test_held_out_rows_are_not_trained_on(config, tmp_path, rows):
    run(config(train={"total_steps": 1}))
    held_out = [
        json.loads(line)["messages"][0]["content"]
        for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()
    ]
    everything = [json.loads(line)["instruction"] for line in rows.read_text().splitlines()]
    assert 0 < len(held_out) < 20
    assert set(held_out) < set(everything)


def test_held_out_file_of_ones_own_is_used_whole(config, tmp_path, rows):
    other = tmp_path / "other.jsonl"
    other.write_text('{"instruction": "Hello", "output": "Good day."}\n' * 3)
    settings = config(data={"held_out_path": str(other)}, train={"total_steps": 1})
    summary = run(settings)
    assert len((tmp_path / "run" / "heldout.jsonl").read_text().splitlines()) == 3
    assert summary["base_eval_loss"] == pytest.approx(evaluated(settings, tmp_path), rel=1e-6)


def test_commands_that_are_printed_repeat_what_the_run_did(config, tmp_path):
    settings = config(data={"template": "chatml"})
    folder = RunFolder(tmp_path / "my run")
    for command in next_commands(tmp_path / "base.bonsai", folder, settings):
        assert f"--adapter '{folder.adapter}'" in command
        assert "--template chatml" in command
    assert "--sequence-length 128 --dtype float32" in command


def test_recipes_questions_are_asked_before_and_after(config, tmp_path, capsys):
    from bonsai_ft.resources import load_recipe

    settings = config(
        recipe=RecipeConfig(name="alpaca_cn"),
        train={"total_steps": 1, "probe_tokens": 2, "gradient_checkpointing": True},
    )
    summary = run(settings)
    said = capsys.readouterr().err
    for probe in load_recipe("alpaca_cn").PROBES:
        assert f"> {probe}\n  before: " in said
    assert summary["recipe"] == "alpaca_cn"
    # asking leaves dropout and the order of rows alone
    run(replace(settings, recipe=RecipeConfig(), run_dir=str(tmp_path / "silent")))
    assert losses(tmp_path / "silent") == losses(tmp_path / "run")


# ---------------------------------------------------------------- repeating a run


def test_written_config_repeats_the_run(config, tmp_path):
    first = run(config())
    written = OmegaConf.load(tmp_path / "run" / "config.yaml")
    settings = OmegaConf.to_object(OmegaConf.merge(schema(), written))
    again = run(replace(settings, run_dir=str(tmp_path / "again")), is_length_explicit=False)
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    assert again["final_eval_loss"] == first["final_eval_loss"]
    ours, theirs = tensors(again["adapter"]), tensors(first["adapter"])
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_another_seed_gives_another_run(config, tmp_path):
    run(config(train={"total_steps": 2}))
    run(config(train={"total_steps": 2, "seed": 1}, run_dir=str(tmp_path / "other")))
    assert losses(tmp_path / "other") != losses(tmp_path / "run")


def test_cpu_runs_the_recipes_cpu_steps_unless_the_length_is_typed(config, tmp_path, capsys):
    settings = config(train={"total_steps": 400, "cpu_steps": 3})
    assert run(settings, is_length_explicit=False)["steps"] == 3
    said = capsys.readouterr().err
    assert "on a CPU this recipe runs 3 of its 400 steps" in said
    assert "train.total_steps=400 runs all of them" in said
    # the learning rate falls over these 3 steps, and a resumed or repeated run has as many
    written = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert written.train.total_steps == 3
    assert written.train.cpu_steps is None


def test_typed_length_beats_cpu_steps(config):
    settings = config(train={"total_steps": 400, "cpu_steps": 3})
    assert run_length(settings, "cpu", is_explicit=True) == 400
    assert run_length(settings, "cpu", is_explicit=False) == 3
    assert run_length(settings, "cuda", is_explicit=False) == 400
    assert run_length(config(train={"cpu_steps": 300}), "cpu", is_explicit=False) == 5
    assert run_length(config(), "cpu", is_explicit=False) == 5


# ---------------------------------------------------------------- what is refused


def test_run_folder_that_is_not_empty_is_refused_before_anything_is_read_or_written(
    config, tmp_path
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    # even before the base is looked for
    settings = config(model={"source": "nowhere.bonsai"})
    with pytest.raises(ValueError, match=r"run_dir=.*run is not empty.*resume="):
        run(settings)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]


def test_run_folder_that_is_empty_is_fine(config, tmp_path):
    (tmp_path / "run").mkdir()
    run(config(train={"total_steps": 1}))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == FILES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"source": ""}}, r"model\.source is empty"),
        ({"model": {"source": "nowhere.bonsai"}}, "no such file"),
        ({"data": {"path": None}}, r"data\.path is empty"),
        ({"data": {"path": "nowhere.jsonl"}}, r"nowhere\.jsonl: no such file"),
        ({"data": {"sequence_length": 16}}, "sequence_length"),
        ({"data": {"template": "llama9"}}, r"data\.template=llama9"),
        ({"data": {"columns": {"instruction": "q"}}}, "names a column that is not there"),
        ({"data": {"held_out_path": "nowhere.jsonl"}}, r"nowhere\.jsonl"),
        ({"adapter": {"target_modules": ["q_prog"]}}, r"adapter\.target_modules.*'q_prog'"),
        ({"adapter": {"modules_to_save": ["lm_heat"]}}, r"adapter\.modules_to_save.*'lm_heat'"),
        ({"adapter": {"modules_to_save": ["q_proj"]}}, "packed weights"),
        ({"hardware": {"optimizer": Optimizer.adamw_8bit}}, "adamw_8bit needs a GPU"),
        ({"hardware": {"dtype": Dtype.float16}}, "float16 is for GPUs"),
        ({"kernel": "fast"}, "kernel=fast is not known"),
        ({"recipe": RecipeConfig(name="alpaca_xx")}, r"recipe\.name=alpaca_xx"),
        ({"resume": "nowhere"}, "resume=nowhere is not the folder of a run"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_refused_before_there_is_a_run_folder(
    config, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        run(config(**changes))
    assert not (tmp_path / "run").exists()


def test_gpu_that_is_not_there_is_refused(config, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"hardware\.device=cuda: torch sees no GPU"):
        run(config(hardware={"device": Device.cuda}))
    assert not (tmp_path / "run").exists()


def test_head_that_the_loss_does_not_understand_is_refused(config, tmp_path, monkeypatch):
    settings = config(train={"total_steps": 1})
    run(settings)
    monkeypatch.setattr("bonsai_ft.train.loss.adjust_logits", lambda model, logits: 2 * logits)
    with pytest.raises(ValueError, match="changes the output of its head"):
        run(replace(settings, run_dir=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="changes the output of its head"):
        evaluated(settings, tmp_path)


def test_logger_that_is_not_installed_is_refused_before_there_is_a_run_folder(
    config, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="logger=tensorboard needs the package"):
        run(config(logger=Logger.tensorboard))
    assert not (tmp_path / "run").exists()


def test_automatic_dtype_on_a_cpu_is_float32_unless_bfloat16_is_fast(monkeypatch):
    for is_fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda is_fast=is_fast: is_fast
        )
        assert choose_dtype(HardwareConfig(), "cpu") == expected


# ---------------------------------------------------------------- kinds of adapter


def test_lora_alone_carries_no_codebooks(config, tmp_path, capsys):
    settings = config(adapter={"codebooks": False}, train={"total_steps": 2})
    summary = run(settings)
    names = tensors(summary["adapter"])
    assert names
    assert all(name.endswith((".lora_A", ".lora_B")) for name in names)
    assert "is without" not in capsys.readouterr().err
    assert summary["final_eval_loss"] == pytest.approx(
        evaluated(settings, tmp_path, summary["adapter"]), rel=1e-6
    )


def test_codebooks_alone_leave_lora_at_zero(config, tmp_path, capsys):
    settings = config(adapter={"lora": False}, train={"total_steps": 2})
    summary = run(settings)
    values = tensors(summary["adapter"])
    codebooks = {n: v for n, v in values.items() if n.endswith(".residual_codebook")}
    assert codebooks
    assert all(not v.any() for n, v in values.items() if n.endswith(".lora_B"))
    assert summary["trainable_parameters"] == sum(v.numel() for v in codebooks.values())
    assert "no peft folder" in capsys.readouterr().err
    assert not (Path(summary["adapter"]).parent / "peft").exists()
    assert summary["final_eval_loss"] < summary["base_eval_loss"]
    assert summary["final_eval_loss"] == pytest.approx(
        evaluated(settings, tmp_path, summary["adapter"]), rel=1e-6
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3"], ids=["untied", "tied"])
def test_modules_trained_whole_travel_with_the_adapter(config, tmp_path, tiny_base, architecture):
    settings = config(
        model={"source": str(tiny_base(architecture))},
        adapter={"modules_to_save": ["embed_tokens", "lm_head"]},
        train={"total_steps": 2, "learning_rate": 1e-3},
    )
    summary = run(settings)
    names = set(tensors(summary["adapter"]))
    whole = {"model.embed_tokens.weight", "lm_head.weight"}
    assert names & whole == (whole if architecture == "llama" else {"model.embed_tokens.weight"})
    assert summary["final_eval_loss"] == pytest.approx(
        evaluated(settings, tmp_path, summary["adapter"]), rel=1e-6
    )


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_5"])
def test_other_architectures_run_through(config, tmp_path, tiny_base, architecture):
    settings = config(
        model={"source": str(tiny_base(architecture))}, train={"total_steps": 2, "cpu_steps": 1}
    )
    summary = run(settings)
    assert summary["steps"] == 2
    assert summary["final_eval_loss"] == pytest.approx(
        evaluated(settings, tmp_path, summary["adapter"]), rel=1e-6
    )


def test_base_without_a_residual_trains_lora_alone(config, tiny_base):
    source = str(tiny_base("llama", steps=("ptq1_0",)))
    summary = run(config(model={"source": source}, train={"total_steps": 1}))
    assert all(".lora_" in name for name in tensors(summary["adapter"]))


# ---------------------------------------------------------------- memory and dtypes


def test_gradient_checkpointing_changes_nothing_but_memory(config, tmp_path):
    plain = run(config())
    saved = run(config(train={"gradient_checkpointing": True}, run_dir=str(tmp_path / "saved")))
    assert losses(tmp_path / "saved") == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert saved["final_eval_loss"] == pytest.approx(plain["final_eval_loss"], rel=1e-6)


def test_bfloat16_learns_too(config):
    summary = run(config(hardware={"dtype": Dtype.bfloat16}))
    assert summary["final_eval_loss"] < summary["base_eval_loss"]
