"""Which tokens is a conversation made of, and which of them does the model learn to say?

The tokenizer's chat template is the only judge. Where it marks the assistant's part itself
(`{% generation %}`), that is taken. Otherwise, for the assistant turn i,

    prompt_i = template(messages before i, and the prompt for an answer)
    done_i   = template(messages up to and including i)

and if prompt_i begins done_i, and done_i begins the whole text, the answer is what done_i has
beyond prompt_i, up to its stop token. These are places in the text; the text is then tokenised
once, so that tokens which merge across a border are seen as what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

import jinja2

from bonsai_ft.data.sources import Message, Row, count_rows, dropped_lines, list_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ROWS_AT_ONCE = 256

Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """One row as the model sees it; labels_mask[i] says that token i is a target."""

    input_ids: list[int]
    labels_mask: list[bool]
    line: int
    source: str


@dataclass
class EncodeReport:
    """What became of the rows; `longest` counts tokens before anything was cut."""

    sequence_length: int
    kept: int = 0
    dropped: dict[str, list[int]] = field(default_factory=dict)
    answers_cut: list[int] = field(default_factory=list)
    turns_left_out: list[int] = field(default_factory=list)
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    targets: int = 0
    stopped_targets: int = 0

    def lines(self) -> list[str]:
        encoded = (
            f"encoded {count_rows(self.kept)}: {self.tokens} tokens, "
            f"{self.trained_tokens} of them trained; longest row {self.longest} tokens"
        )
        lines = [encoded, *dropped_lines(self.dropped)]
        if self.answers_cut:
            lines.append(
                f"answers cut: {len(self.answers_cut)} at "
                f"data.sequence_length={self.sequence_length} ({list_lines(self.answers_cut)})"
            )
        if self.turns_left_out:
            lines.append(
                f"answers not trained: {len(self.turns_left_out)}, because the chat template "
                "writes them differently once another turn follows, or merges them with what "
                f"stands around them ({list_lines(self.turns_left_out)})"
            )
        lines.append(
            f"targets that end with a stop token: {self.stopped_targets} of {self.targets}"
        )
        return lines


@dataclass(frozen=True)
class _Chat:
    """A tokenizer, its template, and the tokens that end a turn."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    stops: tuple[str, ...]

    @property
    def marks_generation(self) -> bool:
        return self.tokenizer.is_fast and _GENERATION.search(self.template) is not None

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return _render(self.tokenizer, self.template, messages, prompt)


@dataclass(frozen=True)
class _Marked:
    """A rendered conversation and where in it the answers stand."""

    text: str
    spans: list[Span]
    num_answers: int


def encode_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    chat_template: str | None = None,
) -> tuple[list[Example], EncodeReport]:
    """Token ids and targets of every row, and what was dropped or cut.

    A row whose prompt leaves no room for an answer is dropped. One that is longer than
    `sequence_length` for its answers is cut at the end.
    """
    if sequence_length < 2:
        raise ValueError(f"data.sequence_length={sequence_length} must be at least 2")
    chat = _open_chat(tokenizer, chat_template)
    stop_ids = set(_ids(tokenizer, chat.stops))
    report = EncodeReport(sequence_length=sequence_length)
    examples: list[Example] = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        batch = rows[start : start + _ROWS_AT_ONCE]
        marked = [_mark_row(chat, row) for row in batch]
        for row, mark, (ids, mask) in zip(batch, marked, _tokenize(chat, marked), strict=True):
            report.longest = max(report.longest, len(ids))
            reason = _reason_to_drop(row, mask, sequence_length)
            if reason:
                report.dropped.setdefault(reason, []).append(row.line)
                continue
            report.turns_left_out += [row.line] * (mark.num_answers - len(_runs(mask)))
            if any(mask[sequence_length:]):
                report.answers_cut.append(row.line)
            ids, mask = ids[:sequence_length], mask[:sequence_length]
            _count(report, ids, mask, stop_ids)
            examples.append(Example(ids, mask, row.line, row.source))
    if not examples:
        raise _nothing_to_train(rows, chat, report)
    return examples, report


def encode_prompt(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
) -> list[int]:
    """Token ids up to the point where the model's answer begins."""
    template = resolve_template(tokenizer, chat_template)
    try:
        text = _render(tokenizer, template, messages, True)
    except jinja2.TemplateError as error:
        raise ValueError(_refusal(messages, error)) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[_extra_bos(tokenizer, ids) :]


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
) -> list[int]:
    """The tokens that end an answer: those the template ends a turn with, then eos."""
    return _ids(tokenizer, _open_chat(tokenizer, chat_template).stops)


