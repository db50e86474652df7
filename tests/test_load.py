"""Does a `.bonsai` file become the model it describes, and back, and is a wrong one refused?"""

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ARCHITECTURES, CHAT_TEMPLATE, assert_close, save_float_model
from torch import nn
from transformers import AutoModelForCausalLM

import bonsai_ft
from bonsai_ft.format import BonsaiFormatError, open_bonsai, write_bonsai
from bonsai_ft.format.weight import SUFFIXES
from bonsai_ft.model import TernaryLinear, decode_weight
from bonsai_ft.quantize.architecture import build_empty

TIED = ("qwen2", "qwen3")


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


def float_twin(model):
    """The same architecture in plain transformers, its linear layers holding decoded weights."""
    twin = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32)
    state = {}
    for name, value in model.state_dict().items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, TernaryLinear) or name.endswith(".bias"):
            state[name] = value
        elif name.endswith(".ternary"):
            state[name.replace(".ternary", ".weight")] = decode_weight(owner)
    twin.load_state_dict(state, strict=True)
    return twin.eval()


def contents(path):
    """Config and tensors of a file, to be changed and written again."""
    with open_bonsai(path) as file:
        return copy.deepcopy(file.config), {
            name: file.tensor(name).clone() for name in file.names()
        }


def rewrite(base, path, change):
    """A copy of a base after `change(config, tensors)`, with valid checksums."""
    config, tensors = contents(base)
    change(config, tensors)
    write_bonsai(path, kind="model", config=config, tensors=tensors)
    return path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_the_float_model_of_decoded_weights(architecture, tiny_base, tokens):
    model = bonsai_ft.load_model(tiny_base(architecture), dtype=torch.float32)
    assert not model.training
    assert sum(isinstance(m, TernaryLinear) for m in model.modules()) >= 14
    expected = logits_of(float_twin(model), tokens)
    assert expected.std() > 0.1
    assert_close(logits_of(model, tokens), expected, torch.float32, "logits")


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": "base3", "scale_group": "channel"},
        {"residual_dim": 8, "residual_k": 16},
        {"steps": ("ptq1_0",)},
        {"skip": (r"mlp\.down_proj",)},
    ],
    ids=["dense", "d=8", "no residual", "skip"],
)
def test_every_layout_loads(settings, tiny_base, tokens):
    model = bonsai_ft.load_model(tiny_base("llama", **settings), dtype=torch.float32)
    expected = logits_of(float_twin(model), tokens)
    assert_close(logits_of(model, tokens), expected, torch.float32, "logits")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_tied_is_tied_and_nothing_else(architecture, tiny_base):
    model = bonsai_ft.load_model(tiny_base(architecture))
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == (architecture in TIED)
    with open_bonsai(tiny_base(architecture)) as file:
        assert ("lm_head.weight" in file) != is_tied


def test_biases_are_loaded(tiny_base):
    path = tiny_base("qwen2")
    model = bonsai_ft.load_model(path)
    bias = model.model.layers[0].self_attn.q_proj.bias
    with open_bonsai(path) as file:
        assert torch.equal(bias, file.tensor("model.layers.0.self_attn.q_proj.bias"))
    assert bias.abs().max() > 0
    assert not bias.requires_grad


