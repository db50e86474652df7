"""Do LoRA and codebooks train, travel and swap as one adapter, and never touch the base?"""

import copy
import json
import warnings

import peft
import pytest
import torch
from conftest import ARCHITECTURES, assert_close
from peft import LoraConfig
from test_load import float_twin, logits_of
from torch import nn

import bonsai_ft
from bonsai_ft.adapter import (
    TernaryLora,
    TernaryLoraConfig,
    adapter_names,
    adapter_state,
    attach,
    detach,
    linear_names,
    load_adapter_state,
    save_peft,
    set_adapter,
    trainable_groups,
)
from bonsai_ft.format import BonsaiFormatError, open_bonsai, write_bonsai
from bonsai_ft.model import TernaryLinear

FROZEN = (".ternary", ".scale", ".codes", ".residual_mu", ".residual_sigma")
ATTENTION = ["q_proj", "v_proj"]


@pytest.fixture
def load(tiny_base):
    """`load(architecture)`: a fresh float32 model."""

    def fresh(architecture="llama", **settings):
        return bonsai_ft.load_model(tiny_base(architecture, **settings), dtype=torch.float32)

    return fresh


def lora(**changes) -> TernaryLoraConfig:
    return TernaryLoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ATTENTION} | changes))


def train(model, tokens, steps=3):
    """A few steps on all that is trainable; at most as big as makes a visible difference."""
    was_training = model.training
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0)
    for _ in range(steps):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.train(was_training)