def resolve_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> str:
    """The text of a template given by name, as Jinja text, or by the tokenizer."""
    if chat_template is None:
        if not tokenizer.chat_template:
            raise ValueError(
                "this tokenizer has no chat template, so it is unknown how a conversation is "
                "written down; set data.template=chatml, or give a template as Jinja text"
            )
        return tokenizer.get_chat_template()
    if chat_template == "chatml":
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in vocabulary]
        if missing:
            raise ValueError(
                f"data.template=chatml needs the token {' and '.join(missing)}, which this "
                "tokenizer does not have; give a template as Jinja text that ends an answer with "
                "eos_token"
            )
        return CHATML
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    raise ValueError(
        f"data.template={chat_template} is unknown; allowed: chatml, a template as Jinja text, or "
        "null for the tokenizer's own"
    )


def marked_sample(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The example as text, with what is trained in white square brackets."""
    parts = []
    pairs = zip(example.labels_mask, example.input_ids, strict=True)
    for trained, group in groupby(pairs, key=lambda pair: pair[0]):
        ids = [token for _, token in group]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts.append(f"\u27e6{text}\u27e7" if trained else str(text))
    return "".join(parts)


def _open_chat(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> _Chat:
    template = resolve_template(tokenizer, chat_template)
    return _Chat(tokenizer, template, tuple(_find_stops(tokenizer, template)))


def _find_stops(tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    """The tokens after an answer's content: what two answers without a common letter share."""
    try:
        first, second = (
            _render(
                tokenizer,
                template,
                [Message(role="user", content="0"), Message(role="assistant", content=content)],
                False,
            )
            for content in ("0", "1")
        )
    except jinja2.TemplateError:
        # This template wants another conversation; the rows will show which errors are real.
        first = second = ""
    if first and first == second:
        raise ValueError(
            "the chat template leaves out what the assistant says, so there is nothing to train; "
            f"set data.template=chatml or another template; it writes a conversation as\n{first}"
        )
    pairs = zip(reversed(first), reversed(second), strict=False)
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    ending = first[len(first) - length :]
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = tokenizer(ending, add_special_tokens=False)["input_ids"] if ending else []
    stops = [str(tokenizer.convert_ids_to_tokens(token)) for token in ids if token in added]
    if tokenizer.eos_token:
        stops.append(str(tokenizer.eos_token))
    return list(dict.fromkeys(stops))


def _ids(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[int]:
    ids: Any = tokenizer.convert_tokens_to_ids(list(tokens))
    return list(ids)


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _render(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[Message], prompt: bool
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                _plain(messages),
                chat_template=template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        )
    except jinja2.TemplateError:
        raise
    except Exception as error:
        # a template is a program, and fails as programs do: 1/0, a list + 1, a huge range
        raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error


def _mark_row(chat: _Chat, row: Row) -> _Marked:
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    try:
        if not answers:
            return _Marked("", [], 0)
        # What follows the last answer has no influence on it.
        messages = row.messages[: answers[-1] + 1]
        mark = _mark_by_template if chat.marks_generation else _mark_by_prefix
        text, spans = mark(chat, messages, answers)
    except jinja2.TemplateError as error:
        raise ValueError(f"{row.source}:{row.line}: {_refusal(row.messages, error)}") from error
    if not spans and mark is _mark_by_prefix:
        raise ValueError(
            f"{row.source}:{row.line}: with this chat template the prompt for an answer does not "
            "begin the finished conversation, so it is unknown where the answer starts; set "
            "data.template=chatml or another template; the conversation is written as\n"
            f"{text[:500]}"
        )
    return _Marked(*_end_at_stops(chat, text, spans), len(answers))


def _mark_by_prefix(
    chat: _Chat, messages: Sequence[Message], answers: Sequence[int]
) -> tuple[str, list[Span]]:
    text = chat.render(messages, prompt=False)
    spans = []
    for turn in answers:
        if turn == 0:
            continue
        prompt = chat.render(messages[:turn], prompt=True)
        is_last = turn == answers[-1]
        done = text if is_last else chat.render(messages[: turn + 1], prompt=False)
        if text.startswith(done) and done.startswith(prompt):
            spans.append((len(prompt), len(done)))
    return text, spans


def _mark_by_template(
    chat: _Chat, messages: Sequence[Message], answers: Sequence[int]
) -> tuple[str, list[Span]]:
    # first, because it says clearly what is wrong with a template
    text = chat.render(messages, prompt=False)
    encoding: Any = chat.tokenizer.apply_chat_template(
        _plain(messages),
        chat_template=chat.template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    places = encoding["offset_mapping"]
    runs = _runs([bool(value) for value in encoding["assistant_masks"]])
    spans = [(places[start][0], places[end - 1][1]) for start, end in runs]
    return text, spans


def _end_at_stops(chat: _Chat, text: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
    """Ends every answer right after its stop token, and writes eos where there is none."""
    parts: list[str] = []
    ended: list[Span] = []
    done = shift = 0
    for start, end in spans:
        answer = text[start:end].rstrip()
        following = text[end:].lstrip()
        behind = next((stop for stop in chat.stops if following.startswith(stop)), None)
        stop = start + len(answer)
        begin = start + shift
        if answer and not answer.endswith(chat.stops):
            if behind is not None:
                stop = len(text) - len(following) + len(behind)
            elif chat.tokenizer.eos_token:
                parts += [text[done:stop], str(chat.tokenizer.eos_token)]
                done = stop
                shift += len(parts[-1])
        ended.append((begin, stop + shift))
    return "".join([*parts, text[done:]]), ended


def _tokenize(chat: _Chat, marked: Sequence[_Marked]) -> Iterator[tuple[list[int], list[bool]]]:
    texts = [mark.text for mark in marked]
    encoded: Any = chat.tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=chat.tokenizer.is_fast,
        # Rows longer than the model are this module's business; see EncodeReport.
        verbose=False,
    )
    for index, mark in enumerate(marked):
        ids = list(encoded["input_ids"][index])
        if chat.tokenizer.is_fast:
            mask = _mask_by_place(mark, encoded["offset_mapping"][index])
        else:
            mask = _mask_by_count(mark, ids, chat.tokenizer)
        extra = _extra_bos(chat.tokenizer, ids)
        ids, mask = ids[extra:], mask[extra:]
        if mask:
            # Nothing comes before the first token that could predict it.
            mask[0] = False
        yield ids, mask


def _mask_by_place(mark: _Marked, places: Sequence[Span]) -> list[bool]:
    """Tokens of which nothing but white space lies outside an answer."""
    mask = [False] * len(places)
    spans = iter(mark.spans)
    span = next(spans, None)
    for index, (start, end) in enumerate(places):
        while span is not None and start >= span[1]:
            span = next(spans, None)
        if span is None:
            break
        if end <= span[0]:
            continue
        outside = mark.text[start : span[0]] + mark.text[span[1] : end]
        mask[index] = not outside.strip()
    return mask


def _mask_by_count(
    mark: _Marked, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> list[bool]:
    """The same for tokenizers that do not say where a token stands, by the tokens of prefixes."""
    mask = [False] * len(ids)
    for start, end in mark.spans:
        before, through = (
            list(tokenizer(mark.text[:place], add_special_tokens=False)["input_ids"])
            for place in (start, end)
        )
        if list(ids[: len(before)]) == before and list(ids[: len(through)]) == through:
            mask[len(before) : len(through)] = [True] * (len(through) - len(before))
    return mask


def _extra_bos(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """How many of the leading bos tokens are one too many."""
    extra = 0
    while extra + 1 < len(ids) and ids[extra] == ids[extra + 1] == tokenizer.bos_token_id:
        extra += 1
    return extra


def _runs(mask: Sequence[bool]) -> list[Span]:
    """(start, end) of every stretch of True."""
    padded = [False, *mask, False]
    edges = [i for i in range(len(mask) + 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _reason_to_drop(row: Row, mask: Sequence[bool], sequence_length: int) -> str | None:
    if not any(message["role"] == "assistant" for message in row.messages):
        return "no assistant turn"
    if not any(mask):
        return "no assistant tokens left by the chat template"
    if not any(mask[:sequence_length]):
        return f"prompt longer than data.sequence_length={sequence_length}"
    return None


def _count(
    report: EncodeReport, ids: Sequence[int], mask: Sequence[bool], stop_ids: set[int]
) -> None:
    runs = _runs(mask)
    report.kept += 1
    report.tokens += len(ids)
    report.trained_tokens += sum(mask)
    report.targets += len(runs)
    report.stopped_targets += sum(ids[end - 1] in stop_ids for _, end in runs)


def _refusal(messages: Sequence[Message], error: Exception) -> str:
    advice = "set data.template=chatml or another template"
    if any(message["role"] == "system" for message in messages):
        advice += ", or move the system message into the first user message"
    return f"the chat template refuses this conversation: {error}; {advice}"


def _nothing_to_train(rows: Sequence[Row], chat: _Chat, report: EncodeReport) -> ValueError:
    if not rows:
        return ValueError("there are no rows to encode")
    row = rows[0]
    table = "\n  ".join(dropped_lines(report.dropped))
    text = chat.render(row.messages, prompt=False) if row.messages else ""
    return ValueError(
        f"{row.source}: none of {count_rows(len(rows))} leaves anything to train on\n  {table}\n"
        f"the row of line {row.line} is written as\n{text[:500]}"
    )