def test_codebooks_alone_are_trainable(tiny_base):
    model = bonsai_ft.load_model(tiny_base("qwen2"))
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trainable) == 14
    assert all(name.endswith(".residual_codebook") for name in trainable)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_generation_equals_the_float_model(architecture, tiny_base):
    path = tiny_base(architecture)
    model, tokenizer = bonsai_ft.load_model(path), bonsai_ft.load_tokenizer(path)
    prompt = tokenizer("A poem:", return_tensors="pt")
    settings = {"max_new_tokens": 8, "do_sample": False}
    generated = model.generate(**prompt, **settings)
    assert generated.shape[1] > prompt.input_ids.shape[1]
    assert torch.equal(generated, float_twin(model).generate(**prompt, **settings))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_checkpointing_gives_equal_gradients(architecture, tiny_base, tokens):
    model = bonsai_ft.load_model(tiny_base(architecture), dtype=torch.float32).train()

    def gradients():
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable()
    checkpointed = gradients()
    assert plain.keys() == checkpointed.keys()
    assert len(plain) >= 14
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, checkpointed[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_is_that_of_activations_and_never_of_packed_tensors(dtype, tiny_base, tokens):
    path = tiny_base("qwen2")
    model = bonsai_ft.load_model(path, dtype=dtype)
    assert model.dtype == dtype
    assert logits_of(model, tokens).dtype == dtype
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.bias.dtype == dtype
    assert layer.residual_codebook.dtype == torch.float32
    assert layer.scale.dtype == torch.float16
    expected = logits_of(bonsai_ft.load_model(path), tokens)
    assert (logits_of(model, tokens).float() - expected).abs().max() < 0.05 * expected.std() * 4


def test_the_dtype_of_the_file_is_the_default(tiny_base, tokens):
    path = tiny_base("llama", dtype=torch.bfloat16)
    assert bonsai_ft.load_model(path).dtype == torch.bfloat16
    assert bonsai_ft.load_model(path, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match="dtype=int is not a floating-point dtype"):
        bonsai_ft.load_model(path, dtype="int")
    with pytest.raises(ValueError, match=r"dtype=torch\.int8 is not a floating-point dtype"):
        bonsai_ft.load_model(path, dtype=torch.int8)


def test_a_dtype_may_be_a_name(tiny_base):
    assert bonsai_ft.load_model(tiny_base("llama"), dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("device_map", [None, "auto", "cpu", {"": "cpu"}], ids=str)
def test_every_way_to_name_the_cpu_works(device_map, tiny_base, tokens):
    model = bonsai_ft.load_model(tiny_base("llama"), device_map=device_map)
    assert logits_of(model, tokens).device.type == "cpu"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_model_loads_bit_equal_with_the_same_fingerprint(
    architecture, tiny_base, tokens, tmp_path
):
    path = tiny_base(architecture)
    model = bonsai_ft.load_model(path)
    fingerprint = bonsai_ft.save_model(model, tmp_path / "again.bonsai")
    assert fingerprint == model.bonsai.fingerprint
    again = bonsai_ft.load_model(tmp_path / "again.bonsai")
    assert again.bonsai.fingerprint == fingerprint
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))
    (_, tensors), (_, saved) = contents(path), contents(tmp_path / "again.bonsai")
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensors[name], saved[name]) for name in tensors)


def test_trained_codebooks_are_saved_and_leave_the_fingerprint_alone(tiny_base, tokens, tmp_path):
    model = bonsai_ft.load_model(tiny_base("llama"))
    before = logits_of(model, tokens)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "residual" in name:
                parameter.mul_(1.01)
    assert bonsai_ft.save_model(model, tmp_path / "m.bonsai") == model.bonsai.fingerprint
    again = logits_of(bonsai_ft.load_model(tmp_path / "m.bonsai"), tokens)
    assert torch.equal(again, logits_of(model, tokens))
    assert not torch.equal(again, before)


def test_a_model_loaded_in_another_dtype_is_saved_as_it_is(tiny_base, tokens, tmp_path):
    model = bonsai_ft.load_model(tiny_base("llama", dtype=torch.bfloat16), dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.001)
    bonsai_ft.save_model(model, tmp_path / "m.bonsai")
    again = bonsai_ft.load_model(tmp_path / "m.bonsai")
    assert again.dtype == torch.float32
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))


def test_a_model_from_elsewhere_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"did not come from bonsai_ft\.load_model"):
        bonsai_ft.save_model(nn.Linear(2, 2), tmp_path / "m.bonsai")