def shake(model, name, seed=0):
    """Stands in for training: every tensor of an adapter becomes something of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in adapter_state(model, name).values():
            value.add_(0.05 * torch.randn(value.shape, generator=generator))


def frozen_bytes(model):
    return {n: t.clone() for n, t in model.state_dict().items() if n.endswith(FROZEN)}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def snapshot(model):
    """Everything that a refused operation must leave alone."""
    return (
        [name for name, _ in model.named_modules()],
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: p.requires_grad for name, p in model.named_parameters()},
        adapter_names(model),
    )


def assert_untouched(model, before):
    after = snapshot(model)
    assert after[0] == before[0]
    assert_equal(after[1], before[1])
    assert after[2] == before[2]
    assert after[3] == before[3]


# What users type


@pytest.mark.parametrize("architecture", ["llama", "qwen3"], ids=["untied", "tied"])
def test_the_documented_snippet_trains_saves_and_reloads(architecture, load, tokens, tmp_path):
    model = load(architecture)
    for name, p in model.named_parameters():
        if "ternary" in name or "scale" in name:
            p.requires_grad = False
        elif "residual" in name:
            p.requires_grad = True
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        lora_dropout=0.05,
        modules_to_save=["embed_tokens", "lm_head"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = peft.get_peft_model(model, config)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum("residual_codebook" in name for name in trainable) == 14
    assert sum("lora_A" in name for name in trainable) == 8
    assert any("embed_tokens" in name for name in trainable)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.weight is head.weight) == (architecture == "qwen3")

    before = adapter_state(model)
    before = {name: value.clone() for name, value in before.items()}
    train(model, tokens)
    for name, value in adapter_state(model).items():
        assert not torch.equal(value, before[name]), f"{name} did not change"
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert torch.equal(embedding.weight, head.weight) == (architecture == "qwen3")

    model.save_pretrained(tmp_path / "peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = peft.PeftModel.from_pretrained(load(architecture), tmp_path / "peft")
    assert torch.equal(logits_of(again, tokens), logits_of(model.eval(), tokens))


def test_the_snippet_saves_codebooks_in_the_adapter_alone(load, tokens, tmp_path):
    base = load()
    own = [p.clone() for n, p in base.named_parameters() if "residual_codebook" in n]
    model = peft.get_peft_model(base, LoraConfig(r=4, target_modules=ATTENTION))
    train(model, tokens)
    after = [p for n, p in base.named_parameters() if n.endswith(".residual_codebook")]
    assert len(after) == len(own)
    assert all(torch.equal(one, other) for one, other in zip(own, after, strict=True))
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert sum("residual_codebook" in name for name in stored) == 14


def test_all_linear_means_every_ternary_layer(load, tokens):
    model = peft.get_peft_model(load(), LoraConfig(r=2, target_modules="all-linear"))
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 14
    assert not isinstance(model.get_output_embeddings(), peft.tuners.lora.LoraLayer)


def test_models_without_ternary_layers_are_left_to_peft(load):
    load()
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = peft.get_peft_model(plain, LoraConfig(r=2, target_modules=["0"]))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(name.split(".")[-3] for name in names) == ["lora_A", "lora_B"]
    model.merge_and_unload()


# Training


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_is_zero_at_the_start(architecture, load, tokens):
    model = load(architecture)
    before = logits_of(model, tokens)
    attach(model, lora(target_modules=linear_names(model)))
    assert torch.equal(logits_of(model, tokens), before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_changes_the_adapter_and_no_bit_of_the_base(architecture, load, tokens):
    model = load(architecture)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    logits = logits_of(model, tokens)
    attach(model, lora(target_modules=linear_names(model), lora_dropout=0.1))
    start = {name: value.clone() for name, value in adapter_state(model).items()}
    train(model, tokens)
    for name, value in adapter_state(model).items():
        assert not torch.equal(value, start[name]), f"{name} did not change"
    state = {name.replace(".base_layer.", "."): t for name, t in model.state_dict().items()}
    assert_equal({name: state[name] for name in base}, base)
    assert not torch.equal(logits_of(model, tokens), logits)
    set_adapter(model, None)
    assert torch.equal(logits_of(model, tokens), logits)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["off", "plain", "reentrant"])
def test_every_lora_b_moves_by_the_second_step(checkpointing, load, tokens):
    model = load("qwen2")
    attach(model, lora(target_modules=linear_names(model)))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    train(model, tokens, steps=2)
    state = adapter_state(model)
    outputs = {name: value for name, value in state.items() if name.endswith("lora_B")}
    assert len(outputs) == 14
    for name, value in outputs.items():
        assert bool((value != 0).any()), f"{name} stayed zero"


def test_checkpointing_without_input_gradients_trains_too(load, tokens):
    model = load()
    attach(model, lora())
    model.gradient_checkpointing_enable()
    train(model, tokens, steps=2)
    assert all(v.any() for n, v in adapter_state(model).items() if n.endswith("lora_B"))


def test_groups_hold_each_trainable_parameter_once(load):
    model = load("qwen3")
    attach(model, lora(modules_to_save=["embed_tokens", "lm_head"]))
    groups = trainable_groups(model)
    assert len(groups["lora"]) == 8
    assert len(groups["codebook"]) == 14
    assert len(groups["other"]) == 1
    everything = [p for parameters in groups.values() for p in parameters]
    assert {id(p) for p in everything} == {id(p) for p in model.parameters() if p.requires_grad}


def test_lora_on_some_layers_still_trains_all_codebooks(load, tokens, tmp_path):
    model = load()
    attach(model, lora(layers_to_transform=[1], target_modules=["q_proj"]))
    state = adapter_state(model)
    assert sum(name.endswith("lora_A") for name in state) == 1
    assert sum(name.endswith("residual_codebook") for name in state) == 14
    assert all(p.requires_grad for p in trainable_groups(model)["codebook"])
    assert len(trainable_groups(model)["codebook"]) == 14
    train(model, tokens)
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai")
    again = load()
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai")
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))


def test_excluded_modules_stay_excluded_when_reloaded(load, tokens, tmp_path):
    model = load()
    attach(model, lora(exclude_modules=r".*layers\.0\..*"))
    shake(model, "default")
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai")
    again = load()
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai")
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))


def test_codebooks_can_be_left_alone(load, tokens, tmp_path):
    model = load()
    attach(model, lora(codebooks=False))
    assert trainable_groups(model)["codebook"] == []
    assert not any("residual_codebook" in name for name in adapter_state(model))
    assert sum(isinstance(m, TernaryLora) for m in model.modules()) == 4
    train(model, tokens)
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai")
    again = load()
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai")
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))
    assert not any("lora_residual_codebook" in name for name, _ in again.named_parameters())


def test_a_base_without_residual_takes_lora_alone(load, tokens):
    model = load("llama", steps=("ptq1_0",))
    attach(model, lora())
    train(model, tokens)
    assert all("lora_" in name for name in adapter_state(model))


def test_ranks_and_alphas_by_pattern_count(load, tokens, tmp_path):
    model = load()
    config = lora(
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 6},
        alpha_pattern={"v_proj": 3},
    )
    attach(model, config)
    state = adapter_state(model)
    ranks = [
        state[f"model.layers.{i}.self_attn.{name}.lora_A"].shape[0]
        for i, name in ((0, "q_proj"), (0, "v_proj"), (1, "v_proj"))
    ]
    assert ranks == [2, 4, 6]
    layer = model.model.layers[1].self_attn.v_proj
    assert layer.scaling["default"] == 3 / 6
    train(model, tokens)
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai")
    again = load()
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai")
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))
    assert again.model.layers[1].self_attn.v_proj.scaling["default"] == 3 / 6


def test_masters_are_float32_whatever_the_model_is(load):
    model = load("llama").to(torch.bfloat16)
    attach(model, lora(target_modules=["q_proj", "lm_head"]))
    groups = trainable_groups(model)
    assert len(groups["lora"]) == 6
    assert {p.dtype for p in groups["lora"] + groups["codebook"]} == {torch.float32}


def test_dropout_is_off_in_evaluation_and_on_in_training(load, tokens):
    model = load()
    attach(model, lora(lora_dropout=0.5))
    shake(model, "default")
    assert not any(m.training for m in model.modules())
    assert torch.equal(logits_of(model, tokens), logits_of(model, tokens))
    model.train()
    assert not torch.equal(logits_of(model, tokens), logits_of(model, tokens))


# Swapping


def test_swapping_there_and_back_is_exact(load, tokens):
    model = load()
    base = logits_of(model, tokens)
    attach(model, lora(r=8, lora_alpha=16), "a")
    shake(model, "a", 1)
    a = logits_of(model, tokens)
    attach(
        model,
        lora(r=2, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "down_proj"]),
        "b",
    )
    shake(model, "b", 2)
    b = logits_of(model, tokens)
    assert len({tuple(t.flatten()[:8].tolist()) for t in (base, a, b)}) == 3
    for name, expected in [("a", a), ("b", b), (None, base), ("b", b), (None, base), ("a", a)]:
        set_adapter(model, name)
        assert torch.equal(logits_of(model, tokens), expected), name
    assert model.model.layers[0].self_attn.q_proj.scaling == {"a": 2.0, "b": 5 / 2**0.5}


def test_an_adapter_alone_equals_it_among_others(load, tokens):
    alone = load()
    attach(alone, lora(), "a")
    shake(alone, "a", 1)
    model = load()
    for index, name in enumerate(("c", "a", "ab", "a-b")):
        attach(model, lora(r=2 + index), name)
        shake(model, name, index)
    assert set(adapter_names(model)) == {"c", "a", "ab", "a-b"}
    detach(model, "c")
    set_adapter(model, "a")
    state = {name: value.clone() for name, value in adapter_state(model, "a").items()}
    detach(model, "a")
    attach(model, lora(r=3), "a")
    load_adapter_state(model, state, "a")
    expected = logits_of(model, tokens)
    detach(model, "ab")
    set_adapter(model, "a")
    assert torch.equal(logits_of(model, tokens), expected)
    assert_equal(adapter_state(model, "a"), state)


def test_detaching_the_last_adapter_gives_the_plain_model_back(load, tokens, tmp_path):
    model = load("qwen3")
    before = snapshot(model)
    logits = logits_of(model, tokens)
    attach(model, lora(modules_to_save=["embed_tokens", "lm_head"]), "a")
    shake(model, "a")
    with pytest.raises(ValueError, match="has adapters attached"):
        bonsai_ft.save_model(model, tmp_path / "m.bonsai")
    detach(model, "a")
    assert [name for name, _ in model.named_modules()] == before[0]
    assert_equal(dict(model.state_dict()), before[1])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits_of(model, tokens), logits)
    bonsai_ft.save_model(model, tmp_path / "m.bonsai")


def test_attaching_after_detaching_everything_can_be_switched_off(load, tokens):
    model = load()
    base = logits_of(model, tokens)
    for _ in range(2):
        attach(model, lora(), "a")
        shake(model, "a")
        set_adapter(model, None)
        assert torch.equal(logits_of(model, tokens), base)
        set_adapter(model, "a")
        assert not torch.equal(logits_of(model, tokens), base)
        detach(model, "a")
        assert torch.equal(logits_of(model, tokens), base)


def test_replacing_an_adapter_by_one_of_more_layers_can_be_switched_off(load, tokens):
    model = load()
    base = logits_of(model, tokens)
    attach(model, lora(codebooks=False, target_modules=["q_proj"]), "a")
    detach(model, "a")
    attach(model, lora(), "b")
    shake(model, "b")
    set_adapter(model, None)
    assert torch.equal(logits_of(model, tokens), base)


@pytest.mark.parametrize(
    "name", ["", "a.b", "a b", "__base__", "a/b", "\xe4", "a\n", "keys", "train"], ids=ascii
)
def test_names_that_cannot_be_are_refused(name, load):
    model = load()
    before = snapshot(model)
    with pytest.raises(ValueError, match="adapter name"):
        attach(model, lora(), name)
    assert_untouched(model, before)


def test_a_name_is_taken_once(load):
    model = load()
    attach(model, lora(), "a")
    before = snapshot(model)
    with pytest.raises(ValueError, match="'a' is attached already"):
        attach(model, lora(), "a")
    assert_untouched(model, before)


def test_an_unknown_name_is_refused_with_those_that_are_known(load):
    model = load()
    with pytest.raises(ValueError, match="no adapter named 'x'; attached: none"):
        set_adapter(model, "x")
    attach(model, lora(), "a")
    for function in (set_adapter, detach):
        with pytest.raises(ValueError, match="no adapter named 'x'; attached: a"):
            function(model, "x")


@pytest.mark.parametrize(
    "name", ["a", "lora_A", "default", "weight", "q_proj", "residual_codebook"]
)
def test_any_word_can_be_a_name(name, load, tokens, tmp_path):
    model = load()
    attach(model, lora(), name)
    shake(model, name)
    assert len(adapter_state(model, name)) == 8 + 14
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai", name)
    again = load()
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai", "other")
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_proj", "z_proj"]}, r"adapter\.target_modules.*'z_proj'.*q_proj"),
        ({"modules_to_save": ["head"]}, r"adapter\.modules_to_save.*'head'"),
        ({"target_modules": r".*\.nothing"}, "not found in the base model"),
        ({"layers_to_transform": [9]}, "not found in the base model"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' needs the float weight"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' needs the float weight"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["embed_tokens.weight"]}, "target_parameters"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication"),
        ({"rank_pattern": {"q_proj": 0}}, "`r` should be a positive integer"),
        ({"target_modules": ["input_layernorm"]}, "not supported"),
        ({"modules_to_save": ["mlp"]}, "'mlp' holds packed weights"),
        ({"modules_to_save": ["o_proj"]}, "'o_proj' holds packed weights"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("others", [0, 1], ids=["first", "second"])
def test_what_cannot_be_attached_leaves_the_model_alone(changes, message, others, load, tokens):
    model = load()
    if others:
        attach(model, lora(), "a")
        shake(model, "a")
    before, logits = snapshot(model), logits_of(model, tokens)
    with pytest.raises(ValueError, match=message):
        attach(model, lora(**changes), "new")
    assert_untouched(model, before)
    assert torch.equal(logits_of(model, tokens), logits)


def test_get_peft_model_refuses_what_the_base_cannot_do(load):
    for changes in ({"use_dora": True}, {"bias": "all"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            peft.get_peft_model(load("qwen2"), lora(**changes))


# Files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_reloaded_adapter_is_bit_equal(architecture, dtype, tiny_base, tokens, tmp_path):
    path = tiny_base(architecture)
    model = bonsai_ft.load_model(path, dtype=dtype)
    attach(model, lora(target_modules=linear_names(model), modules_to_save=["lm_head"]))
    train(model, tokens)
    expected = logits_of(model, tokens)
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai", provenance={"recipe": "test"})
    with open_bonsai(tmp_path / "a.bonsai") as file:
        assert file.kind == "adapter"
        assert file.fingerprint == model.bonsai.fingerprint
        assert file.config["provenance"] == {"recipe": "test"}
        assert not any(name.endswith(FROZEN) for name in file.names())
    again = bonsai_ft.load_model(path, dtype=dtype)
    base = logits_of(again, tokens)
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai", "poems")
    assert torch.equal(logits_of(again, tokens), expected)
    assert not any(p.requires_grad for n, p in again.named_parameters() if "poems" in n)
    set_adapter(again, None)
    assert torch.equal(logits_of(again, tokens), base)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_lora_beside_ternary_layers_reloads_bit_equal(target, tiny_base, tokens, tmp_path):
    path = tiny_base("llama")
    model = bonsai_ft.load_model(path, dtype=torch.bfloat16)
    attach(model, lora(target_modules=["q_proj", target]))
    train(model, tokens)
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai")
    again = bonsai_ft.load_model(path, dtype=torch.bfloat16)
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai")
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))


def test_a_loaded_adapter_can_train_on(load, tokens, tmp_path):
    model = load()
    attach(model, lora())
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai")
    again = load()
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai", trainable=True)
    assert len(trainable_groups(again)["lora"]) == 8
    assert len(trainable_groups(again)["codebook"]) == 14
    before = logits_of(again, tokens)
    train(again, tokens)
    assert not torch.equal(logits_of(again, tokens), before)


def test_an_adapter_of_another_base_is_refused_with_both_fingerprints(
    load, tiny_base, tokens, tmp_path
):
    other = load("llama", packing="base3")
    attach(other, lora())
    bonsai_ft.save_adapter(other, tmp_path / "a.bonsai")
    model = load("llama")
    attach(model, lora(), "mine")
    shake(model, "mine")
    before, logits = snapshot(model), logits_of(model, tokens)
    with pytest.raises(ValueError, match="was trained on another base") as error:
        bonsai_ft.load_adapter(model, tmp_path / "a.bonsai")
    assert other.bonsai.fingerprint in str(error.value)
    assert model.bonsai.fingerprint in str(error.value)
    assert str(tmp_path / "a.bonsai") in str(error.value)
    assert_untouched(model, before)
    assert torch.equal(logits_of(model, tokens), logits)


def test_a_base_whose_codebooks_were_trained_takes_the_same_adapters(load, tokens, tmp_path):
    model = load()
    attach(model, lora())
    shake(model, "default")
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai")
    base = load()
    with torch.no_grad():
        for name, p in base.named_parameters():
            if "residual_codebook" in name:
                p.mul_(1.1)
    bonsai_ft.save_model(base, tmp_path / "m.bonsai")
    again = bonsai_ft.load_model(tmp_path / "m.bonsai")
    bonsai_ft.load_adapter(again, tmp_path / "a.bonsai")
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))


def adapter_contents(path):
    with open_bonsai(path) as file:
        tensors = {name: file.tensor(name).clone() for name in file.names()}
        return copy.deepcopy(file.config), tensors, file.fingerprint


Q = "model.layers.0.self_attn.q_proj"


def drop(config, tensors):
    del tensors[f"{Q}.lora_B"]


def add(config, tensors):
    tensors["model.extra.lora_A"] = torch.zeros(2, 2)


def reshape(config, tensors):
    tensors[f"{Q}.lora_A"] = torch.zeros(3, 192)


def set_adapter_config(**values):
    return lambda config, tensors: config["adapter"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"q_proj\.lora_B is missing"),
        (add, r"model\.extra\.lora_A has no place"),
        (reshape, r"q_proj\.lora_A has shape \[3, 192\], the model needs \[4, 192\]"),
        (set_adapter_config(r="four"), "r"),
        (set_adapter_config(r=-1), "r"),
        (set_adapter_config(r=1 << 60), "r"),
        (set_adapter_config(lora_dropout="much"), r"bad\.bonsai"),
        (set_adapter_config(lora_alpha=None), r"bad\.bonsai"),
        (set_adapter_config(target_modules=["z_proj"]), "z_proj"),
        (set_adapter_config(target_modules=3), r"bad\.bonsai"),
        (set_adapter_config(rank_pattern=7), r"bad\.bonsai"),
        (lambda config, tensors: config["adapter"].pop("r"), "config.adapter"),
        (lambda config, tensors: config.pop("adapter"), "config.adapter"),
        (lambda config, tensors: config.update(adapter=None), "config.adapter"),
    ],
    ids=[
        "missing",
        "unexpected",
        "shape",
        "rank's type",
        "negative rank",
        "huge rank",
        "dropout",
        "alpha",
        "unknown target",
        "targets' type",
        "pattern's type",
        "no rank",
        "no adapter",
        "null adapter",
    ],
)
def test_a_wrong_file_is_named_and_leaves_no_adapter(change, message, load, tokens, tmp_path):
    source = load()
    attach(source, lora())
    bonsai_ft.save_adapter(source, tmp_path / "good.bonsai")
    config, tensors, fingerprint = adapter_contents(tmp_path / "good.bonsai")
    change(config, tensors)
    path = tmp_path / "bad.bonsai"
    write_bonsai(path, kind="adapter", config=config, tensors=tensors, fingerprint=fingerprint)
    model = load()
    attach(model, lora(), "mine")
    shake(model, "mine")
    before, logits = snapshot(model), logits_of(model, tokens)
    with pytest.raises(BonsaiFormatError, match=message) as error:
        bonsai_ft.load_adapter(model, path, "new")
    assert "bad.bonsai" in str(error.value)
    assert_untouched(model, before)
    # the adapter that was active still is
    assert torch.equal(logits_of(model, tokens), logits)
    bonsai_ft.load_adapter(model, tmp_path / "good.bonsai", "new")


def test_loading_under_a_taken_name_is_the_callers_mistake_and_not_the_files(load, tmp_path):
    model = load()
    attach(model, lora())
    bonsai_ft.save_adapter(model, tmp_path / "a.bonsai")
    before = snapshot(model)
    with pytest.raises(ValueError, match="'default' is attached already") as error:
        bonsai_ft.load_adapter(model, tmp_path / "a.bonsai")
    assert not isinstance(error.value, BonsaiFormatError)
    assert_untouched(model, before)


def test_a_model_is_no_adapter(load, tiny_base):
    model = load()
    before = snapshot(model)
    with pytest.raises(BonsaiFormatError, match="is a model, not an adapter"):
        bonsai_ft.load_adapter(model, tiny_base("llama"))
    assert_untouched(model, before)


def test_saving_an_unknown_adapter_is_refused(load, tmp_path):
    with pytest.raises(ValueError, match="no adapter named 'x'"):
        bonsai_ft.save_adapter(load(), tmp_path / "a.bonsai", "x")
    assert not (tmp_path / "a.bonsai").exists()


def test_saving_after_a_swap_keeps_each_adapters_rank_and_alpha(load, tokens, tmp_path):
    model = load()
    attach(model, lora(r=8, lora_alpha=16), "a")
    attach(model, lora(r=4, lora_alpha=3, use_rslora=True), "b")
    for seed, name in enumerate(("a", "b")):
        shake(model, name, seed)
    expected = {}
    for name in ("b", "a", "b"):
        set_adapter(model, name)
        expected[name] = logits_of(model, tokens)
    for name in ("a", "b"):
        bonsai_ft.save_adapter(model, tmp_path / f"{name}.bonsai", name)
    again = load()
    for name, rank in (("b", 4), ("a", 8)):
        config, tensors, _ = adapter_contents(tmp_path / f"{name}.bonsai")
        assert config["adapter"]["r"] == rank
        assert tensors[f"{Q}.lora_A"].shape[0] == rank
        bonsai_ft.load_adapter(again, tmp_path / f"{name}.bonsai", name)
        assert torch.equal(logits_of(again, tokens), expected[name])


# Several at once


@pytest.mark.parametrize("kind", ["peft", "plain"])
def test_rows_with_adapters_of_their_own_equal_single_runs(kind, load):
    tokens = torch.randint(0, 256, (4, 9))
    model = load()
    names = ["a", "__base__", "b", "a"]
    wrapped = peft.get_peft_model(model, lora(r=8), adapter_name="a")
    wrapped.add_adapter("b", lora(r=2, use_rslora=True, target_modules=["k_proj", "up_proj"]))
    for seed, name in enumerate(("a", "b")):
        shake(wrapped, name, seed)
    wrapped.eval()
    with torch.no_grad():
        if kind == "peft":
            mixed = wrapped(tokens, adapter_names=names).logits
        else:
            handles = [
                m.register_forward_pre_hook(
                    lambda m, args, kwargs: (args, kwargs | {"adapter_names": names}),
                    with_kwargs=True,
                )
                for m in model.modules()
                if isinstance(m, TernaryLora)
            ]
            mixed = model(tokens).logits
            for handle in handles:
                handle.remove()
    for row, name in enumerate(names):
        set_adapter(wrapped, None if name == "__base__" else name)
        single = logits_of(wrapped, tokens[row : row + 1])[0]
        assert_close(mixed[row], single, what=f"row {row}, {name}")
    set_adapter(wrapped, None)
    assert rms(mixed[0], logits_of(wrapped, tokens)[0]) > 0.01
    assert rms(mixed[2], logits_of(wrapped, tokens)[2]) > 0.01


def rms(one, other):
    return (one - other).square().mean().sqrt()


def test_a_mixed_batch_runs_under_autocast(load):
    model = load()
    attach(model, lora(), "a")
    shake(model, "a")
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 3, 192)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(x, adapter_names=["a", "__base__"])
        assert mixed.dtype == torch.bfloat16
        assert_close(mixed[0], layer(x)[0])
        assert_close(mixed[1], layer.base_layer(x)[1])


def test_a_mixed_batch_of_the_wrong_length_is_refused(load):
    model = load()
    attach(model, lora(), "a")
    layer = model.model.layers[0].self_attn.q_proj
    with pytest.raises(ValueError, match="adapter_names"):
        layer(torch.randn(2, 3, 192), adapter_names=["a"])


def test_several_active_adapters_add_their_changes(load, tokens):
    wrapped = peft.get_peft_model(load(), lora(r=8), adapter_name="a")
    wrapped.add_adapter("b", lora(r=2))
    for seed, name in enumerate(("a", "b")):
        shake(wrapped, name, seed)
    layer = wrapped.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, 192)
    deltas = {}
    with torch.no_grad():
        base = layer.base_layer(x)
        for name in ("a", "b"):
            wrapped.set_adapter(name)
            deltas[name] = layer(x) - base
        wrapped.base_model.set_adapter(["a", "b"])
        both = layer(x) - base
    # codebooks are rounded to float16 after they are added
    assert rms(both, deltas["a"] + deltas["b"]) < 2e-3 * rms(both, torch.zeros_like(both))


def test_merging_is_refused_and_leaves_the_adapter(load, tokens):
    model = load()
    wrapped = peft.get_peft_model(model, lora(target_modules=["q_proj", "lm_head"]))
    shake(wrapped, "default")
    expected = logits_of(wrapped, tokens)
    for merge in (wrapped.merge_adapter, wrapped.merge_and_unload):
        with pytest.raises(ValueError, match="cannot be merged into packed signs"):
            merge()
        assert torch.equal(logits_of(wrapped, tokens), expected)
    layer = next(m for m in wrapped.modules() if isinstance(m, TernaryLora))
    with pytest.raises(ValueError, match="cannot be merged into packed signs"):
        layer.merge()


def test_unloading_gives_the_base_back(load, tokens):
    model = load()
    before = logits_of(model, tokens)
    names = [name for name, _ in model.named_modules()]
    wrapped = peft.get_peft_model(model, lora())
    shake(wrapped, "default")
    base = wrapped.unload()
    assert torch.equal(logits_of(base, tokens), before)
    assert [name for name, _ in base.named_modules()] == names
    assert all(not isinstance(m, TernaryLora) for m in base.modules())


def test_pefts_own_switches_work(load, tokens):
    model = load()
    base = logits_of(model, tokens)
    wrapped = peft.get_peft_model(model, lora(), adapter_name="a")
    shake(wrapped, "a")
    a = logits_of(wrapped, tokens)
    assert not torch.equal(a, base)
    with wrapped.disable_adapter():
        assert torch.equal(logits_of(wrapped, tokens), base)
    assert torch.equal(logits_of(wrapped, tokens), a)
    wrapped.add_adapter("b", lora(r=2))
    assert torch.equal(logits_of(wrapped, tokens), a)
    wrapped.set_adapter("b")
    assert torch.equal(logits_of(wrapped, tokens), base)
    assert all(
        ".b." in n or n.endswith(".b") for n, p in wrapped.named_parameters() if p.requires_grad
    )
    wrapped.set_adapter("a")
    wrapped.delete_adapter("b")
    assert torch.equal(logits_of(wrapped, tokens), a)
    assert not any(n.endswith(".b") or ".b." in n for n, _ in wrapped.named_parameters())


def test_an_adapter_that_is_not_active_is_not_trainable(load):
    wrapped = peft.get_peft_model(load(), lora(), adapter_name="a")
    wrapped.add_adapter("b", lora(r=2))
    trainable = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert len(trainable) == 8 + 14
    assert not any(name.endswith(".b") or ".b." in name for name in trainable)


def test_a_deep_copy_is_equal_and_separate(load, tokens):
    model = load("qwen3")
    attach(model, lora(modules_to_save=["embed_tokens"]), "a")
    shake(model, "a")
    twin = copy.deepcopy(model)
    expected = logits_of(model, tokens)
    assert torch.equal(logits_of(twin, tokens), expected)
    set_adapter(twin, None)
    assert torch.equal(logits_of(model, tokens), expected)
    assert not torch.equal(logits_of(twin, tokens), expected)
    set_adapter(twin, "a")
    shake(twin, "a", 3)
    assert torch.equal(logits_of(model, tokens), expected)


def test_embedding_and_head_of_a_tied_model_stay_tied_in_every_adapter(load, tokens, tmp_path):
    model = load("qwen3")
    base = logits_of(model, tokens)
    expected = {}
    for name, saved in {"a": ["embed_tokens"], "b": ["lm_head"]}.items():
        attach(model, lora(modules_to_save=saved), name)
        train(model, tokens)
        assert torch.equal(
            model.get_input_embeddings().weight, model.get_output_embeddings().weight
        )
        expected[name] = logits_of(model, tokens)
        bonsai_ft.save_adapter(model, tmp_path / f"{name}.bonsai", name)
    for name in ("a", "b"):
        set_adapter(model, name)
        assert torch.equal(logits_of(model, tokens), expected[name]), name
        again = load("qwen3")
        bonsai_ft.load_adapter(again, tmp_path / f"{name}.bonsai", name)
        assert torch.equal(logits_of(again, tokens), expected[name]), name
    set_adapter(model, None)
    assert torch.equal(logits_of(model, tokens), base)


# For other tools


def test_the_peft_folder_loads_with_plain_peft_as_the_same_change(load, tokens, tmp_path):
    model = load("qwen2")
    config = lora(
        target_modules=["q_proj", "v_proj", "down_proj"],
        codebooks=False,
        use_rslora=True,
        rank_pattern={"v_proj": 2},
        alpha_pattern={"down_proj": 32},
    )
    attach(model, config, "a")
    shake(model, "a")
    assert save_peft(model, tmp_path / "peft", "a") == []
    record = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert record["peft_type"] == "LORA"
    set_adapter(model, None)
    plain = load("qwen2")
    twin = float_twin(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other = peft.PeftModel.from_pretrained(twin, tmp_path / "peft")
    base = logits_of(model, tokens)
    set_adapter(model, "a")
    assert rms(logits_of(model, tokens), base) > 0.01
    assert_close(logits_of(other, tokens), logits_of(model, tokens), what="logits")


def test_the_peft_folder_carries_lora_on_embeddings(load, tokens, tmp_path):
    model = load()
    attach(model, lora(target_modules=["q_proj", "embed_tokens"], codebooks=False))
    shake(model, "default")
    save_peft(model, tmp_path / "peft")
    other = peft.PeftModel.from_pretrained(float_twin(load()), tmp_path / "peft")
    assert_close(logits_of(other, tokens), logits_of(model, tokens), what="logits")


def test_the_peft_folder_says_what_it_leaves_out(load, tmp_path):
    model = load()
    attach(model, lora(modules_to_save=["lm_head"]))
    missing = save_peft(model, tmp_path / "peft")
    assert missing == ["the trained codebooks", "the trained modules lm_head"]
    record = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert record["modules_to_save"] is None


def test_the_layer_is_found_by_its_device(load):
    model = load()
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, TernaryLinear)
    assert layer.qweight is layer.ternary


def moved(model, name="default"):
    """The adapter's tensors set to something that matters."""
    with torch.no_grad():
        for key, value in adapter_state(model, name).items():
            value.add_(torch.randn_like(value) * 0.05, alpha=1.0 if "lora" in key else 10.0)


