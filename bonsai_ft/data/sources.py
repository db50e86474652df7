"""Which conversations does a training set hold, and which of its rows are useless, and why?

A wrong type is an error that names file, line and field. A row that teaches nothing (no answer,
wrong turn order) is dropped and counted by reason. `files.py` finds the records and their lines.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from bonsai_ft.data.files import kind_of, read_records


class Message(TypedDict):
    role: str
    content: str


Conversation = Callable[[dict[str, Any]], "list[Message] | str"]

COLUMNS = ("instruction", "input", "output", "system", "messages", "conversations")
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_SHOWN_LINES = 5


@dataclass(frozen=True)
class Row:
    """One conversation; two rows are equal if they say the same, wherever they stand."""

    messages: list[Message]
    line: int = field(compare=False)
    source: str = field(compare=False)


@dataclass
class RowReport:
    kept: int = 0
    dropped: dict[str, list[int]] = field(default_factory=dict)
    shape: str = ""

    def lines(self) -> list[str]:
        read_as = f" (read as {self.shape})" if self.shape else ""
        return [f"kept {count_rows(self.kept)}{read_as}", *dropped_lines(self.dropped)]


def count_rows(number: int) -> str:
    return f"{number} row" if number == 1 else f"{number} rows"


def list_lines(lines: Sequence[int]) -> str:
    """The first few line numbers, as in `lines 4, 9, 17 ...`."""
    shown = ", ".join(str(line) for line in lines[:_SHOWN_LINES])
    more = " ..." if len(lines) > _SHOWN_LINES else ""
    return f"{'line' if len(lines) == 1 else 'lines'} {shown}{more}"


def dropped_lines(dropped: Mapping[str, Sequence[int]]) -> list[str]:
    return [
        f"dropped {count_rows(len(lines))}: {reason} ({list_lines(lines)})"
        for reason, lines in dropped.items()
    ]


class _Useless(Exception):
    """The reason why a row is dropped."""


def read_rows(
    source: str,
    *,
    columns: dict[str, str] | None = None,
    split: str = "train",
    conversation: Conversation | None = None,
    for_training: bool = True,
) -> tuple[list[Row], RowReport]:
    """Rows of a file, a folder or a hub id, and what was left out.

    `columns` maps our names to the file's. `conversation` replaces the three known row shapes by
    a recipe's own reading: a record to messages, or to the reason why it is dropped. Without
    `for_training`, rows need no answer; where they have one, it is kept.
    """
    renames = _check_columns(columns)
    records = read_records(source, split)
    if not records:
        raise ValueError(f"{source}: the training set has no rows")
    found = list(dict.fromkeys(name for _, record in records for name in record))
    for ours, theirs in renames.items():
        if theirs not in found:
            raise ValueError(
                f"{source}: data.columns={{{ours}: {theirs}}} names a column that is not there; "
                f"found: {', '.join(found)}"
            )
    shape = "recipe" if conversation else _find_shape(source, found, renames, for_training)

    rows: list[Row] = []
    report = RowReport(shape=shape)
    for line, raw in records:
        record = {**raw, **{ours: raw.get(theirs) for ours, theirs in renames.items()}}
        place = f"{source}:{line}"
        try:
            if conversation is not None:
                messages = _by_recipe(place, record, conversation, found)
            elif shape == "alpaca":
                messages = _from_alpaca(place, record, for_training)
            else:
                messages = _from_turns(place, record, shape)
            if not for_training and messages and not _is_answered(messages):
                messages.pop()
            _check_conversation(messages, for_training)
        except _Useless as useless:
            report.dropped.setdefault(str(useless), []).append(line)
        else:
            rows.append(Row(messages, line, source))
    report.kept = len(rows)
    if not rows:
        table = "\n  ".join(dropped_lines(report.dropped))
        raise ValueError(f"{source}: none of {count_rows(len(records))} can be used\n  {table}")
    return rows, report


def split_rows(
    rows: Sequence[Row], held_out_fraction: float, seed: int
) -> tuple[list[Row], list[Row]]:
    """(train, held out), decided by each row's content alone.

    Equal rows land on the same side, the order of the file does not matter, and rows added later
    move no other row. Both sides get a row if there are two different rows.
    """
    if not 0 <= held_out_fraction < 1:
        raise ValueError(
            f"data.held_out_fraction={held_out_fraction} must be at least 0 and less than 1"
        )
    if held_out_fraction == 0:
        return list(rows), []
    hashes = [_content_hash(row, seed) for row in rows]
    border = int(held_out_fraction * 2**64)
    held_out = {value for value in hashes if value < border}
    distinct = set(hashes)
    if len(distinct) > 1 and not held_out:
        held_out = {min(distinct)}
    elif len(distinct) > 1 and held_out == distinct:
        held_out.discard(max(distinct))
    return (
        [row for row, value in zip(rows, hashes, strict=True) if value not in held_out],
        [row for row, value in zip(rows, hashes, strict=True) if value in held_out],
    )


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Rows as JSONL with `messages`; a killed writer leaves the old file or none."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(json.dumps({"messages": row.messages}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _content_hash(row: Row, seed: int) -> int:
    text = json.dumps([seed, [[m["role"], m["content"]] for m in row.messages]])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _check_columns(columns: dict[str, str] | None) -> dict[str, str]:
    for ours in columns or {}:
        if ours not in COLUMNS:
            raise ValueError(
                f"data.columns has the unknown key {ours!r}; allowed keys: {', '.join(COLUMNS)}"
            )
    return dict(columns or {})


def _find_shape(
    source: str, found: Sequence[str], renames: Mapping[str, str], for_training: bool
) -> str:
    """alpaca, messages or conversations; a mapped column decides before a found one."""
    for names in (renames, {*found, *renames}):
        for turns in ("messages", "conversations"):
            if turns in names:
                return turns
        if "instruction" in names or "output" in names:
            break
    needed = ("instruction", "output") if for_training else ("instruction",)
    available = {*found, *renames}
    missing = [name for name in needed if name not in available]
    if not missing:
        return "alpaca"
    listed = " and ".join(f"'{name}'" for name in missing)
    raise ValueError(
        f"{source}: no column {listed}; found: {', '.join(found) or 'none'}; expected: "
        f"{' and '.join(needed)}, or conversations, or messages; name other columns with "
        f"data.columns={{{missing[0]}: THEIR_NAME}} when training"
    )


def _from_alpaca(place: str, record: Mapping[str, Any], for_training: bool) -> list[Message]:
    instruction, question, output, system = (
        _text(place, name, record.get(name))
        for name in ("instruction", "input", "output", "system")
    )
    _need(instruction, "instruction")
    if for_training:
        _need(output, "output")
    content = f"{instruction}\n\n{question}" if question and question.strip() else instruction
    messages = [Message(role="system", content=system)] if system and system.strip() else []
    messages.append(Message(role="user", content=content or ""))
    if output and output.strip():
        messages.append(Message(role="assistant", content=output))
    return messages


def _from_turns(place: str, record: Mapping[str, Any], column: str) -> list[Message]:
    turns = record.get(column)
    system = _text(place, "system", record.get("system"))
    if turns is None:
        raise _Useless(f"{column} missing")
    messages = _messages(place, column, turns)
    if system and system.strip() and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, Message(role="system", content=system))
    return messages


def _messages(place: str, name: str, turns: object) -> list[Message]:
    """Turns with role and content, or with from and value, as messages."""
    if not isinstance(turns, list):
        raise ValueError(f"{place}: {name} is {kind_of(turns)}, but a list of turns is expected")
    messages = []
    for index, turn in enumerate(turns):
        label = f"{name}[{index}]"
        if not isinstance(turn, dict):
            raise ValueError(f"{place}: {label} is {kind_of(turn)}, but an object is expected")
        pairs = (("role", "content"), ("from", "value"))
        keys = next((pair for pair in pairs if pair[0] in turn), None)
        if keys is None:
            raise ValueError(
                f"{place}: {label} has neither role and content nor from and value; "
                f"found: {', '.join(map(str, turn)) or 'nothing'}"
            )
        role = _text(place, f"{label}.{keys[0]}", turn[keys[0]])
        content = _text(place, f"{label}.{keys[1]}", turn.get(keys[1]))
        if role not in ROLES:
            raise _Useless(f"unknown role {role!r}")
        messages.append(Message(role=ROLES[role], content=content or ""))
    return messages


def _by_recipe(
    place: str, record: dict[str, Any], conversation: Conversation, found: Sequence[str]
) -> list[Message]:
    try:
        answer = conversation(record)
    except Exception as error:
        raise ValueError(
            f"{place}: the recipe's conversation() failed with {type(error).__name__}: {error}; "
            f"columns found: {', '.join(found)}"
        ) from error
    if isinstance(answer, str):
        raise _Useless(answer)
    return _messages(place, "conversation()", answer)


def _text(place: str, name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{place}: {name} is {kind_of(value)}, but text is expected")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _Useless(f"half a surrogate pair in {name.rpartition('.')[2]}") from error
    return value


def _need(text: str | None, name: str) -> None:
    if text is None:
        raise _Useless(f"{name} missing")
    if not text.strip():
        raise _Useless(f"empty {name}")


def _is_answered(messages: Sequence[Message]) -> bool:
    """False if the last turn is an assistant's without content, as prompt files have it."""
    return messages[-1]["role"] != "assistant" or bool(messages[-1]["content"].strip())


def _check_conversation(messages: Sequence[Message], for_training: bool) -> None:
    """Raises _Useless unless user and assistant alternate, in training up to an answer."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    turns = messages[1:] if has_system else messages
    if not turns:
        raise _Useless("empty conversation")
    for index, turn in enumerate(turns):
        if turn["role"] != ("assistant" if index % 2 else "user"):
            raise _Useless("wrong turn order")
        if not turn["content"].strip():
            raise _Useless(f"empty {turn['role']} turn")
    if for_training and turns[-1]["role"] != "assistant":
        raise _Useless("no assistant turn at the end")
