"""The mask covers exactly what the assistant says, stop token included, under every template."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from bonsai_ft.data.chat import (
    CHATML,
    encode_prompt,
    encode_rows,
    marked_sample,
    resolve_template,
    stop_token_ids,
)
from bonsai_ft.data.sources import Row

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('no system role here') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Like Qwen3: the answer after the last question gets a thinking block, earlier ones lose theirs.
THINKING = (
    "{% set last = namespace(user=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}{% set content = content.split('</think>')[-1] %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > last.user %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ content.lstrip('\n') + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{%- generation -%}{{ message['content'] }}{{ '<|im_end|>' }}{%- endgeneration -%}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_STOP = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Answer: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Question: ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"
)
ONE_TURN = [
    {"role": "user", "content": "How are you? \u4f60\u597d"},
    {"role": "assistant", "content": "I am fine.\nYou? \u597d"},
]
TWO_TURNS = [
    *ONE_TURN,
    {"role": "user", "content": "Bye."},
    {"role": "assistant", "content": "See you"},
]


def build_tokenizer(template: str | None = None, **settings) -> PreTrainedTokenizerFast:
    trim_offsets = settings.pop("trim_offsets", True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=settings.pop("special", SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "How are you? I am fine. You? See you Answer: fine\n\n :( user assistant system\n"
    tokenizer.train_from_iterator([text] * 20, trainer)
    # As many published tokenizers do: without add_special_tokens=False, a bos is put in front.
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
        ]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = template
    return wrapped


class LetterTokenizer(PreTrainedTokenizer):
    """One token per letter, written in Python, so that it does not know where tokens stand."""

    def __init__(self, **settings):
        self.letters = {}
        super().__init__(bos_token="<s>", eos_token="<|im_end|>", **settings)

    @property
    def vocab_size(self):
        return 0x10000

    def get_vocab(self):
        return dict(self.added_tokens_encoder)

    def _tokenize(self, text, **settings):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def rows_of(*conversations) -> list[Row]:
    return [Row(messages, line, "rows.jsonl") for line, messages in enumerate(conversations, 1)]


def trained(example, tokenizer) -> list[str]:
    """The text of every stretch of targets."""
    pieces = marked_sample(example, tokenizer).split("\u27e6")[1:]
    return [piece.split("\u27e7")[0] for piece in pieces]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["I am fine.\nYou? \u597d<|im_end|>", "See you<|im_end|>"]),
        (SMOLLM2, ["I am fine.\nYou? \u597d<|im_end|>", "See you<|im_end|>"]),
        (LLAMA2, [" I am fine.\nYou? \u597d </s>", " See you </s>"]),
        (GENERATION, ["I am fine.\nYou? \u597d<|im_end|>", "See you<|im_end|>"]),
    ],
    ids=["chatml", "smollm2", "llama2", "generation"],
)
@pytest.mark.parametrize("trim_offsets", [True, False])
def test_every_answer_is_trained_with_its_stop_token_and_nothing_else(
    template, expected, trim_offsets
):
    tokenizer = build_tokenizer(template, trim_offsets=trim_offsets)
    (one, two), report = encode_rows(rows_of(ONE_TURN, TWO_TURNS), tokenizer, sequence_length=512)
    assert trained(one, tokenizer) == expected[:1]
    assert trained(two, tokenizer) == expected
    text = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert two.input_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(two.labels_mask) == len(two.input_ids)
    assert (report.targets, report.stopped_targets) == (3, 3)
    assert report.turns_left_out == []


@pytest.mark.parametrize("template", [CHATML, SMOLLM2, LLAMA2, GENERATION, THINKING, NO_STOP])
def test_the_prompt_of_generation_is_what_stands_before_the_target(template):
    tokenizer = build_tokenizer(template)
    (example,), _ = encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    prompt = encode_prompt(ONE_TURN[:1], tokenizer)
    text = tokenizer.decode(example.input_ids[: example.labels_mask.index(True)])
    assert text.rstrip(" ") == tokenizer.decode(prompt).rstrip(" ")


def test_the_default_system_prompt_of_a_template_is_not_trained():
    tokenizer = build_tokenizer(SMOLLM2)
    (example,), _ = encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    assert marked_sample(example, tokenizer) == (
        "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
        "<|im_start|>user\nHow are you? \u4f60\u597d<|im_end|>\n"
        "<|im_start|>assistant\n\u27e6I am fine.\nYou? \u597d<|im_end|>\u27e7\n"
    )


def test_a_generation_block_without_the_stop_token_is_extended_by_it():
    template = GENERATION.replace(
        "{{ '<|im_end|>' }}{%- endgeneration -%}", "{%- endgeneration -%}{{ '<|im_end|>' }}"
    )
    tokenizer = build_tokenizer(template)
    (example,), report = encode_rows(rows_of(TWO_TURNS), tokenizer, sequence_length=512)
    assert trained(example, tokenizer)[1] == "See you<|im_end|>"
    assert report.stopped_targets == 2


def test_a_stop_token_written_only_between_turns_is_trained_there_too():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A ' + m.content }}"
        "{% if not loop.last %}{{ eos_token }}{% endif %}{% else %}{{ 'Q ' + m.content + '\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A ' }}{% endif %}"
    )
    tokenizer = build_tokenizer(template)
    (example,), report = encode_rows(rows_of(TWO_TURNS), tokenizer, sequence_length=512)
    assert [text.strip() for text in trained(example, tokenizer)] == [
        "I am fine.\nYou? \u597d</s>",
        "See you</s>",
    ]
    assert report.stopped_targets == 2


def test_eos_is_written_after_an_answer_to_which_the_template_gives_no_stop_token():
    tokenizer = build_tokenizer(NO_STOP)
    (example,), report = encode_rows(rows_of(TWO_TURNS), tokenizer, sequence_length=512)
    text = marked_sample(example, tokenizer)
    assert text.replace("\u27e6 ", " \u27e6") == (
        "Question: How are you? \u4f60\u597d\nAnswer: \u27e6I am fine.\nYou? \u597d</s>\u27e7\n"
        "Question: Bye.\nAnswer: \u27e6See you</s>\u27e7\n"
    )
    assert "targets that end with a stop token: 2 of 2" in report.lines()


def test_without_any_stop_token_the_report_says_so():
    tokenizer = build_tokenizer(NO_STOP, eos_token=None)
    _, report = encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    assert "targets that end with a stop token: 0 of 1" in report.lines()


def test_a_token_that_merges_prompt_and_answer_is_not_a_target():
    template = NO_STOP.replace("Answer: ", "Answer :")
    messages = [ONE_TURN[0], {"role": "assistant", "content": "( you"}]
    for trim_offsets in (True, False):
        tokenizer = build_tokenizer(template, trim_offsets=trim_offsets)
        (example,), _ = encode_rows(rows_of(messages), tokenizer, sequence_length=512)
        assert trained(example, tokenizer) == [" you</s>"]


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
def test_at_most_one_bos_starts_a_row(template):
    tokenizer = build_tokenizer(template)
    bos = tokenizer.bos_token_id
    (example,), _ = encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    assert example.input_ids.count(bos) <= 1
    assert encode_prompt(ONE_TURN[:1], tokenizer).count(bos) <= 1


def test_a_template_that_writes_bos_twice_is_put_right():
    tokenizer = build_tokenizer("{{ bos_token + bos_token }}" + CHATML)
    (example,), _ = encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    assert example.input_ids.count(tokenizer.bos_token_id) == 1
    assert trained(example, tokenizer) == ["I am fine.\nYou? \u597d<|im_end|>"]
    assert encode_prompt(ONE_TURN[:1], tokenizer)[:2].count(tokenizer.bos_token_id) == 1


def test_a_special_token_that_swallows_white_space_is_still_a_target():
    from transformers import AddedToken

    tokenizer = build_tokenizer(CHATML)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|im_end|>", rstrip=True, special=True)]}
    )
    (example,), report = encode_rows(rows_of(TWO_TURNS), tokenizer, sequence_length=512)
    assert trained(example, tokenizer)[1] == "See you<|im_end|>"
    assert report.stopped_targets == 2


def test_a_turn_that_the_template_writes_differently_later_is_left_out_and_reported():
    tokenizer = build_tokenizer(THINKING)
    rows = rows_of(ONE_TURN, TWO_TURNS)
    (one, two), report = encode_rows(rows, tokenizer, sequence_length=512)
    assert trained(one, tokenizer) == ["<think>\n\n</think>\n\nI am fine.\nYou? \u597d<|im_end|>"]
    assert trained(two, tokenizer) == ["<think>\n\n</think>\n\nSee you<|im_end|>"]
    assert report.turns_left_out == [2]
    assert [line for line in report.lines() if "answers not trained: 1" in line]


def test_a_template_whose_prompt_does_not_begin_the_answer_is_an_error_naming_the_row():
    template = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    with pytest.raises(ValueError, match="does not begin the finished conversation") as error:
        encode_rows(rows_of(ONE_TURN), build_tokenizer(template), sequence_length=512)
    assert str(error.value).startswith("rows.jsonl:1: ")
    assert "<|im_start|>user\nHow are you?" in str(error.value)


def test_a_template_that_refuses_a_system_message_is_an_error_naming_the_row():
    rows = rows_of(ONE_TURN, [{"role": "system", "content": "Be brief."}, *ONE_TURN])
    tokenizer = build_tokenizer(LLAMA2)
    with pytest.raises(ValueError, match="no system role here") as error:
        encode_rows(rows, tokenizer, sequence_length=512)
    assert str(error.value).startswith("rows.jsonl:2: the chat template refuses")
    assert "move the system message into the first user message" in str(error.value)
    with pytest.raises(ValueError, match="no system role here"):
        encode_prompt(rows[1].messages[:2], tokenizer)


def test_a_tokenizer_without_a_template_says_what_to_set():
    tokenizer = build_tokenizer(None)
    with pytest.raises(ValueError, match=r"no chat template.*set data\.template=chatml"):
        encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    (example,), _ = encode_rows(
        rows_of(ONE_TURN), tokenizer, sequence_length=512, chat_template="chatml"
    )
    assert trained(example, tokenizer) == ["I am fine.\nYou? \u597d<|im_end|>"]


def test_a_template_is_taken_by_name_or_as_text_and_nothing_else():
    tokenizer = build_tokenizer(CHATML)
    assert resolve_template(tokenizer, LLAMA2) == LLAMA2
    with pytest.raises(ValueError, match=r"data\.template=alpaca is unknown; allowed: chatml"):
        resolve_template(tokenizer, "alpaca")
    with pytest.raises(ValueError, match=r"needs the token <\|im_start\|> and <\|im_end\|>"):
        resolve_template(build_tokenizer(special=SPECIAL[:3]), "chatml")


def test_a_template_that_leaves_out_the_answer_stops_before_training():
    template = "{% for message in messages %}{{ '[' + message.role + ']' }}{% endfor %}"
    with pytest.raises(ValueError, match="leaves out what the assistant says") as error:
        encode_rows(rows_of(ONE_TURN), build_tokenizer(template), sequence_length=512)
    assert str(error.value).endswith("\n[user][assistant]")


def test_a_template_that_marks_no_answer_stops_before_training_and_shows_the_row():
    tokenizer = build_tokenizer("{% generation %}{% endgeneration %}" + CHATML)
    with pytest.raises(ValueError, match="leaves anything to train on") as error:
        encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    assert str(error.value).startswith("rows.jsonl: none of 1 row leaves")
    assert "no assistant tokens left by the chat template (line 1)" in str(error.value)
    assert "the row of line 1 is written as\n<|im_start|>user\nHow are you?" in str(error.value)


def test_long_rows_are_cut_or_dropped_and_counted():
    tokenizer = build_tokenizer(CHATML)
    long = "a" * 5000
    rows = rows_of(
        ONE_TURN,
        [{"role": "user", "content": long}, ONE_TURN[1]],
        [ONE_TURN[0], {"role": "assistant", "content": long}],
        [*ONE_TURN, {"role": "user", "content": long}, ONE_TURN[1]],
    )
    examples, report = encode_rows(rows, tokenizer, sequence_length=512)
    assert [example.line for example in examples] == [1, 3, 4]
    assert [len(example.input_ids) for example in examples[1:]] == [512, 512]
    assert all(any(example.labels_mask) for example in examples)
    assert report.dropped == {"prompt longer than data.sequence_length=512": [2]}
    assert report.answers_cut == [3, 4]
    assert (report.kept, report.targets, report.stopped_targets) == (3, 3, 2)
    assert report.longest > 5000
    assert report.tokens == sum(len(example.input_ids) for example in examples)
    assert report.trained_tokens == sum(sum(example.labels_mask) for example in examples)
    lines = report.lines()
    assert lines[1] == "dropped 1 row: prompt longer than data.sequence_length=512 (line 2)"
    assert lines[2] == "answers cut: 2 at data.sequence_length=512 (lines 3, 4)"


def test_losing_only_what_follows_the_stop_token_is_no_cut():
    tokenizer = build_tokenizer(CHATML)
    (whole,), _ = encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    length = len(whole.input_ids) - 1
    (example,), report = encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=length)
    assert example.input_ids == whole.input_ids[:-1]
    assert report.answers_cut == []
    assert report.stopped_targets == 1


def test_rows_that_are_all_too_long_are_an_error_with_the_table():
    with pytest.raises(ValueError, match="leaves anything to train on") as error:
        encode_rows(rows_of(ONE_TURN), build_tokenizer(CHATML), sequence_length=4)
    assert "dropped 1 row: prompt longer than data.sequence_length=4 (line 1)" in str(error.value)
    with pytest.raises(ValueError, match=r"data\.sequence_length=1 must be"):
        encode_rows(rows_of(ONE_TURN), build_tokenizer(CHATML), sequence_length=1)
    with pytest.raises(ValueError, match="no rows to encode"):
        encode_rows([], build_tokenizer(CHATML), sequence_length=8)


def test_rows_without_an_answer_are_dropped_and_what_follows_the_last_one_is_left_out():
    tokenizer = build_tokenizer(CHATML)
    rows = rows_of(ONE_TURN[:1], TWO_TURNS[:3])
    (example,), report = encode_rows(rows, tokenizer, sequence_length=512)
    (expected,), _ = encode_rows(rows_of(ONE_TURN), tokenizer, sequence_length=512)
    assert example.input_ids == expected.input_ids
    assert report.dropped == {"no assistant turn": [1]}


@pytest.mark.parametrize("template", [CHATML, SMOLLM2, LLAMA2, GENERATION, NO_STOP])
def test_a_tokenizer_that_does_not_say_where_tokens_stand_gives_the_same_targets(template):
    tokenizer = LetterTokenizer(additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = template
    assert not tokenizer.is_fast
    (example,), report = encode_rows(rows_of(TWO_TURNS), tokenizer, sequence_length=512)
    first, second = trained(example, tokenizer)
    assert first.replace(" ", "") == "Iamfine.\nYou?\u597d<|im_end|>"
    assert second.replace(" ", "") == "Seeyou<|im_end|>"
    assert report.stopped_targets == 2


def test_the_stop_tokens_of_generation_are_those_of_the_template_and_eos():
    tokenizer = build_tokenizer(CHATML)
    expected = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    assert stop_token_ids(tokenizer) == expected
    assert stop_token_ids(build_tokenizer(LLAMA2)) == expected[1:]
    assert stop_token_ids(build_tokenizer(None), "chatml") == expected
