"""Which records does a training set hold, and on which line does each of them stand?

JSON, JSONL, CSV and TSV are read here with the standard library, because the readers that make
column tables of them forget lines and refuse columns of mixed types. What a record means is
decided in `sources.py`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = tuple[int, dict[str, Any]]

_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")


def read_records(source: str, split: str) -> list[Record]:
    """(line or row number, record) of every record of a file, a folder or a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_with_datasets(source, str(path), split)
    suffix = path.suffix.lower()
    if path.is_file():
        if suffix not in _SUFFIXES:
            raise ValueError(
                f"{source}: cannot read {suffix or 'a file without a suffix'} as a training set; "
                f"data.path may end in {', '.join(_SUFFIXES)}"
            )
        if split != "train":
            raise ValueError(
                f"data.split={split} has no effect on a single file ({source}); "
                "leave it out, or name the file that holds this split"
            )
        return _read_file(source, path, suffix)
    if suffix in _SUFFIXES or not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise ValueError(
            f"{source}: no such file or folder; relative paths start at {Path.cwd()}; "
            "data.path takes a file, a folder, or a hub id such as owner/name"
        )
    return _read_with_datasets(source, source, split)


def kind_of(value: object) -> str:
    """The type of a value in words that somebody who edits the file understands."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true or false (bool)"
    if isinstance(value, (int, float)):
        return f"a number ({type(value).__name__})"
    if isinstance(value, str):
        return "text (str)"
    if isinstance(value, list):
        return "a list (list)"
    if isinstance(value, dict):
        return "an object (dict)"
    return f"a {type(value).__name__}"


def _read_file(source: str, path: Path, suffix: str) -> list[Record]:
    if suffix == ".parquet":
        found: Iterator[tuple[int, Any]] = _parquet_records(source, path)
    else:
        text = _decode(source, path.read_bytes())
        if suffix == ".json":
            found = _json_records(source, text)
        elif suffix == ".jsonl":
            found = _jsonl_records(source, text)
        else:
            found = _csv_records(source, text, "excel-tab" if suffix == ".tsv" else "excel")
    records = []
    for line, record in found:
        if not isinstance(record, dict):
            raise ValueError(
                f"{source}:{line}: the row is {kind_of(record)}, but an object with named "
                "fields is expected"
            )
        records.append((line, record))
    return records


def _decode(source: str, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(
            f"{source}:1: the file is encoded as UTF-16, but UTF-8 is expected; {_hint('UTF-16')}"
        )
    if b"\x00" in data[:64]:
        raise ValueError(
            f"{source}:1: the file holds zero bytes, so it is UTF-16 or no text at all; "
            f"UTF-8 is expected; for UTF-16, {_hint('UTF-16LE')}"
        )
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"{source}:{line}: byte 0x{data[error.start]:02x} is not UTF-8"
        try:
            data.decode("gb18030")
        except UnicodeDecodeError:
            raise ValueError(f"{what}; save the file as UTF-8") from error
        raise ValueError(
            f"{what}; the file may be GBK (GB18030) text; {_hint('GB18030')}"
        ) from error


def _hint(encoding: str) -> str:
    return f"convert it with: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE"


def _broken_json(source: str, line: int, error: Exception) -> ValueError:
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg}, column {error.colno}"
    elif isinstance(error, RecursionError):
        reason = "brackets are nested too deeply"
    else:
        reason = str(error)
    return ValueError(f"{source}:{line}: not valid JSON: {reason}")


def _jsonl_records(source: str, text: str) -> Iterator[tuple[int, Any]]:
    # Not str.splitlines: it also cuts at U+2028, which JSON strings may contain.
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip(" \t\r"):
            continue
        try:
            yield line, json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _broken_json(source, line, error) from error


def _json_records(source: str, text: str) -> Iterator[tuple[int, Any]]:
    """An array of rows, {"data": [rows]}, or, as many such files are, one object per line."""
    start = _skip_space(text, 0)
    if text.startswith("[", start):
        yield from _array_records(source, text, start, to_end=True)
        return
    if not text.startswith("{", start):
        found = f"starts with {text[start]!r}" if start < len(text) else "is empty"
        line = text.count("\n", 0, start) + 1
        raise ValueError(
            f"{source}:{line}: the file {found}; expected an array of rows, "
            'or {"data": [rows]}, or one object per line'
        )
    try:
        first, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", text.count("\n", 0, start) + 1)
        raise _broken_json(source, line, error) from error
    if _skip_space(text, end) < len(text):
        yield from _jsonl_records(source, text)
    elif isinstance(first.get("data"), list):
        yield from _array_records(source, text, _find_data(text, start), to_end=False)
    else:
        yield text.count("\n", 0, start) + 1, first


def _skip_space(text: str, position: int) -> int:
    match = _JSON_SPACE.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()


def _find_data(text: str, position: int) -> int:
    """Where the array under "data" starts in an object that is known to be valid."""
    decoder = json.JSONDecoder()
    found = -1
    position = _skip_space(text, position + 1)
    while not text.startswith("}", position):
        key, position = decoder.raw_decode(text, position)
        position = _skip_space(text, _skip_space(text, position) + 1)
        if key == "data":
            found = position
        _, position = decoder.raw_decode(text, position)
        position = _skip_space(text, position)
        if text.startswith(",", position):
            position = _skip_space(text, position + 1)
    return found


def _array_records(
    source: str, text: str, position: int, *, to_end: bool
) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder()
    line = text.count("\n", 0, position) + 1
    counted = position
    position = _skip_space(text, position + 1)
    ended = text.startswith("]", position)
    while not ended:
        line += text.count("\n", counted, position)
        counted = position
        try:
            record, position = decoder.raw_decode(text, position)
            yield line, record
            position = _skip_space(text, position)
            ended = text.startswith("]", position)
            if not ended and not text.startswith(",", position):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
        except json.JSONDecodeError as error:
            raise _broken_json(source, error.lineno, error) from error
        except (ValueError, RecursionError) as error:
            raise _broken_json(source, line, error) from error
        if not ended:
            position = _skip_space(text, position + 1)
    rest = _skip_space(text, position + 1)
    if to_end and rest < len(text):
        extra = json.JSONDecodeError("Extra data after the array", text, rest)
        raise _broken_json(source, extra.lineno, extra)


def _csv_records(source: str, text: str, dialect: str) -> Iterator[tuple[int, Any]]:
    # The module's limit of 128 KiB per cell is process-wide; long answers exceed it.
    limit = csv.field_size_limit(max(len(text), 1))
    try:
        yield from _csv_rows(source, text, dialect)
    finally:
        csv.field_size_limit(limit)


def _csv_rows(source: str, text: str, dialect: str) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), dialect=dialect, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{source}:{line}: not valid CSV: {error}") from error
        if not cells:
            continue
        if header is None:
            header = [name.strip() for name in cells]
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"{source}:{line}: the row has {len(cells)} cells, but the header names "
                f"{len(header)} columns ({', '.join(header)}); is a cell with the separator "
                "in it not quoted?"
            )
        yield line, dict(zip(header, cells, strict=True))


def _parquet_records(source: str, path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches():
                for record in batch.to_pylist():
                    row += 1
                    yield row, record
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{source}:{row + 1}: not a readable Parquet file: {error}") from error


def _read_with_datasets(source: str, location: str, split: str) -> list[Record]:
    import datasets

    try:
        table = datasets.load_dataset(location, split=split)
        return [(number, dict(record)) for number, record in enumerate(table, 1)]
    # The library, the hub client and their network stacks raise a dozen unrelated classes.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        what = (
            "the folder could not be loaded"
            if Path(location).is_dir()
            else "there is no such file or folder, and it could not be loaded from the hub"
        )
        raise ValueError(
            f"{source}: {what} (data.split={split}): {type(error).__name__}: {reason}; to read a "
            "file on this computer, which needs no connection, give data.path=path/to/file.jsonl "
            "(or .json, .csv, .tsv, .parquet)"
        ) from error