def test_the_tokenizer_travels_with_its_chat_template(tiny_base):
    tokenizer = bonsai_ft.load_tokenizer(tiny_base("llama"))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_a_missing_tokenizer_is_named(tiny_base, tmp_path):
    def drop(config, tensors):
        for name in [n for n in tensors if n.startswith("files/")]:
            del tensors[name]

    path = rewrite(tiny_base("llama"), tmp_path / "bare.bonsai", drop)
    bonsai_ft.load_model(path)
    with pytest.raises(BonsaiFormatError, match=r"bare\.bonsai.*no tokenizer inside"):
        bonsai_ft.load_tokenizer(path)


def test_the_generation_config_travels(tiny_base, tmp_path):
    stored = json.dumps({"temperature": 0.25, "do_sample": True, "eos_token_id": [257, 258]})

    def add(config, tensors):
        content = torch.frombuffer(bytearray(stored.encode()), dtype=torch.uint8)
        tensors["files/generation_config.json"] = content

    path = rewrite(tiny_base("llama"), tmp_path / "m.bonsai", add)
    generation = bonsai_ft.load_model(path).generation_config
    assert generation.temperature == 0.25
    assert generation.eos_token_id == [257, 258]


Q = "model.layers.0.self_attn.q_proj"


def set_shape(name, *shape):
    def change(config, tensors):
        tensors[name] = tensors[name].new_zeros(shape)

    return change


def drop_tensor(name):
    return lambda config, tensors: tensors.pop(name)


def add_tensor(name):
    return lambda config, tensors: tensors.update({name: torch.zeros(3)})


def rename_layer(config, tensors):
    layer = next(layer for layer in config["layers"] if layer["name"] == Q)
    layer["name"] = layer["name"].replace("q_proj", "z_proj")
    for name in [n for n in tensors if n.startswith(f"{Q}.")]:
        tensors[name.replace("q_proj", "z_proj")] = tensors.pop(name)


def shrink_layer(config, tensors):
    layer = next(layer for layer in config["layers"] if layer["name"] == Q)
    layer["out_features"] = 96
    for suffix in ("ternary", "scale", "codes"):
        tensors[f"{Q}.{suffix}"] = tensors[f"{Q}.{suffix}"][:96].clone()


def layer_on_a_norm(config, tensors):
    norm = "model.layers.0.input_layernorm"
    for suffix in ("ternary", "scale", "codes", "residual_codebook", "residual_mu"):
        tensors[f"{norm}.{suffix}"] = tensors[f"{Q}.{suffix}"].clone()
    tensors[f"{norm}.residual_sigma"] = tensors[f"{Q}.residual_sigma"].clone()
    layer = next(layer for layer in config["layers"] if layer["name"] == Q)
    config["layers"].append(layer | {"name": norm})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_tensor("model.norm.weight"), r"tensor model\.norm\.weight: missing"),
        (drop_tensor("model.embed_tokens.weight"), r"tensor model\.embed_tokens\.weight: missing"),
        (drop_tensor(f"{Q}.bias"), r"tensor .*q_proj\.bias: missing"),
        (add_tensor("model.extra.weight"), r"tensor model\.extra\.weight: the model has no place"),
        (add_tensor("lm_head.weight"), r"tensor lm_head\.weight: the model has no place"),
        (set_shape("model.norm.weight", 191), r"model\.norm\.weight: shape \[191\].*\[192\]"),
        (set_shape(f"{Q}.bias", 5), r"q_proj\.bias: shape \[5\].*\[192\]"),
        (rename_layer, r"tensor .*z_proj: Qwen2ForCausalLM has no such layer"),
        (shrink_layer, r"tensor .*q_proj: shape 96 x 192, but the config says 192 x 192"),
        (layer_on_a_norm, r"tensor .*input_layernorm: not a linear layer"),
    ],
    ids=[
        "missing norm",
        "missing embedding",
        "missing bias",
        "unexpected",
        "unexpected tied head",
        "norm's shape",
        "bias's shape",
        "unknown layer",
        "layer's shape",
        "layer of another kind",
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change, message, tiny_base, tmp_path):
    path = rewrite(tiny_base("qwen2"), tmp_path / "bad.bonsai", change)
    with pytest.raises(BonsaiFormatError, match=message) as error:
        bonsai_ft.load_model(path)
    assert "bad.bonsai" in str(error.value)


