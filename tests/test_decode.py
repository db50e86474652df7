"""Does the compiled decoder say what transformers says, and step aside where it cannot?"""

import logging

import pytest
import torch
from conftest import assert_close
from transformers import AttentionInterface

from bonsai_ft import decode
from bonsai_ft.adapter import TernaryLoraConfig, adapter_state, attach, linear_names, set_adapter
from bonsai_ft.api import load_model
from bonsai_ft.decode import start_decoding
from bonsai_ft.generate import answer
from bonsai_ft.model import TernaryLinear, load_tokenizer
from bonsai_ft.ops.cpu_kernels import library

FAMILY = ["llama", "qwen2", "qwen3"]
STEPS = 12

pytestmark = pytest.mark.usefixtures("single_precision_everywhere")


@pytest.fixture
def single_precision_everywhere():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def load(tiny_base):
    def fresh(architecture="llama", dtype=torch.float32, **settings):
        return load_model(tiny_base(architecture, **settings), dtype=dtype).eval()

    return fresh


def prompts(*lengths, width=None):
    """Random prompts, padded on the left: ids and mask."""
    width = width or max(lengths)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 256, (len(lengths), width), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    return ids, mask


@torch.inference_mode()
def expected_logits(model, ids, mask, tokens):
    """What the model itself gives after the prompt and after each of `tokens` [B, steps]."""
    every = []
    for row in range(len(ids)):
        whole = torch.cat((ids[row][mask[row].bool()], tokens[row]))[None]
        logits = model(input_ids=whole, use_cache=False).logits[0].float()
        every.append(logits[-tokens.shape[1] - 1 :])
    return torch.stack(every, dim=1)


def check(model, ids, mask, *, steps=STEPS, dtype=None):
    decoding = start_decoding(model, ids, mask, steps + 1)
    assert decoding is not None
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (len(ids), steps), generator=generator)
    seen = [decoding.logits.clone()]
    seen += [decoding.step(tokens[:, step]).clone() for step in range(steps)]
    expected = expected_logits(model, ids, mask, tokens)
    for step, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        assert_close(ours, theirs, dtype or torch.float32, f"logits of step {step}")


def shake(model, **settings):
    attach(model, TernaryLoraConfig(r=4, lora_alpha=8, **settings))
    model.eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for value in adapter_state(model).values():
            value.add_(0.1 * torch.randn(value.shape, generator=generator))


@pytest.mark.parametrize("architecture", FAMILY)
def test_logits_equal_those_of_the_model(architecture, load):
    check(load(architecture), *prompts(9))


@pytest.mark.parametrize("architecture", FAMILY)
def test_sequences_of_different_lengths_go_side_by_side(architecture, load):
    check(load(architecture), *prompts(5, 1, 17, 9))


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_group": "channel"},
        {"packing": "base3"},
        {"residual_dim": 64},
        {"residual_dim": 16, "residual_k": 16},
    ],
    ids=str,
)
def test_every_layout_of_a_layer_decodes(settings, load):
    check(load("llama", **settings), *prompts(4, 6))


