"""Does a model answer the same alone and in company, stop where it should, and stream its text?"""

import pytest
import torch
from conftest import ARCHITECTURES, byte_tokenizer

from bonsai_ft.adapter import TernaryLoraConfig, adapter_state, attach, set_adapter
from bonsai_ft.api import load_model
from bonsai_ft.generate import answer, check_sampling, pad_token_id
from bonsai_ft.model import load_tokenizer

STOP = 257
QUESTIONS = ["a", "春天来了，写一首诗。", "What is seven times eight? " * 4]


def ask(*questions: str):
    return [[{"role": "user", "content": question}] for question in questions]


@pytest.fixture
def load(tiny_base):
    """`load(architecture)`: a float32 model and its tokenizer."""

    def fresh(architecture="llama"):
        path = tiny_base(architecture)
        return load_model(path, dtype=torch.float32), load_tokenizer(path)

    return fresh


@pytest.fixture
def speak():
    """`speak(model, ids)`: from now on the model says these tokens, then the first one for ever."""

    def force(model, ids):
        steps = iter([*ids, *[ids[0]] * 1000])

        def replace(module, inputs, logits):
            forced = torch.zeros_like(logits)
            forced[:, -1, next(steps)] = 1.0
            return forced

        model.get_output_embeddings().register_forward_hook(replace)

    return force


