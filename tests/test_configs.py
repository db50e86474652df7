"""Every recipe composes, is typed, and has its Python half; mistakes in YAML and keys are named."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from bonsai_ft.compose import schema, setting_keys
from bonsai_ft.config import TrainConfig
from bonsai_ft.resources import load_recipe, resource

CONFIGS = resource("configs")
RECIPES = sorted(p.stem for p in (CONFIGS / "recipe").glob("*.yaml"))


def composed(*overrides):
    GlobalHydra.instance().clear()
    ConfigStore.instance().store(name="schema", node=schema())
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_object(compose("train", overrides=list(overrides)))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_and_has_its_python_half(name):
    config = composed(f"recipe={name}")
    assert isinstance(config, TrainConfig)
    assert config.recipe.name == name
    module = load_recipe(name)
    assert module.__doc__
    assert module.PROBES
    assert callable(module.conversation)


def test_every_python_half_has_its_yaml():
    halves = sorted(p.stem for p in resource("recipes").glob("*.py"))
    assert halves == RECIPES


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={path.stem}"
        for group in ("model", "adapter", "hardware")
        for path in sorted((CONFIGS / group).glob("*.yaml"))
    ],
)
def test_every_choice_of_every_group_composes(choice):
    assert isinstance(composed("recipe=alpaca_cn", choice), TrainConfig)


def test_models_that_the_readme_promises_are_there_with_source_and_memory():
    names = {p.stem for p in (CONFIGS / "model").glob("*.yaml")}
    assert names >= {"smollm2_135m", "qwen3_0_6b", "qwen3_8b", "qwen3_8_27b"}
    for name in names:
        model = composed(f"model={name}").model
        assert model.name == name
        assert model.source
        assert model.expected_memory


def test_alpaca_cn_has_the_numbers_of_the_recipe():
    config = composed("recipe=alpaca_cn")
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.dropout) == (8, 16, 0.05)
    train = config.train
    assert (train.batch_size, train.accumulation, train.total_steps) == (2, 8, 500)
    assert (train.learning_rate, train.warmup_ratio) == (2e-4, 0.03)
    assert train.schedule.value == "cosine"


def test_command_line_beats_recipe():
    assert composed("recipe=alpaca_cn", "train.learning_rate=1e-5").train.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.total_steps=0", "train.total_steps"),
        ("adapter.rank=0", "adapter.rank"),
        ("adapter.rank=100000000000", "adapter.rank"),
        ("adapter.alpha=inf", "adapter.alpha"),
        ("train.learning_rate=inf", "train.learning_rate"),
        ("hardware.threads=100000000000", "hardware.threads"),
        ("adapter.dropout=1", "adapter.dropout"),
        ("train.learning_rate=-1", "train.learning_rate"),
        ("data.held_out_fraction=1", "data.held_out_fraction"),
        ("data.sequence_length=3", "data.sequence_length"),
    ],
)
def test_a_number_out_of_range_is_named_as_typed(override, key):
    with pytest.raises(ValueError, match=key):
        composed("recipe=alpaca_cn", override)


def test_every_yaml_opens_with_what_it_is_and_a_command():
    for path in CONFIGS.rglob("*.yaml"):
        head = "\n".join(path.read_text(encoding="utf-8").splitlines()[:4])
        assert "# " in head, path
        assert "train.py" in head, path


def test_setting_keys_cover_the_schema():
    flat = OmegaConf.to_container(schema())
    assert {key.split(".")[0] for key in setting_keys()} == set(flat)


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ValueError, match="alpaca_cn"):
        load_recipe("alpaka")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("PROBES = [1]", "PROBES"),
        ("DATASET = 3", "DATASET"),
        ("conversation = 5", "conversation"),
        ("import there_is_no_such_module", "cannot be run"),
    ],
)
def test_a_recipe_with_a_wrong_part_is_refused_when_it_is_read(tmp_path, text, what):
    file = tmp_path / "mine.py"
    file.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=what):
        load_recipe(str(file))


def test_a_recipe_may_be_a_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("PROBES = ['x']\n", encoding="utf-8")
    assert load_recipe(str(file)).PROBES == ["x"]


def test_bundled_rows_are_many_unique_and_well_formed():
    import json

    path = Path(resource("recipes")) / "data" / "alpaca_cn.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 500
    assert all(set(row) == {"instruction", "input", "output"} for row in rows)
    assert len({(row["instruction"], row["input"]) for row in rows}) == len(rows)
    assert sum("画龙点睛" in row["instruction"] for row in rows) >= 1
    assert sum("盆栽助手" in row["output"] for row in rows) >= 10