def test_an_adapter_saved_from_a_peft_model_loads_to_bit_equal_logits(tiny_base, tokens, tmp_path):
    path = tiny_base("llama")
    wrapped = peft.get_peft_model(
        bonsai_ft.load_model(path), peft.LoraConfig(r=4, target_modules=["q_proj"])
    )
    moved(wrapped.get_base_model())
    wrapped.eval()
    bonsai_ft.save_adapter(wrapped, tmp_path / "a.bonsai")
    fresh = bonsai_ft.load_model(path)
    bonsai_ft.load_adapter(fresh, tmp_path / "a.bonsai")
    with torch.no_grad():
        assert torch.equal(fresh(tokens).logits, wrapped(tokens).logits)


def test_an_adapter_combined_alone_at_weight_one_is_that_adapter(tiny_base, tokens):
    wrapped = peft.get_peft_model(
        bonsai_ft.load_model(tiny_base("llama")), peft.LoraConfig(r=4, target_modules=["q_proj"])
    )
    moved(wrapped.get_base_model())
    wrapped.eval()
    with torch.no_grad():
        expected = wrapped(tokens).logits
        wrapped.add_weighted_adapter(["default"], [1.0], "again", combination_type="linear")
        wrapped.set_adapter("again")
        assert_close(wrapped(tokens).logits, expected, what="logits")
