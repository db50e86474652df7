"""Rows are read with their lines; what is wrong is named, what is useless is counted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bonsai_ft.data.sources import Row, read_rows, split_rows, write_rows

GOOD = {"instruction": "Say hello.", "input": "", "output": "Hello!"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


def write(path: Path, text: str, encoding: str = "utf-8") -> str:
    path.write_bytes(text.encode(encoding))
    return str(path)


def write_jsonl(path: Path, *records: object) -> str:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    return write(path, "".join(lines))


def pair(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_the_same_rows_come_from_every_format(tmp_path):
    import pyarrow
    import pyarrow.parquet

    records = [
        {"instruction": "Translate.", "input": "\u4f60\u597d", "output": "Hello,\n\u2028world"},
        {"instruction": 'Say "a\tb".', "input": "", "output": "a\tb"},
    ]
    quoted = [
        [f'"{value}"' for value in (r["instruction"].replace('"', '""'), r["input"], r["output"])]
        for r in records
    ]
    header = ["instruction", "input", "output"]
    files = [
        write_jsonl(tmp_path / "rows.jsonl", *records),
        write(tmp_path / "rows.json", json.dumps(records, indent=2, ensure_ascii=False)),
        write(tmp_path / "data.json", json.dumps({"version": [1], "data": records, "n": {}})),
        write(tmp_path / "lines.json", "\n".join(json.dumps(r) for r in records)),
        write(tmp_path / "rows.csv", "\n".join(",".join(row) for row in [header, *quoted])),
        write(tmp_path / "rows.tsv", "\r\n".join("\t".join(row) for row in [header, *quoted])),
        str(tmp_path / "rows.parquet"),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), files[-1])
    expected = [
        pair("Translate.\n\n\u4f60\u597d", "Hello,\n\u2028world"),
        pair('Say "a\tb".', "a\tb"),
    ]
    for file in files:
        rows, report = read_rows(file)
        assert [row.messages for row in rows] == expected, file
        assert (report.kept, report.dropped, report.shape) == (2, {}, "alpaca")
        assert all(row.source == file for row in rows)


def test_the_same_conversation_is_recognised_in_three_shapes(tmp_path):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT[:3]]
    sharegpt = write_jsonl(tmp_path / "sharegpt.jsonl", {"conversations": turns})
    with_column = {"conversations": turns[1:], "system": CHAT[0]["content"]}
    system = write_jsonl(tmp_path / "system.jsonl", with_column)
    openai = write_jsonl(tmp_path / "openai.jsonl", {"messages": CHAT[:3], "prompt": "Hi"})
    alpaca = write_jsonl(
        tmp_path / "alpaca.jsonl", {"instruction": "Hi", "output": "Hello", "system": "Be brief."}
    )
    for source in (sharegpt, system, openai, alpaca):
        assert read_rows(source)[0][0].messages == CHAT[:3], source


def test_a_byte_order_mark_is_accepted(tmp_path):
    source = write(tmp_path / "rows.csv", "instruction,output\na,b\n", "utf-8-sig")
    assert read_rows(source)[0][0].messages == pair("a", "b")


@pytest.mark.parametrize(
    ("value", "found"),
    [(7, "a number (int)"), ([1, "a"], "a list (list)"), (True, "true or false (bool)")],
    ids=["number", "mixed list", "bool"],
)
def test_a_wrong_type_is_named_with_file_line_field_and_type(tmp_path, value, found):
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD, GOOD, {**GOOD, "output": value})
    with pytest.raises(ValueError, match="but text is expected") as error:
        read_rows(source)
    assert f"{source}:3: output is {found}" in str(error.value)


def test_a_wrong_type_inside_a_conversation_names_the_turn(tmp_path):
    source = write_jsonl(
        tmp_path / "rows.jsonl",
        {"messages": CHAT},
        {"messages": [CHAT[1], {"role": "assistant", "content": 3}]},
    )
    with pytest.raises(ValueError, match="number") as error:
        read_rows(source)
    assert f"{source}:2: messages[1].content is a number (int)" in str(error.value)
    source = write_jsonl(tmp_path / "mixed.jsonl", {"messages": [CHAT[1], "Hello"]})
    with pytest.raises(ValueError, match="an object is expected") as error:
        read_rows(source)
    assert f"{source}:1: messages[1] is text (str)" in str(error.value)
    source = write_jsonl(tmp_path / "keys.jsonl", {"conversations": [{"speaker": "a"}]})
    with pytest.raises(ValueError, match="neither role and content nor from") as error:
        read_rows(source)
    assert f"{source}:1: conversations[0]" in str(error.value)
    assert "found: speaker" in str(error.value)


def test_mixed_types_in_a_column_nobody_reads_do_no_harm(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", {**GOOD, "id": 1}, {**GOOD, "id": ["a", 1]})
    assert read_rows(source)[1].kept == 2


def test_a_row_that_is_no_object_is_an_error_with_its_line(tmp_path):
    source = write(tmp_path / "rows.json", '[\n{"instruction": "a", "output": "b"},\n["a"]\n]')
    with pytest.raises(ValueError, match="the row is a list") as error:
        read_rows(source)
    assert str(error.value).startswith(f"{source}:3: ")


@pytest.mark.parametrize(
    ("name", "text", "line", "reason"),
    [
        ("a.jsonl", '{"instruction": "a"}\n\n{"instruction": "b",}\n', 3, "not valid JSON: "),
        ("a.jsonl", '{"instruction": "a"}\n{"instruction": "b', 2, "Unterminated string"),
        ("a.jsonl", "[" * 100_000, 1, "nested too deeply"),
        ("a.json", '[\n{"instruction": "a"}\n{"instruction": "b"}]', 3, "Expecting ',' or ']'"),
        ("a.json", '[\n{"instruction": "a"},\n{"instruction"', 3, "not valid JSON: "),
        ("a.json", '[{"instruction": "a"}]\nmore', 2, "Extra data after the array"),
        ("a.json", '{"data":\n [1,\n 2', 3, "not valid JSON: "),
        ("a.json", '{"a": 1}\n{"a": 2}\n{"a" 3}\n', 3, "Expecting ':' delimiter"),
        ("a.json", "\nhello", 2, "starts with 'h'"),
        ("a.json", "", 1, "is empty"),
        ("a.csv", "instruction,output\na,b\n\nc,d,e\n", 4, "has 3 cells, but the header names 2"),
        ("a.csv", 'instruction,output\n"a\nb",c\nd,"e', 4, "unexpected end of data"),
        ("a.tsv", "instruction\toutput\na b\n", 2, "has 1 cells"),
        ("a.parquet", "not parquet at all", 1, "not a readable Parquet file"),
    ],
)
def test_broken_files_are_named_with_line_and_reason(tmp_path, name, text, line, reason):
    source = write(tmp_path / name, text)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        read_rows(source)
    assert str(error.value).startswith(f"{source}:{line}: ")


def test_a_row_after_a_quoted_line_break_keeps_its_line(tmp_path):
    source = write(tmp_path / "a.csv", 'instruction,output\n"a\nb",c\n\nd,e\n')
    assert [row.line for row in read_rows(source)[0]] == [2, 5]


def test_rows_of_an_array_know_the_line_they_start_on(tmp_path):
    text = '\n{"data": [\n  ' + ",\n\n  ".join([json.dumps(GOOD)] * 3) + "]}"
    rows, _ = read_rows(write(tmp_path / "a.json", text))
    assert [row.line for row in rows] == [3, 5, 7]


def test_very_long_cells_are_read_and_the_limit_of_csv_is_left_alone(tmp_path):
    import csv

    limit = csv.field_size_limit()
    source = write(tmp_path / "a.csv", f"instruction,output\na,{'b' * 200_000}\n")
    assert len(read_rows(source)[0][0].messages[1]["content"]) == 200_000
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("encoding", "hint"),
    [
        ("gbk", "iconv -f GB18030 -t UTF-8"),
        ("utf-16", "iconv -f UTF-16 -t UTF-8"),
        ("utf-16-le", "iconv -f UTF-16LE -t UTF-8"),
    ],
)
def test_other_encodings_get_a_hint(tmp_path, encoding, hint):
    text = '{"instruction": "a", "output": "b"}\n{"instruction": "\u4f60\u597d", "output": "c"}\n'
    source = write(tmp_path / "rows.jsonl", text, encoding)
    with pytest.raises(ValueError, match="UTF-8") as error:
        read_rows(source)
    line = 2 if encoding == "gbk" else 1
    assert str(error.value).startswith(f"{source}:{line}: ")
    assert hint in str(error.value)


def test_bytes_that_are_no_text_at_all_are_named_with_their_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"instruction": "a"}\n{"output": "\xff\xff\xff"}\n')
    with pytest.raises(ValueError, match="0xff is not UTF-8") as error:
        read_rows(str(path))
    assert str(error.value).startswith(f"{path}:2: ")


def test_no_file_is_opened_with_the_encoding_of_the_platform(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", {"instruction": "\u4f60", "output": "\u597d"})
    code = (
        "import sys; from bonsai_ft.data.sources import read_rows, write_rows\n"
        "rows, _ = read_rows(sys.argv[1]); write_rows(sys.argv[2], rows)\n"
        "assert read_rows(sys.argv[2])[0] == rows\n"
    )
    flags = ["-X", "utf8=0", "-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, *flags, "-c", code, source, str(tmp_path / "out.jsonl")]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_useless_rows_are_counted_by_reason_with_their_lines(tmp_path):
    source = write_jsonl(
        tmp_path / "rows.jsonl",
        GOOD,
        {**GOOD, "output": ""},
        {**GOOD, "output": " \n"},
        {**GOOD, "instruction": ""},
        {"instruction": "a"},
        {**GOOD, "output": None},
        {**GOOD, "output": "x"},
    )
    rows, report = read_rows(source)
    assert [row.line for row in rows] == [1, 7]
    assert report.kept == 2
    assert report.dropped == {
        "empty output": [2, 3],
        "empty instruction": [4],
        "output missing": [5, 6],
    }
    assert report.lines() == [
        "kept 2 rows (read as alpaca)",
        "dropped 2 rows: empty output (lines 2, 3)",
        "dropped 1 row: empty instruction (line 4)",
        "dropped 2 rows: output missing (lines 5, 6)",
    ]


def test_conversations_in_wrong_order_are_counted_by_reason(tmp_path):
    system, user, answer = CHAT[:3]
    source = write_jsonl(
        tmp_path / "rows.jsonl",
        {"messages": CHAT},
        {"messages": [answer, user]},
        {"messages": [user, user, answer]},
        {"messages": [user, answer, user]},
        {"messages": [user, {"role": "assistant", "content": " "}]},
        {"messages": [user, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "user", "content": ""}, answer]},
        {"messages": []},
        {"messages": [system]},
        {"messages": [user, answer, system]},
        {"messages": [user, {"role": "tool", "content": "3"}]},
        {"other": 1},
    )
    rows, report = read_rows(source)
    assert [row.messages for row in rows] == [CHAT]
    assert report.dropped == {
        "wrong turn order": [2, 3, 10],
        "no assistant turn at the end": [4],
        "empty assistant turn": [5, 6],
        "empty user turn": [7],
        "empty conversation": [8, 9],
        "unknown role 'tool'": [11],
        "messages missing": [12],
    }


def test_half_a_surrogate_pair_is_dropped_before_a_tokenizer_chokes_on_it(tmp_path):
    source = write(
        tmp_path / "rows.jsonl",
        json.dumps(GOOD) + '\n{"instruction": "a", "output": "\\ud83d"}\n',
    )
    assert read_rows(source)[1].dropped == {"half a surrogate pair in output": [2]}


def test_only_the_first_lines_are_listed(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD, *[{**GOOD, "output": ""}] * 9)
    assert read_rows(source)[1].lines()[1] == (
        "dropped 9 rows: empty output (lines 2, 3, 4, 5, 6 ...)"
    )


def test_a_file_of_useless_rows_is_an_error_with_the_table(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", {**GOOD, "output": ""}, {**GOOD, "output": None})
    with pytest.raises(ValueError, match="none of 2 rows can be used") as error:
        read_rows(source)
    assert str(error.value).startswith(source)
    assert "dropped 1 row: empty output (line 1)" in str(error.value)
    assert "dropped 1 row: output missing (line 2)" in str(error.value)


def test_unknown_columns_are_named_with_what_was_expected(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", {"question": "a", "answer": "b"})
    with pytest.raises(ValueError, match="found: question, answer; expected: instruction and out"):
        read_rows(source)
    with pytest.raises(ValueError, match="no column 'output'; found: instruction"):
        read_rows(write_jsonl(tmp_path / "half.jsonl", {"instruction": "a"}))


def test_columns_map_our_names_to_theirs(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", {"question": "a", "answer": "b", "messages": 1})
    rows, _ = read_rows(source, columns={"instruction": "question", "output": "answer"})
    assert rows[0].messages == pair("a", "b")
    source = write_jsonl(tmp_path / "dialog.jsonl", {"dialog": CHAT})
    assert read_rows(source, columns={"messages": "dialog"})[0][0].messages == CHAT


def test_a_misspelt_mapping_key_lists_the_allowed_ones(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(ValueError, match="unknown key 'instructoin'; allowed keys: instruction,"):
        read_rows(source, columns={"instructoin": "instruction"})


def test_a_mapping_to_a_column_that_is_not_there_lists_the_found_ones(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"not there; found: instruction, input, output") as error:
        read_rows(source, columns={"output": "answer"})
    assert "{output: answer}" in str(error.value)


def test_prompts_need_no_answer_when_nothing_is_trained(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", {"instruction": "a"}, {**GOOD, "output": ""})
    rows, report = read_rows(source, for_training=False)
    assert [row.messages for row in rows] == [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "Say hello."}],
    ]
    assert report.dropped == {}
    unanswered = [*CHAT[:4], {"role": "assistant", "content": ""}]
    source = write_jsonl(tmp_path / "chat.jsonl", {"messages": CHAT[:4]}, {"messages": unanswered})
    rows, _ = read_rows(source, for_training=False)
    assert [row.messages for row in rows] == [CHAT[:4], CHAT[:4]]


def test_a_recipe_reads_rows_its_own_way(tmp_path):
    source = write_jsonl(tmp_path / "poems.jsonl", {"title": "Moon"}, {"title": "Rain", "n": 2})

    def conversation(row):
        return pair(row["title"], "...") if "n" not in row else "has a number"

    rows, report = read_rows(source, conversation=conversation)
    assert [row.messages for row in rows] == [pair("Moon", "...")]
    assert report.dropped == {"has a number": [2]}


def test_a_failing_recipe_is_named_with_file_and_line(tmp_path):
    source = write_jsonl(tmp_path / "poems.jsonl", {"title": "Moon", "body": "..."}, {"body": ""})
    with pytest.raises(ValueError, match="failed with KeyError: 'title'; columns found: ") as error:
        read_rows(source, conversation=lambda row: pair(row["title"], "x"))
    assert str(error.value).startswith(f"{source}:2: ")
    with pytest.raises(ValueError, match=r"conversation\(\) is nothing \(null\)") as error:
        read_rows(source, conversation=lambda row: None)
    assert str(error.value).startswith(f"{source}:1: ")


def test_a_folder_is_read_through_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "poems"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", GOOD, {**GOOD, "output": ""})
    write_jsonl(folder / "test.jsonl", {**GOOD, "output": "from the other split"})
    rows, report = read_rows(str(folder))
    assert [row.messages for row in rows] == [pair("Say hello.", "Hello!")]
    assert report.dropped == {"empty output": [2]}
    rows, _ = read_rows(str(folder), split="test")
    assert rows[0].messages[1]["content"] == "from the other split"
    with pytest.raises(ValueError, match=r"folder could not be loaded \(data.split=validation\)"):
        read_rows(str(folder), split="validation")


def test_a_hub_id_without_a_connection_points_to_a_local_file(monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("cannot reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match="cannot reach the hub") as error:
        read_rows("someone/poems")
    assert str(error.value).startswith("someone/poems: there is no such file or folder, and it")
    assert "data.path=path/to/file.jsonl" in str(error.value)


@pytest.mark.parametrize("source", ["rows.jsonl", "./poems", "a/b/c", "rows?"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no such file or folder") as error:
        read_rows(source)
    assert str(tmp_path) in str(error.value)


def test_settings_that_do_not_fit_a_file_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"\.txt as a training set; data\.path may end in \.json"):
        read_rows(write(tmp_path / "rows.txt", "a"))
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"data\.split=test has no effect on a single file"):
        read_rows(source, split="test")
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(write(tmp_path / "empty.jsonl", "\n"))


def numbered(count: int) -> list[Row]:
    return [Row(pair(str(number), "x"), number, "here") for number in range(count)]


def test_the_held_out_rows_depend_on_content_alone():
    rows = numbered(2000)
    train, held_out = split_rows(rows, 0.1, seed=3)
    assert 150 < len(held_out) < 250
    assert sorted(row.line for row in train + held_out) == list(range(2000))
    backward = split_rows(rows[::-1], 0.1, seed=3)[1]
    assert [row.line for row in backward] == [row.line for row in held_out[::-1]]
    more = split_rows(numbered(2500), 0.1, seed=3)[1]
    assert more[: len(held_out)] == held_out
    assert split_rows(rows, 0.1, seed=4)[1] != held_out
    assert split_rows(rows, 0.0, seed=3) == (rows, [])


def test_equal_rows_never_land_on_both_sides():
    rows = numbered(50) + numbered(50)
    train, held_out = split_rows(rows, 0.3, seed=0)
    assert len(train) + len(held_out) == 100
    assert not [row for row in held_out if row in train]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_both_sides_of_a_split_get_a_row(fraction):
    train, held_out = split_rows(numbered(3), fraction, seed=0)
    assert train
    assert held_out


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_held_out_fraction_is_checked(fraction):
    with pytest.raises(ValueError, match=r"data\.held_out_fraction="):
        split_rows(numbered(3), fraction, seed=0)


def test_written_rows_are_read_back_equal(tmp_path):
    rows = [Row(CHAT, 1, "a"), Row(pair("\u4f60\u2028\r\n", '"\\\x00'), 2, "a")]
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    assert read_rows(str(path))[0] == rows


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, numbered(2))
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_rows(path, [*numbered(3), Row([{"role": {1}}], 1, "a")])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