def set_config(**values):
    return lambda config, tensors: config.update(values)


def set_model(**values):
    return lambda config, tensors: config["model"].update(values)


@pytest.mark.parametrize(
    "change",
    [
        lambda config, tensors: config.pop("model"),
        set_config(model=3),
        set_config(dtype="softmax"),
        set_config(dtype="int8"),
        set_config(dtype=5),
        set_model(model_type="nosuch"),
        set_model(model_type=None),
        set_model(model_type="t5"),
        set_model(hidden_size="many"),
        set_model(hidden_size=-4),
        set_model(num_attention_heads=0),
        set_model(rope_parameters={"rope_type": "nosuch"}),
        set_model(num_hidden_layers=1_000_000_000),
        set_model(head_dim=1 << 50),
        set_model(hidden_act="nosuch"),
    ],
    ids=[
        "no model",
        "model's type",
        "unknown dtype",
        "integer dtype",
        "dtype's type",
        "unknown architecture",
        "no architecture",
        "encoder-decoder",
        "size's type",
        "negative size",
        "no heads",
        "unknown rope",
        "too many layers",
        "huge head",
        "unknown activation",
    ],
)
def test_a_config_that_makes_no_model_is_a_format_error(change, tiny_base, tmp_path):
    path = rewrite(tiny_base("llama"), tmp_path / "bad.bonsai", change)
    with pytest.raises(BonsaiFormatError, match=r"bad\.bonsai"):
        bonsai_ft.load_model(path)


def test_a_config_without_layers_is_a_format_error(tiny_base, tmp_path):
    def drop(config, tensors):
        config.pop("layers")
        for name in [n for n in tensors if "_proj." in n]:
            del tensors[name]

    path = rewrite(tiny_base("llama"), tmp_path / "bad.bonsai", drop)
    with pytest.raises(BonsaiFormatError, match=r"bad\.bonsai"):
        bonsai_ft.load_model(path)


def test_a_file_cannot_choose_code_to_run(tiny_base, tmp_path):
    change = set_model(
        _attn_implementation="somebody/kernel", attn_implementation="somebody/kernel"
    )
    path = rewrite(tiny_base("llama"), tmp_path / "m.bonsai", change)
    model = bonsai_ft.load_model(path)
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_an_adapter_is_no_model(tmp_path):
    path = tmp_path / "a.bonsai"
    write_bonsai(
        path,
        kind="adapter",
        config={},
        tensors={"m.lora_A": torch.zeros(2, 2)},
        fingerprint="0" * 64,
    )
    with pytest.raises(BonsaiFormatError, match=r"a\.bonsai is an adapter, not a model"):
        bonsai_ft.load_model(path)


def test_a_damaged_byte_is_found_unless_verification_is_off(tiny_base, tmp_path):
    content = bytearray(Path(tiny_base("llama")).read_bytes())
    with open_bonsai(tiny_base("llama")) as file:
        start = file._data_start + file._entry("model.norm.weight").begin
    content[start] ^= 1
    path = tmp_path / "bad.bonsai"
    path.write_bytes(content)
    with pytest.raises(BonsaiFormatError, match=r"model\.norm\.weight.*checksum"):
        bonsai_ft.load_model(path)
    bonsai_ft.load_model(path, verify=False)


def test_models_load_in_parallel_threads(tiny_base, tokens):
    paths = [tiny_base(a) for a in ("llama", "qwen2", "qwen3")]
    expected = [logits_of(bonsai_ft.load_model(path), tokens) for path in paths]
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            models = list(pool.map(bonsai_ft.load_model, paths * 4))
        for index, model in enumerate(models):
            left = [n for n, t in model.state_dict().items() if t.is_meta]
            assert not left
            assert torch.equal(logits_of(model, tokens), expected[index % 3])