def said(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# Together and alone


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_given_together_equal_answers_given_alone(architecture, load):
    model, tokenizer = load(architecture)
    together = answer(model, tokenizer, ask(*QUESTIONS), max_new_tokens=12)
    alone = [answer(model, tokenizer, ask(q), max_new_tokens=12)[0] for q in QUESTIONS]
    assert [a.text for a in together] == [a.text for a in alone]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    # the questions matter, so that equality says something
    assert len({a.text for a in alone}) == len(QUESTIONS)


def test_a_tokenizer_without_padding_token_answers_together_too(load):
    model, tokenizer = load()
    with_padding = answer(model, tokenizer, ask(*QUESTIONS), max_new_tokens=6)
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == STOP
    without = answer(model, tokenizer, ask(*QUESTIONS), max_new_tokens=6)
    assert [a.text for a in without] == [a.text for a in with_padding]


def test_an_adapter_answers_and_can_be_taken_away(load):
    model, tokenizer = load()
    plain = answer(model, tokenizer, ask(*QUESTIONS), max_new_tokens=8)
    attach(model, TernaryLoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for value in adapter_state(model).values():
            value.add_(0.3 * torch.randn_like(value))
    adapted = answer(model, tokenizer, ask(*QUESTIONS), max_new_tokens=8)
    assert [a.text for a in adapted] != [a.text for a in plain]
    [alone] = answer(model, tokenizer, ask(QUESTIONS[1]), max_new_tokens=8)
    assert alone.text == adapted[1].text
    set_adapter(model, None)
    again = answer(model, tokenizer, ask(*QUESTIONS), max_new_tokens=8)
    assert [a.text for a in again] == [a.text for a in plain]


# Stopping


def test_an_answer_ends_before_the_token_that_ends_a_turn(load, speak):
    model, tokenizer = load()
    speak(model, [*said(tokenizer, "yes"), STOP, *said(tokenizer, "more")])
    [one] = answer(model, tokenizer, ask("a"), max_new_tokens=50)
    # the stop token was generated, and is not text
    assert (one.text, one.tokens) == ("yes", 4)


def test_the_template_says_what_ends_an_answer(load, speak):
    model, tokenizer = load()
    tokenizer.eos_token = None
    other = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    speak(model, [*said(tokenizer, "ab"), end])
    [one] = answer(model, tokenizer, ask("a"), max_new_tokens=50, template=other)
    assert (one.text, one.tokens) == ("ab", 3)


def test_without_any_stop_token_an_answer_ends_at_its_limit(load, speak):
    model, tokenizer = load()
    tokenizer.eos_token = None
    speak(model, said(tokenizer, "abcdef"))
    plain = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    [one] = answer(model, tokenizer, ask("a"), max_new_tokens=5, template=plain)
    assert (one.text, one.tokens) == ("abcde", 5)


def test_one_answer_that_ends_early_does_not_end_the_others(load):
    model, tokenizer = load()
    free = answer(model, tokenizer, ask(*QUESTIONS), max_new_tokens=10)
    calls = []

    def stop_first(module, inputs, logits):
        calls.append(None)
        if len(calls) == 3:
            logits[0, -1, STOP] = 1e9
        return logits

    model.get_output_embeddings().register_forward_hook(stop_first)
    first, *others = answer(model, tokenizer, ask(*QUESTIONS), max_new_tokens=10)
    assert first.tokens == 3
    assert [a.text for a in others] == [a.text for a in free[1:]]
    assert all(a.tokens == 10 for a in others)


# Streaming


@pytest.mark.parametrize(
    "text",
    ["春风吹绿江南岸，细雨润物无声。", "One, two and three.", "mixed 春天 words\nand lines 🌱 end"],
    ids=["chinese", "english", "mixed"],
)
def test_streamed_pieces_are_the_text_and_whole_characters(text, load, speak):
    model, tokenizer = load()
    speak(model, [*said(tokenizer, text), STOP])
    pieces: list[str] = []
    [one] = answer(model, tokenizer, ask("a"), max_new_tokens=100, show=pieces.append)
    assert one.text == text
    assert "".join(pieces).strip() == text
    assert len(pieces) > 2
    assert not any("\ufffd" in piece for piece in pieces)


def test_what_is_streamed_is_what_is_returned(load):
    model, tokenizer = load()
    pieces: list[str] = []
    [streamed] = answer(model, tokenizer, ask("春"), max_new_tokens=20, show=pieces.append)
    [quiet] = answer(model, tokenizer, ask("春"), max_new_tokens=20)
    assert "".join(pieces).strip() == streamed.text == quiet.text


# Sampling


def test_a_seed_repeats_samples_and_another_does_not(load):
    model, tokenizer = load()

    def sample(seed):
        [one] = answer(
            model, tokenizer, ask("a"), max_new_tokens=20, temperature=1.0, top_p=0.95, seed=seed
        )
        return one.text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_temperature_zero_takes_the_likeliest_whatever_the_file_says(load):
    model, tokenizer = load()
    [plain] = answer(model, tokenizer, ask("a"), max_new_tokens=12, seed=1)
    # as published models have it
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0
    model.generation_config.top_k = 3
    [again] = answer(model, tokenizer, ask("a"), max_new_tokens=12, seed=2)
    assert again.text == plain.text


def test_a_small_temperature_or_top_p_is_greedy(load):
    model, tokenizer = load()
    [greedy] = answer(model, tokenizer, ask("a"), max_new_tokens=12)
    for settings in ({"temperature": 1e-4}, {"temperature": 1.0, "top_p": 1e-6}):
        [sampled] = answer(model, tokenizer, ask("a"), max_new_tokens=12, **settings)
        assert sampled.text == greedy.text, settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"temperature": -0.5}, "--temperature -0.5"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"temperature": float("inf")}, "--temperature inf"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 2**64}, "--seed"),
        ({"template": "chatmal"}, "chatmal"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_number_out_of_range_is_named(settings, named, load):
    with pytest.raises(ValueError, match=named):
        answer(*load(), ask("a"), **settings)


def test_numbers_can_be_checked_before_a_model_is_loaded():
    check_sampling(1, 0.0, 1.0)
    check_sampling(1, 2.0, 0.1, seed=2**63 - 1)
    with pytest.raises(ValueError, match="--top-p"):
        check_sampling(1, 0.0, 2.0)


def test_a_tokenizer_without_template_is_refused(load):
    model, tokenizer = load()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        answer(model, tokenizer, ask("a"))
    [one] = answer(model, tokenizer, ask("a"), max_new_tokens=2, template="chatml")
    assert one.tokens == 2


# What must stay as it was


@pytest.mark.parametrize("is_stopped", [False, True], ids=["finished", "stopped"])
def test_mode_and_threads_are_given_back(is_stopped, load):
    model, tokenizer = load()
    model.train()
    threads = torch.get_num_threads()

    def show(piece):
        if is_stopped:
            raise KeyboardInterrupt

    torch.set_num_threads(2)
    try:
        answer(model, tokenizer, ask("a"), max_new_tokens=20, show=show)
    except KeyboardInterrupt:
        assert is_stopped
    finally:
        left = torch.get_num_threads()
        torch.set_num_threads(threads)
    assert left == 2
    assert model.training


def test_an_answer_needs_no_gradient_and_leaves_none(load):
    model, tokenizer = load()
    attach(model, TernaryLoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    answer(model, tokenizer, ask("a"), max_new_tokens=2)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_speed_is_tokens_over_seconds(load):
    [one] = answer(*load(), ask("a"), max_new_tokens=3)
    assert one.tokens_per_second == pytest.approx(one.tokens / one.seconds)


def test_the_byte_tokenizer_has_the_stop_token_that_these_tests_name():
    assert byte_tokenizer().convert_tokens_to_ids("<|im_end|>") == STOP