def test_a_base_without_residual_decodes(load):
    check(load("llama", steps=("ptq1_0",)), *prompts(5))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        },
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_embeddings_are_the_models_own(rope, load):
    check(load("llama", config={"rope_parameters": rope}), *prompts(40))


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_activations_are_the_configs(act, load):
    check(load("llama", config={"hidden_act": act}), *prompts(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_models_decode_within_rounding(dtype, load):
    """Against the same weights in float32: nearer to them than the model's own 16-bit pass."""
    model, exact = load("llama", dtype), load("llama", dtype).float()
    ids, mask = prompts(7, 12)
    decoding = start_decoding(model, ids, mask, 3)
    ours = decoding.step(ids[:, 0])
    tokens = ids[:, :1]
    truth = expected_logits(exact, ids, mask, tokens)[-1]
    theirs = expected_logits(model, ids, mask, tokens)[-1]
    assert (ours - truth).norm() <= 1.5 * (theirs - truth).norm()


def test_adapters_are_part_of_what_is_decoded(load):
    model = load("llama")
    ids, mask = prompts(6)
    plain = start_decoding(model, ids, mask, 2).step(ids[:, 0]).clone()
    shake(model, target_modules=linear_names(model))
    check(model, ids, mask)
    adapted = start_decoding(model, ids, mask, 2).step(ids[:, 0])
    assert not torch.allclose(adapted, plain)
    set_adapter(model, None)
    assert torch.equal(start_decoding(model, ids, mask, 2).step(ids[:, 0]), plain)


def test_two_adapters_at_once_add_their_changes(load):
    model = load("llama")
    attach(model, TernaryLoraConfig(r=2, target_modules=["q_proj"]), "one")
    attach(model, TernaryLoraConfig(r=3, target_modules=["q_proj", "down_proj"]), "two")
    model.eval()
    with torch.no_grad():
        for name in ("one", "two"):
            for value in adapter_state(model, name).values():
                value.add_(0.1 * torch.randn_like(value))
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer._active_adapter = ["one", "two"]
    check(model, *prompts(6))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_modules_saved_whole_are_decoded(architecture, load):
    model = load(architecture)
    shake(model, target_modules=["v_proj"], modules_to_save=["embed_tokens", "lm_head"])
    check(model, *prompts(6))


def test_any_number_of_threads_gives_the_same_bits(load):
    model = load("llama")
    ids, mask = prompts(6, 3)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            decoding = start_decoding(model, ids, mask, 4)
            results.append(torch.stack([decoding.step(ids[:, i]).clone() for i in range(3)]))
    finally:
        torch.set_num_threads(threads)
    # the prompt went through the model, whose own sums may depend on the threads
    assert_close(results[1], results[0], torch.float32)
    assert_close(results[2], results[0], torch.float32)


@pytest.mark.parametrize("name", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_decodes(name, load):
    functions = library().functions
    if functions.bonsai_choose_isa(name.encode()) is None:
        pytest.skip(f"this processor has no {name}")
    try:
        check(load("llama"), *prompts(5, 9))
    finally:
        functions.bonsai_choose_isa(b"auto")


def test_a_token_or_position_out_of_range_is_refused(load):
    model = load("llama")
    ids, mask = prompts(4)
    decoding = start_decoding(model, ids, mask, 2)
    with pytest.raises(ValueError, match="a token is outside"):
        decoding.step(torch.tensor([10**6]))
    with pytest.raises(ValueError, match="one int64 token per sequence"):
        decoding.step(torch.tensor([1, 2]))
    decoder = decoding._decoder
    with pytest.raises(ValueError, match="a position is outside"):
        decoder.step(torch.tensor([1]), torch.tensor([decoder.positions]))


# Stepping aside


def reason(model):
    return decode._reason_against(model)


def test_other_architectures_are_left_to_transformers(load):
    assert "not of the Llama family" in reason(load("qwen3_5"))


def test_a_module_with_hooks_is_left_to_transformers(load):
    model = load("llama")
    assert reason(model) is None
    handle = model.model.layers[1].register_forward_hook(lambda *args: None)
    assert reason(model) == "a module has hooks"
    handle.remove()
    model.model.norm.forward = model.model.norm.forward
    assert reason(model) == "a module has hooks"


def test_windows_dynamic_rotation_and_unknown_activations_are_left_to_transformers(load):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "rotary" in reason(load("llama", config={"rope_parameters": rope}))
    assert "activation" in reason(load("llama", config={"hidden_act": "relu"}))
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert "not full" in reason(load("qwen2", config=windows))


def test_kernel_reference_means_reference(load):
    model = load("llama")
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            module.kernel = "reference"
    assert reason(model) == "the compiled kernels are not in use"


def test_lora_on_the_head_is_left_to_transformers(load):
    model = load("llama")
    shake(model, target_modules=["q_proj", "lm_head"])
    assert "embedding or head" in reason(model)


def test_a_model_that_computes_something_else_is_noticed(load, caplog):
    """Attention replaced from outside, which no attribute of the model tells."""
    model = load("llama")

    def first_value_only(module, query, key, value, attention_mask, **kwargs):
        repeated = value[:, :, :1].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return repeated.expand_as(query).transpose(1, 2).contiguous(), None

    AttentionInterface.register("first_value_only", first_value_only)
    model.config._attn_implementation = "first_value_only"
    with caplog.at_level(logging.WARNING, logger="bonsai_ft.decode"):
        assert start_decoding(model, *prompts(8), 4) is None
    assert "differ by" in caplog.text


# Through generate


@pytest.mark.parametrize("architecture", FAMILY)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_equal_those_that_transformers_generates(
    architecture, temperature, load, tiny_base, monkeypatch
):
    model = load(architecture)
    model.generation_config.repetition_penalty = 1.3
    tokenizer = load_tokenizer(tiny_base(architecture))
    questions = [[{"role": "user", "content": text}] for text in ("a", "春天来了", "seven")]
    # sooner or later a draw or a tie falls to the other side: float32 sums in another order
    count = 6 if temperature else 12
    settings = {"max_new_tokens": count, "temperature": temperature, "top_p": 0.8, "seed": 5}
    ours = answer(model, tokenizer, questions, **settings)
    monkeypatch.setattr("bonsai_ft.generate.start_decoding", lambda *args: None)
    theirs = answer(model, tokenizer, questions, **settings)
    assert [a.text for a in ours] == [a.text for a in theirs]
    assert [a.tokens for a in ours] == [a.tokens for a in theirs]


def test_an_answer_stops_and_streams_as_transformers_does(load, tiny_base, monkeypatch):
    model, tokenizer = load("llama"), load_tokenizer(tiny_base("llama"))
    question = [[{"role": "user", "content": "春天"}]]
    [free] = answer(model, tokenizer, question, max_new_tokens=8)
    fifth = tokenizer(free.text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr("bonsai_ft.generate.stop_token_ids", lambda *args: [fifth[-1]])
    pieces: list[str] = []
    [ours] = answer(model, tokenizer, question, max_new_tokens=8, show=pieces.append)
    assert "".join(pieces).strip() == ours.text
    monkeypatch.setattr("bonsai_ft.generate.start_decoding", lambda *args: None)
    [theirs] = answer(model, tokenizer, question, max_new_tokens=8)
    assert (ours.text, ours.tokens) == (theirs.text, theirs.tokens)
    assert ours.tokens <= free.tokens


def test_a_generation_config_that_asks_for_more_is_left_to_transformers(load, tiny_base, caplog):
    model, tokenizer = load("llama"), load_tokenizer(tiny_base("llama"))
    model.generation_config.no_repeat_ngram_size = 2
    with caplog.at_level(logging.INFO, logger="bonsai_ft.generate"):
        answer(model, tokenizer, [[{"role": "user", "content": "a"}]], max_new_tokens=3)
    assert "no_repeat_ngram_size" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_of_torch_does_not_matter(dtype, load):
    model = load()
    torch.set_default_dtype(dtype)
    try:
        check(model, *prompts(5))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("architecture", FAMILY)
def test_an_answer_longer_than_its_room_goes_on_exactly(architecture, load, monkeypatch):
    monkeypatch.setattr(decode, "FIRST_TOKENS", 2)
    check(load(architecture), *prompts(3, 5))


def test_an_answer_that_may_be_endless_takes_room_for_its_start_alone(load):
    decoding = start_decoding(load(), *prompts(5), 10**12)
    assert decoding._decoder.positions == 5 + decode.FIRST_TOKENS


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4, dtype=torch.long)),
        (torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)),
        (torch.ones(1, 4, dtype=torch.int32), torch.ones(1, 4, dtype=torch.int32)),
        (torch.ones(2, 4, dtype=torch.long), torch.tensor([[1] * 4, [0] * 4])),
    ],
    ids=["no row", "no token", "32 bits", "a row without tokens"],
)
def test_prompts_that_are_none_are_left_to_transformers(ids, mask, load):
    assert start_decoding(load(), ids, mask, 4) is None