def test_modules_made_in_another_thread_stay_real_while_a_model_is_built(monkeypatch):
    made = []

    def build(config, dtype):
        # while one thread is inside the construction of a model
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(3, 3)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build)
    empty = build_empty(None, torch.float32)
    assert empty.weight.is_meta
    assert not made[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_construction_failing_leaves_modules_real(monkeypatch):
    def build(config, dtype):
        raise ValueError("no")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build)
    with pytest.raises(ValueError, match="no"):
        build_empty(None, torch.float32)
    assert not nn.Linear(2, 2).weight.is_meta


def mappings_of(path):
    name = str(Path(path).resolve())
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == name:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            yield start, end


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_loading_maps_the_file_and_copies_no_packed_tensor(tiny_base):
    path = tiny_base("qwen3")
    model = bonsai_ft.load_model(path)
    mapped = list(mappings_of(path))
    assert mapped

    def is_mapped(tensor):
        return any(start <= tensor.data_ptr() < end for start, end in mapped)

    assert is_mapped(model.model.embed_tokens.weight)
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            assert is_mapped(module.ternary)
            assert is_mapped(module.scale)
            assert is_mapped(module.codes)


def test_copying_one_layer_copies_that_layer_and_not_the_file(tiny_base):
    path = tiny_base("llama")
    layer = bonsai_ft.load_model(path).model.layers[0].self_attn.q_proj
    whole = Path(path).stat().st_size
    twin = copy.deepcopy(layer)
    assert sum(t.untyped_storage().nbytes() for t in twin.state_dict().values()) < whole / 4
    assert len(pickle.dumps(twin)) < whole / 4


def test_the_file_may_be_replaced_or_removed_while_the_model_is_in_use(tiny_base, tokens, tmp_path):
    path = tmp_path / "m.bonsai"
    path.write_bytes(Path(tiny_base("llama")).read_bytes())
    model = bonsai_ft.load_model(path)
    bonsai_ft.save_model(model, path)
    path.unlink()
    expected = logits_of(bonsai_ft.load_model(tiny_base("llama")), tokens)
    assert torch.equal(logits_of(model, tokens), expected)


def test_a_deep_copy_of_a_model_is_equal_and_separate(tiny_base, tokens):
    model = bonsai_ft.load_model(tiny_base("qwen2"))
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, tokens), logits_of(model, tokens))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_proj.residual_codebook.zero_()
    assert not torch.equal(logits_of(twin, tokens), logits_of(model, tokens))


def test_a_model_moves_to_another_dtype_and_keeps_its_packed_tensors(tiny_base, tokens):
    path = tiny_base("qwen2")
    model = bonsai_ft.load_model(path).to(torch.bfloat16)
    assert model.dtype == logits_of(model, tokens).dtype == torch.bfloat16
    before = bonsai_ft.load_model(path).state_dict()
    for name, value in model.state_dict().items():
        if name.rpartition(".")[2] in SUFFIXES:
            stored = before[name]
            assert value.dtype == stored.dtype, name
            assert torch.equal(value, stored), name


def test_the_function_quantize_keeps_its_name(tmp_path):
    import bonsai_ft.quantize as package
    from bonsai_ft.quantize import QuantizeSettings, quantize

    assert callable(bonsai_ft.quantize)
    assert package.quantize is quantize
    with pytest.raises(ValueError, match="nowhere"):
        bonsai_ft.quantize("./nowhere", tmp_path / "m.bonsai", QuantizeSettings())


def test_a_bfloat16_source_keeps_its_plain_tensors(tmp_path):
    float_model = save_float_model(tmp_path / "f", "qwen3", dtype=torch.bfloat16)
    bonsai_ft.quantize(str(tmp_path / "f"), tmp_path / "m.bonsai", calibration=None)
    model = bonsai_ft.load_model(tmp_path / "m.bonsai")
    assert torch.equal(model.model.norm.weight, float_model.model.norm.weight)
    assert torch.equal(model.lm_head.weight, float_model.lm_head.weight)
