"""Is every verb clear: help with an example, one JSON object, one message and exit code 2?"""

import builtins
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import bonsai_ft.chat
from bonsai_ft import cli
from bonsai_ft.adapter import TernaryLoraConfig, adapter_state, attach, save_adapter
from bonsai_ft.api import load_model

VERBS = ("quantize", "inspect", "evaluate", "generate", "chat")
ROWS = [{"instruction": f"{i} + 1 = ?", "input": "", "output": str(i + 1)} for i in range(6)]
# Two steps of a run that takes less than a second.
SHORT = (
    "train.total_steps=2",
    "train.batch_size=1",
    "train.accumulation=1",
    "data.sequence_length=64",
    "hardware=cpu",
    "model.source=base.bonsai",
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


class Result(NamedTuple):
    code: int
    out: str
    err: str


def jsonl(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="session")
def adapter(tiny_base, tmp_path_factory):
    """An adapter of the llama base that changes what it says."""
    model = load_model(tiny_base("llama"), dtype=torch.float32)
    config = TernaryLoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    attach(model, config)
    with torch.no_grad():
        for value in adapter_state(model).values():
            value.add_(0.5 * torch.randn_like(value))
    path = tmp_path_factory.mktemp("adapter") / "adapter.bonsai"
    save_adapter(model, path)
    return path


@pytest.fixture
def folder(tmp_path, tmp_path_factory, monkeypatch, tiny_base, adapter):
    """The current directory, with a base, its adapter and rows in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BONSAI_FT_CACHE", str(tmp_path_factory.mktemp("cache")))
    (tmp_path / "base.bonsai").symlink_to(tiny_base("llama"))
    (tmp_path / "adapter.bonsai").symlink_to(adapter)
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS), encoding="utf-8")
    return tmp_path


@pytest.fixture
def type_in(monkeypatch, capsys):
    """`type_in("generate", ...)`: what the console script would do, in this process."""

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["bonsai-ft", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run


def assert_mistake(result: Result, *words: str) -> None:
    """Exit code 2, nothing on stdout, and one message that ends stderr."""
    assert result.code == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    starts = [line for line in result.err.splitlines() if line.lower().startswith("error")]
    assert len(starts) == 1, result.err
    message = result.err[result.err.index("error: ") :]
    assert starts[0].startswith("error: ")
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


# Help


@pytest.mark.parametrize("verb", [*VERBS, "train"])
def test_help_of_every_verb_has_an_example(verb, type_in):
    result = type_in(verb, "--help")
    assert result.code == 0
    assert f"Example: bonsai-ft {verb} " in result.out
    assert result.err == ""


def test_help_lists_every_verb_also_without_arguments(type_in):
    result = type_in("--help")
    assert (result.code, result.err) == (0, "")
    assert type_in() == result
    for verb in (*VERBS, "train"):
        assert f"\n  {verb} " in result.out


def test_help_loads_nothing_heavy():
    program = (
        "import sys\n"
        "from bonsai_ft.cli import main\n"
        "for arguments in (['--help'], ['generate', '--help'], ['train', '--help']):\n"
        "    sys.argv = ['bonsai-ft', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as stop:\n"
        "        assert not stop.code\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'peft', 'wandb'} & set(sys.modules)\n"
        "    assert not heavy, (arguments, heavy)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_version_is_the_packages(type_in):
    assert type_in("--version").out == f"bonsai-ft {bonsai_ft.__version__}\n"


# Typer's own complaints


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("nope", ("No such command", "nope")),
        ("generate", ("MODEL", "bonsai-ft generate --help")),
        ("generate base.bonsai --promt a", ("--promt", "--prompt")),
        ("generate base.bonsai --prompt a --max-new-tokens many", ("--max-new-tokens", "integer")),
        ("evaluate base.bonsai", ("--text",)),
        (
            "quantize float out.bonsai --method best",
            ("--method", "auto", "feedback", "optimal", "paper"),
        ),
        ("inspect a b", ("b",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_command_line_is_one_message(typed, words, type_in, folder):
    before = listing(folder)
    assert_mistake(type_in(*typed.split()), *words)
    assert listing(folder) == before


# Settings of train


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("train.learing_rate=1", ("train.learing_rate", "train.learning_rate")),
        ("learning_rate=1", ("train.learning_rate",)),
        ("+train.foo=1", ("train.foo",)),
        ("xyzzy=1", ("xyzzy", "--cfg job")),
        ("train.total_steps=abc", ("train.total_steps=abc", "a whole number")),
        ("train.total_steps=1.5", ("train.total_steps=1.5", "a whole number")),
        ("train.total_steps=null", ("train.total_steps", "cannot be null")),
        ("train.learning_rate=fast", ("train.learning_rate=fast", "a number")),
        ("adapter.lora=2.5", ("adapter.lora=2.5", "true or false")),
        ("train.schedule=cosin", ("train.schedule=cosin", "cosine, linear, constant")),
        ("logger=csv", ("logger=csv", "none, wandb, tensorboard")),
        ("recipe=alpaka", ("recipe=alpaka", "alpaca_cn", "--config-dir")),
        ("model=gpt", ("model=gpt", "smollm2_135m", "qwen3_0_6b")),
        ("hardware=tpu", ("hardware=tpu", "cpu", "one_gpu")),
        ("recipe.name=alpaka", ("recipe.name=alpaka", "alpaca_cn")),
        ("recipe.name=mine.py", ("recipe.name=mine.py", "there is no mine.py")),
        ("train.total_steps=0", ("train.total_steps=0", "1 or more")),
        ("train.seed=-1", ("train.seed=-1", "from 0")),
        ("train.probe_tokens=0", ("train.probe_tokens=0", "1 or more")),
        ("adapter.rank=0", ("adapter.rank=0", "1 or more")),
        ("train.learning_rate=-1", ("train.learning_rate=-1", "above 0")),
        ("train.weight_decay=-1", ("train.weight_decay=-1", "0 or more")),
        ("data.held_out_fraction=2", ("data.held_out_fraction=2", "between 0 and 1")),
        ("alpaca_cn", ("alpaca_cn", "KEY=VALUE", "recipe=alpaca_cn")),
        ("train.seed", ("train.seed", "KEY=VALUE")),
        ("--lr=3", ("--lr=3", "--help")),
        ("--config-dir=nowhere", ("nowhere", "not found")),
        ("kernel=fast", ("kernel=fast", "auto", "reference")),
        ("kernel=cuda", ("kernel=cuda", "auto")),
        ("hardware.dtype=float16", ("hardware.dtype=float16", "bfloat16")),
        ("data.columns={instructoin: q}", ("instructoin", "instruction", "conversations")),
        ("data.columns={instruction: q}", ("rows.jsonl", "q", "found: instruction, input, output")),
        ("data.template=chatmal", ("data.template=chatmal", "chatml")),
        ("data.path=nope.jsonl", ("nope.jsonl", "no such file")),
        ("data.path=rows.txt", ("rows.txt", ".jsonl")),
        ("data.path=sub", ("sub", "folder")),
        ("model.source=nope.bonsai", ("model.source=nope.bonsai", "no such file")),
        ("model.source=./nope", ("./nope", "no such file or folder")),
        ("model.source=rows.jsonl", ("rows.jsonl", ".gguf")),
        ("model.source=", ("model.source", "model=smollm2_135m")),
        ("model.source=adapter.bonsai", ("adapter.bonsai", "is an adapter")),
        ("run_dir=sub", ("run_dir=sub", "not empty", "resume=sub")),
        ("run_dir=rows.jsonl", ("run_dir=rows.jsonl", "is a file")),
        ("run_dir=rows.jsonl/run", ("rows.jsonl/run", "Not a directory")),
        ("adapter.target_modules=[wq]", ("adapter.target_modules", "wq", "q_proj")),
        ("resume=sub", ("resume=sub", "leave out", "train.total_steps=2")),
        pytest.param("hardware=one_gpu", ("GPU", "hardware=cpu"), marks=no_gpu),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_one_message_and_leaves_nothing(typed, words, type_in, folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "note.md").touch()
    (folder / "rows.txt").touch()
    before = listing(folder)
    assert_mistake(type_in("train", "data.path=rows.jsonl", *SHORT, typed), *words)
    assert listing(folder) == before


def test_settings_of_quantising_are_named_as_typed(type_in, folder):
    (folder / "float").mkdir()
    result = type_in(
        "train", *SHORT, "data.path=rows.jsonl", "model.source=float", "model.residual_k=1"
    )
    assert_mistake(result, "model.residual_k=1", "2 to 256")


def test_a_cache_that_cannot_be_used_is_named(type_in, folder):
    (folder / "float").mkdir()
    settings = ("data.path=rows.jsonl", "model.source=float", "cache_dir=rows.jsonl")
    assert_mistake(type_in("train", *SHORT, *settings), "cache_dir=rows.jsonl", "another folder")


def test_a_run_without_data_says_so(type_in, folder):
    assert_mistake(type_in("train", *SHORT), "data.path", "recipe")


@pytest.mark.parametrize("resume", ["nowhere", "sub", "rows.jsonl"])
def test_resuming_what_is_no_run_is_a_mistake(resume, type_in, folder):
    (folder / "sub").mkdir()
    assert_mistake(type_in("train", f"resume={resume}"), f"resume={resume}", "run folder")


@pytest.mark.parametrize("content", ["train: [", "trian: {seed: 1}", "train: {seed: x}", "\x00"])
def test_resuming_from_a_damaged_config_names_the_file(content, type_in, folder):
    (folder / "config.yaml").write_text(content)
    assert_mistake(type_in("train", "resume=."), "config.yaml")


# Data (facts/bug-reports.md, rows 72 to 81)

OUTPUT_IS_A_NUMBER = jsonl([*ROWS[:2], ROWS[2] | {"output": 7}])
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", OUTPUT_IS_A_NUMBER, ("a.jsonl:3", "output", "a number (int)", "text")),
        ("a.jsonl", jsonl([{**ROWS[0], "input": [1, "a"]}]), ("a.jsonl:1", "input", "a list")),
        ("a.jsonl", jsonl([{"question": "a", "answer": "b"}]), ("question, answer", "instruction")),
        ("a.jsonl", jsonl([{"instruction": "a"}]), ("output", "found: instruction")),
        ("a.jsonl", jsonl([{"conversations": "a"}]), ("a.jsonl:1", "conversations", "a list")),
        ("a.jsonl", jsonl([{"messages": [{"text": "a"}]}]), ("a.jsonl:1", "messages[0]", "role")),
        ("a.jsonl", jsonl([{"messages": TURNS[::-1]}]), ("a.jsonl", "turn order", "line 1")),
        ("a.jsonl", jsonl([row | {"output": " "} for row in ROWS]), ("empty output", "lines 1, 2")),
        ("a.jsonl", jsonl(ROWS[:1]) + '{"instruction": "a",\n', ("a.jsonl:2", "not valid JSON")),
        ("a.json", '[{"instruction": "a"} {}]', ("a.json:1", "not valid JSON")),
        ("a.json", "instruction: a", ("a.json:1", "expected an array of rows")),
        ("a.jsonl", "", ("a.jsonl", "no rows")),
        ("a.jsonl", "3\n", ("a.jsonl:1",)),
        ("a.csv", "instruction,output\na,b,c\n", ("a.csv:2", "3 cells", "2 columns")),
        ("a.parquet", "PAR1", ("a.parquet", "Parquet")),
    ],
    ids=[
        "a-number",
        "mixed-list",
        "other-columns",
        "no-output",
        "turns-as-text",
        "turns-without-role",
        "turn-order",
        "all-empty",
        "broken-jsonl",
        "broken-json",
        "no-json",
        "empty-file",
        "no-object",
        "csv-cells",
        "parquet",
    ],
)
def test_a_malformed_file_is_named_with_its_line(name, content, words, type_in, folder):
    (folder / name).write_text(content, encoding="utf-8")
    before = listing(folder)
    assert_mistake(type_in("train", *SHORT, f"data.path={name}"), *words)
    assert listing(folder) == before


def test_a_gbk_file_is_recognised(type_in, folder):
    text = jsonl([{"instruction": "春天", "output": "花开"}])
    (folder / "a.jsonl").write_bytes(text.encode("gbk"))
    result = type_in("train", *SHORT, "data.path=a.jsonl")
    assert_mistake(result, "a.jsonl:1", "not UTF-8", "GBK", "iconv")


def test_one_set_in_three_shapes_trains_alike(type_in, folder):
    asked = [(row["instruction"], row["output"]) for row in ROWS]
    shapes = {
        "alpaca": [{"instruction": a, "output": b} for a, b in asked],
        "messages": [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in asked
        ],
        "conversations": [
            {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]}
            for a, b in asked
        ],
    }
    losses = set()
    for shape, rows in shapes.items():
        (folder / f"{shape}.jsonl").write_text(jsonl(rows), encoding="utf-8")
        settings = (f"data.path={shape}.jsonl", "train.total_steps=1", f"run_dir={shape}")
        result = type_in("train", *SHORT, *settings)
        assert f"read as {shape}" in result.err
        losses.add(json.loads(Path(shape, "summary.json").read_text())["final_eval_loss"])
    assert len(losses) == 1


# What train does


def test_train_writes_its_run_folder_and_nothing_else(type_in, folder):
    before = listing(folder)
    result = type_in("train", "data.path=rows.jsonl", *SHORT, "run_dir=run")
    assert (result.code, result.out) == (0, "")
    assert "step 2/2" in result.err
    assert "next:" in result.err
    # neither outputs/ nor .hydra
    assert {path.split("/")[0] for path in listing(folder) - before} == {"run"}
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 2


def test_cfg_job_shows_the_config_and_runs_nothing(type_in, folder):
    before = listing(folder)
    # a setting may stand behind an option
    result = type_in("train", "recipe=alpaca_cn", "--cfg", "job", "train.seed=7")
    assert (result.code, result.err) == (0, "")
    assert "name: alpaca_cn" in result.out
    assert "seed: 7" in result.out
    assert listing(folder) == before


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("data.path=我的数据.jsonl", "path: 我的数据.jsonl"),
        ("data.path=my rows (1).jsonl", "path: my rows (1).jsonl"),
        ("data.path=~/a=b.jsonl", "path: ~/a=b.jsonl"),
        ("data.path=C:\\数据\\", "path: C:\\数据\\"),
        ("data.path=it's.jsonl", "path: it's.jsonl"),
        ("data.columns={instruction: 问题, output: a}", "instruction: 问题\n    output: a"),
        ("data.columns={instruction:问题}", "instruction: 问题"),
        ("data.columns.output=答案", "output: 答案"),
        ("adapter.target_modules=[q_proj, v_proj]", "- q_proj\n  - v_proj"),
        ("data.template={% for m in messages %}{{ m }}{% endfor %}", "{% for m in messages %}"),
    ],
)
def test_values_need_no_quotes_for_hydra(typed, shown, type_in):
    result = type_in("train", typed, "--cfg", "job")
    assert result.code == 0, result.err
    assert shown in result.out


def test_a_chinese_file_with_chinese_columns_trains(type_in, folder):
    rows = [{"问题": row["instruction"], "答案": row["output"]} for row in ROWS]
    (folder / "我的数据.jsonl").write_text(jsonl(rows), encoding="utf-8")
    result = type_in(
        "train",
        *SHORT,
        "data.path=我的数据.jsonl",
        "data.columns={instruction: 问题, output: 答案}",
        "run_dir=运行",
    )
    assert result.code == 0, result.err
    assert Path("运行/adapter.bonsai").is_file()
    assert "我的数据.jsonl" in Path("运行/config.yaml").read_text(encoding="utf-8")


def write_own_recipe(folder: Path, numbers: str, head: str = "# @package _global_") -> None:
    (folder / "my_configs" / "recipe").mkdir(parents=True)
    (folder / "my_configs" / "recipe" / "mine.yaml").write_text(f"{head}\n{numbers}")
    (folder / "mine.py").write_text(
        'DATASET = "rows.jsonl"\n'
        'PROBES = ["1 + 1 = ?"]\n'
        "def conversation(row):\n"
        '    return [{"role": "user", "content": "ask: " + row["instruction"]},\n'
        '            {"role": "assistant", "content": row["output"]}]\n'
    )


def test_a_users_own_recipe_lives_outside_the_repository(type_in, folder):
    write_own_recipe(folder, "recipe: {name: mine.py}\ntrain: {total_steps: 2, probe_tokens: 3}\n")
    typed = ("--config-dir", "my_configs", "recipe=mine", *SHORT[1:], "run_dir=run")
    result = type_in("train", *typed)
    assert result.code == 0, result.err
    assert "ask: " in result.err
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["recipe"], summary["steps"]) == ("mine.py", 2)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ("train: {learing_rate: 1}", ("recipe/mine.yaml", "train.learning_rate")),
        ("train: {total_steps: many}", ("recipe/mine.yaml", "train.total_steps", "whole number")),
        ("train: {total_steps: 1\ndata:", ("mine.yaml:3", "not valid YAML")),
    ],
    ids=["key", "type", "yaml"],
)
def test_a_mistake_in_a_users_recipe_names_the_file(numbers, words, type_in, folder):
    write_own_recipe(folder, numbers)
    assert_mistake(type_in("train", "--config-dir", "my_configs", "recipe=mine"), *words)


def test_a_recipe_without_its_first_line_is_explained(type_in, folder):
    write_own_recipe(folder, "train: {seed: 1}", head="# my recipe")
    result = type_in("train", "--config-dir", "my_configs", "recipe=mine")
    assert_mistake(result, "recipe/mine.yaml", "# @package _global_")


def test_a_recipe_that_is_not_python_names_file_and_line(type_in, folder):
    (folder / "mine.py").write_text('DATASET = "rows.jsonl"\nPROBES = [\n')
    assert_mistake(type_in("train", *SHORT, "recipe.name=mine.py"), "mine.py:2")


def test_a_multirun_makes_one_run_folder_per_job(type_in, folder):
    result = type_in("train", "-m", "data.path=rows.jsonl", *SHORT, "train.seed=1,2")
    assert result.code == 0, result.err
    runs = sorted((folder / "runs" / "custom").iterdir())
    assert len(runs) == 2
    assert {yaml_seed(run) for run in runs} == {1, 2}
    # the third thing there says what was asked for
    assert {path.name for path in (folder / "runs").iterdir()} == {"custom", "multirun"}
    assert not list(folder.rglob(".hydra"))


def yaml_seed(run: Path) -> int:
    import yaml

    assert (run / "adapter.bonsai").is_file()
    return yaml.safe_load((run / "config.yaml").read_text())["train"]["seed"]


def test_a_mistake_in_a_multirun_is_one_message(type_in, folder):
    typed = ("-m", "data.path=rows.jsonl", *SHORT, "train.learning_rate=-1,1")
    assert_mistake(type_in("train", *typed), "train.learning_rate=-1")


# Damaged and mixed-up files


@pytest.fixture
def damaged(folder):
    """`damaged(name)`: the base cut off, the base with one bit flipped, or no base at all."""
    whole = (folder / "base.bonsai").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    contents = {
        "truncated": whole[: len(whole) // 2],
        "flipped": bytes(flipped),
        "empty": b"",
        "text": b"this is no model at all",
    }

    def write(name: str) -> str:
        (folder / f"{name}.bonsai").write_bytes(contents[name])
        return f"{name}.bonsai"

    return write


@pytest.mark.parametrize("name", ["truncated", "flipped", "empty", "text"])
@pytest.mark.parametrize("verb", ["inspect", "evaluate", "generate", "train"])
def test_a_damaged_base_is_refused(verb, name, damaged, type_in, folder):
    path = damaged(name)
    before = listing(folder)
    rest = {
        "inspect": [path, "--json"],
        "evaluate": [path, "--text", "rows.jsonl"],
        "generate": [path, "--prompt", "a"],
        "train": ["data.path=rows.jsonl", *SHORT, f"model.source={path}"],
    }
    assert_mistake(type_in(verb, *rest[verb]), path)
    assert listing(folder) == before


def test_a_damaged_adapter_is_refused(type_in, folder):
    content = bytearray((folder / "adapter.bonsai").read_bytes())
    content[-5] ^= 4
    (folder / "bad.bonsai").write_bytes(content)
    typed = ("generate", "base.bonsai", "--adapter", "bad.bonsai", "--prompt", "a")
    assert_mistake(type_in(*typed), "bad.bonsai", "checksum")


@pytest.mark.parametrize(
    ("model", "beside", "words"),
    [
        ("adapter.bonsai", None, ("adapter.bonsai", "is an adapter, not a model")),
        ("base.bonsai", "base.bonsai", ("base.bonsai", "is a model, not an adapter")),
        ("other.bonsai", "adapter.bonsai", ("adapter.bonsai", "another base", "fingerprint")),
        ("base.bonsai", "nope.bonsai", ("--adapter nope.bonsai", "no such file")),
        ("nope.bonsai", None, ("nope.bonsai", "no such file")),
        ("rows.jsonl", "adapter.bonsai", ("rows.jsonl", "an adapter needs its base")),
    ],
    ids=["swapped", "base-twice", "wrong-base", "no-adapter", "no-model", "no-base"],
)
def test_files_given_in_the_wrong_place_are_refused(
    model, beside, words, type_in, folder, tiny_base
):
    (folder / "other.bonsai").symlink_to(tiny_base("qwen3"))
    chosen = [model, *(["--adapter", beside] if beside else [])]
    assert_mistake(type_in("generate", *chosen, "--prompt", "a"), *words)


# Numbers and files of the other verbs


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("generate base.bonsai", ("--prompt", "--prompts")),
        ("generate base.bonsai --prompt a --prompts rows.jsonl", ("--prompt", "--prompts")),
        ("generate base.bonsai --prompt=", ("--prompt is empty",)),
        ("generate base.bonsai --prompts nope.txt", ("--prompts nope.txt", "no such file")),
        ("generate base.bonsai --prompts empty.txt", ("empty.txt", "no prompt")),
        ("generate base.bonsai --prompts gbk.txt", ("gbk.txt", "UTF-8")),
        ("generate base.bonsai --prompts other.jsonl", ("other.jsonl", "question", "instruction")),
        ("generate base.bonsai --prompt a --temperature -1", ("--temperature -1",)),
        ("generate base.bonsai --prompt a --temperature nan", ("--temperature nan",)),
        ("generate base.bonsai --prompt a --top-p 0", ("--top-p 0",)),
        ("generate base.bonsai --prompt a --max-new-tokens 0", ("--max-new-tokens 0",)),
        ("generate base.bonsai --prompt a --seed -1", ("--seed -1",)),
        ("generate base.bonsai --prompt a --template b", ("--template b", "chatml")),
        ("chat base.bonsai --temperature -1", ("--temperature -1",)),
        ("evaluate base.bonsai --text nope.txt", ("--text nope.txt", "no such file")),
        ("evaluate base.bonsai --text gbk.txt", ("gbk.txt", "UTF-8")),
        ("evaluate base.bonsai --text empty.txt", ("empty.txt", "at least 2")),
        ("evaluate base.bonsai --text rows.jsonl --batch-size 0", ("--batch-size 0",)),
        ("evaluate base.bonsai --text rows.jsonl --sequence-length 1", ("--sequence-length 1",)),
        ("evaluate base.bonsai --text rows.jsonl --dtype int8", ("--dtype int8", "float32")),
        pytest.param(
            "evaluate base.bonsai --text rows.jsonl --dtype float16",
            ("--dtype float16", "bfloat16"),
            marks=no_gpu,
        ),
        ("inspect nope.bonsai", ("nope.bonsai", "no such file")),
        ("inspect .", ("folder",)),
        ("quantize float out", ("out", ".bonsai")),
        ("quantize float nowhere/out.bonsai", ("nowhere", "does not exist")),
        ("quantize float rows.jsonl/out.bonsai", ("rows.jsonl/out.bonsai",)),
        ("quantize ./nope out.bonsai", ("./nope", "no such file or folder")),
        ("quantize float out.bonsai", ("float", "config.json")),
        ("quantize base.bonsai out.bonsai", ("base.bonsai", "quantised already")),
        ("quantize float out.bonsai --residual-dim 7", ("--residual-dim 7", "128")),
        ("quantize float out.bonsai --residual-k 1", ("--residual-k 1", "2 to 256")),
        ("quantize float out.bonsai --steps pq", ("--steps pq", "ptq1_0")),
        ("quantize float out.bonsai --threshold low", ("--threshold low", "calibrated")),
        ("quantize float out.bonsai --skip (", ("--skip (",)),
        ("quantize package:nope/a.gguf out.bonsai", ("package:nope", "pip install")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_flag_is_one_message_and_leaves_nothing(typed, words, type_in, folder):
    (folder / "float").mkdir()
    (folder / "empty.txt").write_text("\n")
    (folder / "gbk.txt").write_bytes("春天\n".encode("gbk"))
    (folder / "other.jsonl").write_text('{"question": "a"}\n')
    before = listing(folder)
    result = type_in(*typed.split(" "))
    assert_mistake(result, *words)
    assert "data.template" not in result.err
    assert listing(folder) == before


# Results


def only_json(result: Result) -> dict:
    assert result.code == 0, result.err
    value = json.loads(result.out)
    assert isinstance(value, dict)
    return value


def test_quantize_prints_one_object_and_inspect_agrees(type_in, folder, tiny_base):
    source = tiny_base("llama").parent / "float"
    typed = ("quantize", str(source), "out.bonsai", "--calibration", "none", "--json")
    result = type_in(*typed)
    made = only_json(result)
    assert "quantising" in result.err
    assert "error" not in result.err
    seen = only_json(type_in("inspect", "out.bonsai", "--json"))
    for key in ("bits_per_weight", "fingerprint", "kind", "format_version"):
        assert made[key] == seen[key], key
    assert (seen["kind"], seen["format_version"]) == ("model", "1")
    for one, other in zip(made["layers"], seen["layers"], strict=True):
        for key in ("name", "shape", "bits_per_weight"):
            assert one[key] == other[key], key
        # rounded in the file
        assert one["relative_mse"] == pytest.approx(other["relative_mse"], abs=1e-6)
    assert len(seen["layers"]) == 14


def test_inspect_describes_an_adapter(type_in, folder):
    seen = only_json(type_in("inspect", "adapter.bonsai", "--json"))
    base = only_json(type_in("inspect", "base.bonsai", "--json"))
    assert (seen["kind"], seen["layers"], seen["adapter"]["r"]) == ("adapter", [], 2)
    assert seen["fingerprint"] == base["fingerprint"]
    text = type_in("inspect", "adapter.bonsai").out
    assert "adapter" in text
    assert "rank 2" in text


def test_inspect_shows_every_layer_to_people(type_in, folder):
    text = type_in("inspect", "base.bonsai").out
    assert "checksums verified" in text
    assert text.count("_proj") == 14


@pytest.mark.parametrize("text", ["rows.jsonl", "text.txt"])
def test_evaluate_prints_one_object(text, type_in, folder):
    (folder / "text.txt").write_text("Spring rain. 春雨。" * 20, encoding="utf-8")
    plain = only_json(type_in("evaluate", "base.bonsai", "--text", text, "--json"))
    assert set(plain) >= {"loss", "perplexity", "tokens"}
    chosen = ("base.bonsai", "--adapter", "adapter.bonsai", "--text", text)
    adapted = only_json(type_in("evaluate", *chosen, "--json"))
    assert adapted["tokens"] == plain["tokens"]
    assert adapted["loss"] != plain["loss"]
    assert f"{adapted['loss']:.4f}" in type_in("evaluate", *chosen).out


def test_infinity_becomes_null_in_json(capsys):
    cli.show({"perplexity": float("inf"), "layers": [{"mse": float("nan")}]}, True, str)
    assert json.loads(capsys.readouterr().out) == {"perplexity": None, "layers": [{"mse": None}]}


def test_generate_prints_one_object_with_the_text_it_streams(type_in, folder):
    typed = ("generate", "base.bonsai", "--prompt", "春天", "--max-new-tokens", "6")
    value = only_json(type_in(*typed, "--json"))
    assert set(value) >= {"text", "tokens", "tokens_per_second"}
    assert value["tokens"] == 6
    streamed = type_in(*typed)
    assert streamed.out.strip() == value["text"]
    assert "6 tokens" in streamed.err
    adapted = only_json(type_in(*typed, "--adapter", "adapter.bonsai", "--json"))
    assert adapted["text"] != value["text"]


def test_generate_answers_every_line_of_a_text(type_in, folder):
    (folder / "p.txt").write_text("\ufeff一\n\n  two  \n", encoding="utf-8")
    typed = ("generate", "base.bonsai", "--prompts", "p.txt", "--max-new-tokens", "4")
    value = only_json(type_in(*typed, "--json"))
    assert value["tokens"] == 8
    assert len(value["results"]) == 2
    assert value["text"] == "\n".join(one["text"] for one in value["results"])
    shown = type_in(*typed).out
    assert "> 一\n" in shown
    assert "> two\n" in shown


def test_generate_answers_rows_up_to_their_last_question(type_in, folder):
    rows = [{"messages": TURNS}, {"messages": TURNS[:1]}, {"messages": []}]
    (folder / "p.jsonl").write_text(jsonl(rows))
    typed = ("generate", "base.bonsai", "--prompts", "p.jsonl", "--max-new-tokens", "4", "--json")
    result = type_in(*typed)
    first, second = only_json(result)["results"]
    # the same question, so that an answer in the file has no part in it
    assert first["text"] == second["text"]
    assert "dropped 1 row: empty conversation (line 3)" in result.err


def test_a_system_message_of_a_row_beats_the_flag(folder):
    own = [{"role": "system", "content": "own"}, *TURNS[:1]]
    (folder / "p.jsonl").write_text(jsonl([{"messages": own}, {"messages": TURNS}]))
    first, second = cli._conversations(None, folder / "p.jsonl", "flag")
    assert [m["content"] for m in first] == ["own", "a"]
    assert [m["content"] for m in second] == ["flag", "a"]


# Chat


@pytest.fixture
def pipe(monkeypatch):
    def fill(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    return fill


@pytest.fixture
def asked(monkeypatch):
    """Answers "re: QUESTION" in two pieces; the list of conversations it was given.

    A question with "stop" in it meets Ctrl-C after the first piece.
    """
    seen: list[list[tuple[str, str]]] = []

    def answer(model, tokenizer, conversations, *, show, **_):
        [conversation] = conversations
        seen.append([(m["role"], m["content"]) for m in conversation])
        question = conversation[-1]["content"]
        show("re: ")
        if "stop" in question:
            raise KeyboardInterrupt
        show(question)

    monkeypatch.setattr(bonsai_ft.chat, "answer", answer)
    return seen


def test_chat_answers_questions_from_a_pipe(pipe, type_in, folder):
    pipe("春天\nwho are you?\n")
    typed = ("chat", "base.bonsai", "--adapter", "adapter.bonsai", "--max-new-tokens", "3")
    result = type_in(*typed)
    assert result.code == 0
    alone = type_in("generate", *typed[1:4], "--prompt", "春天", "--max-new-tokens", "3", "--json")
    assert only_json(alone)["text"] in result.out
    # questions belong to whoever asked, hints to stderr
    assert "春天" not in result.out
    assert "Ctrl-D" in result.err


def test_chat_remembers_until_it_is_told_to_forget(asked, pipe, type_in, folder):
    pipe("a\nb\n/clear\nc\n\nnever read\n")
    result = type_in("chat", "base.bonsai", "--system", "be brief")
    assert (result.code, result.out) == (0, "re: a\nre: b\nre: c\n")
    head = ("system", "be brief")
    assert asked == [
        [head, ("user", "a")],
        [head, ("user", "a"), ("assistant", "re: a"), ("user", "b")],
        [head, ("user", "c")],
    ]


def test_ctrl_c_stops_an_answer_and_not_the_chat(asked, pipe, type_in, folder):
    pipe("stop here\nb\n")
    result = type_in("chat", "base.bonsai")
    assert (result.code, result.out) == (0, "re: \nre: b\n")
    assert "(stopped)" in result.err
    assert asked[1][1] == ("assistant", "re:")


def test_ctrl_c_at_the_prompt_ends_the_chat(monkeypatch, type_in, folder):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    assert type_in("chat", "base.bonsai").code == 0


def test_ctrl_c_elsewhere_ends_with_code_130_and_no_traceback(monkeypatch, type_in, folder):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_open", interrupt)
    result = type_in("generate", "base.bonsai", "--prompt", "a")
    assert result == Result(130, "", "stopped\n")


# Terminals, pipes and locales


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "latin-1"])
def test_pipes_speak_utf8_whatever_the_locale(encoding, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("春".encode()), encoding))
    cli.use_utf8()
    sys.stdout.write("春天 \u27e6\n")
    sys.stdout.flush()
    assert raw.getvalue().decode() == "春天 \u27e6\n"
    assert sys.stdin.read() == "春"


@pytest.mark.parametrize(("encoding", "shown"), [("gbk", "春?"), ("ascii", "春\U0001f331")])
def test_a_terminal_keeps_its_encoding_if_it_has_one(encoding, shown, monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    cli.use_utf8()
    stream.write("春\U0001f331")
    stream.flush()
    assert raw.getvalue().decode("gbk" if encoding == "gbk" else "utf-8") == shown


def test_chinese_survives_a_locale_without_letters(folder):
    (folder / "p.txt").write_text("春天\n", encoding="utf-8")
    script = Path(sys.executable).with_name("bonsai-ft")
    command = [script, "generate", "base.bonsai", "--prompts", "p.txt", "--max-new-tokens", "2"]
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    done = subprocess.run(
        [*command, "--system", "简短回答"],
        env=plain | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8").startswith("> 春天\n")


def test_a_reader_that_leaves_early_is_no_traceback(folder):
    script = Path(sys.executable).with_name("bonsai-ft")
    with subprocess.Popen(
        [script, "train", "recipe=alpaca_cn", "--cfg", "job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
