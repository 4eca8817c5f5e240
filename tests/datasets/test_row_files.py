"""Files of every format, written by the real libraries, give the same rows."""

import csv
import gzip
import json
from typing import Any

import datasets as hub
import pandas
import pytest
import zstandard
from datasets import Features, Json, List, Value

from planish.datasets.layouts import comparison_of, conversation_of, prompt_of
from planish.datasets.rows import has_split, load_rows, open_rows
from planish.errors import UserError
from planish.supervised.datasets import row_splits

ROWS = [{"prompt": "Größe?", "completion": "7\n8, 9"}, {"prompt": "b", "completion": '"quoted"'}]


def jsonl(rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows, path) -> bytes:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path.read_bytes()


def contents(path) -> dict[str, bytes]:
    lines, cells = jsonl(ROWS), as_csv(ROWS, path / "scratch")
    array = json.dumps(ROWS, indent=2).encode()
    # two frames, as a file has to which somebody has appended
    frames = zstandard.compress(lines[:50]) + zstandard.compress(lines[50:])
    return {
        "train.jsonl": lines,
        "train.json": lines,
        "bom.jsonl": b"\xef\xbb\xbf" + lines,
        "windows.jsonl": lines.replace(b"\n", b"\r\n"),
        "array.json": array,
        "array.jsonl": b"\xef\xbb\xbf\n" + array,
        "train.csv": cells,
        "bom.csv": b"\xef\xbb\xbf" + cells,
        "train.jsonl.gz": gzip.compress(lines),
        "train.json.gz": gzip.compress(array),
        "train.csv.gz": gzip.compress(cells),
        "train.jsonl.zst": frames,
        "train.json.zst": zstandard.compress(array),
        "train.csv.zst": zstandard.compress(cells),
    }


def test_each_format_gives_the_same_rows_with_their_places(tmp_path):
    for name, content in contents(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(content)
        rows = load_rows(str(path), "train")
        assert rows == ROWS, name
        assert rows[1].location in (f"{path}, line 2", f"{path}, row 2"), name
        path.unlink()


def test_a_split_is_found_in_each_format_but_not_in_two(tmp_path):
    for number, suffix in enumerate((".json", ".csv", ".jsonl.gz", ".csv.zst")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"train{suffix}").write_bytes(contents(tmp_path)[f"train{suffix}"])
        assert load_rows(str(folder), "train") == ROWS
        (folder / "train-1.jsonl").write_bytes(jsonl(ROWS))
        with pytest.raises(UserError, match="train split in several formats: train-1.jsonl, train"):
            load_rows(str(folder), "train")


def test_cells_stay_texts_and_empty_cells_are_null(tmp_path):
    path = tmp_path / "cells.csv"
    path.write_text(f'question,answer,messages\n007,1.0,\n"x",{"y" * 200_000},""\n')
    assert load_rows(str(path), "train") == [
        {"question": "007", "answer": "1.0", "messages": None},
        {"question": "x", "answer": "y" * 200_000, "messages": None},
    ]


ASKED = [{"role": "user", "content": "Say, 1."}]
PAIR = {
    "prompt": ASKED,
    "chosen": [{"role": "assistant", "content": "1"}],
    "rejected": [{"role": "assistant", "content": "2"}],
}


def test_cells_with_messages_as_json_are_messages(tmp_path):
    path = tmp_path / "pairs.csv"
    as_csv([{name: json.dumps(value) for name, value in PAIR.items()}], path)
    [row] = load_rows(str(path), "train")
    assert row == PAIR
    path.write_text('prompt,completion\n"{""a"": 1}","[1, 2]"\n')
    assert load_rows(str(path), "train") == [{"prompt": '{"a": 1}', "completion": "[1, 2]"}]


@pytest.mark.parametrize("column", PAIR)
@pytest.mark.parametrize("write", [json.dumps, str], ids=["json", "python"])
def test_a_text_that_looks_like_messages_is_refused(tmp_path, column, write):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({**PAIR, column: write(PAIR[column])}))
    [row] = load_rows(str(path), "train")
    with pytest.raises(UserError, match=f'line 1, "{column}" is a text that looks like messages'):
        comparison_of(row, row.location)


@pytest.mark.parametrize("library", ["pandas", "datasets"])
def test_messages_that_pandas_or_datasets_write_as_csv_are_refused(tmp_path, library):
    path = tmp_path / "pairs.csv"
    if library == "pandas":
        pandas.DataFrame([PAIR]).to_csv(path, index=False)
    else:
        hub.Dataset.from_list([PAIR]).to_csv(path)
    [row] = load_rows(str(path), "train")
    with pytest.raises(UserError, match="looks like messages.*give a list of messages"):
        comparison_of(row, row.location)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b\n1,2\n3\n", r"row 2 has 1 cells, and the header has 2"),
        ("a.csv", b"a,a\n1,2\n", r"the header is \['a', 'a'\]"),
        ("a.csv", b'a,b\n"1,2\n', r"line \d is not CSV"),
        ("a.jsonl", b'{"a": 1, "a": 2}\n', "line 1 is not JSON .*the key 'a' twice"),
        ("a.json", b'[{"a": 1}, 2]', "row 2 is not a JSON object"),
        ("a.json", b'{\n"a": 1\n}', "line 1 is not JSON"),
        ("a.jsonl", b"\xff\xfe{\x00", "is not UTF-8 text"),
        ("a.jsonl.gz", b"no gzip", "cannot be decompressed"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99)[:-9], "cannot be decompressed"),
        ("a.jsonl.zst", b"no zstandard", "cannot be decompressed"),
        ("a.txt", b"{}", r"not known by its name; give a file that ends in \.jsonl, "),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_rows(str(tmp_path / name), "train")


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def turn(*calls):
    return [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": list(calls)},
    ]


TOOL_ROWS = [
    {
        "messages": turn(call("weather", {"city": "Rome", "where": {"lat": 1}})),
        "tools": [tool("weather", {"city": {"type": "string", "enum": ["Rome"]}})],
    },
    {
        "messages": turn(call("solve", {"expression": "1+1", "where": {"lon": 2}})),
        "tools": [tool("solve", {"expression": {"type": "string"}}), tool("now", {})],
    },
    {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi."}]},
]
MESSAGE_FEATURES = {
    "role": Value("string"),
    "content": Value("string"),
    "tool_calls": List(
        {"type": Value("string"), "function": {"name": Value("string"), "arguments": Json()}}
    ),
}
FEATURES = {
    "struct columns": None,
    "arguments as Json": Features({"messages": List(MESSAGE_FEATURES), "tools": Json()}),
    "messages as Json": Features({"messages": List(Json()), "tools": List(Json())}),
    "columns as Json": Features({"messages": Json(), "tools": Json()}),
}


@pytest.mark.parametrize("form", FEATURES)
@pytest.mark.parametrize("stored_as", ["parquet", "save_to_disk", "splits on disk"])
def test_messages_and_tools_come_back_from_tables_as_they_were(tmp_path, form, stored_as):
    rows = [{"tools": None, **row} for row in TOOL_ROWS]
    table = hub.Dataset.from_list(rows, features=FEATURES[form])
    place = tmp_path / ("rows.parquet" if stored_as == "parquet" else "saved")
    if stored_as == "parquet":
        table.to_parquet(place)
    elif stored_as == "save_to_disk":
        table.save_to_disk(place)
    else:
        hub.DatasetDict({"train": table}).save_to_disk(place)
    read = load_rows(str(place), "train")
    for row, original in zip(read, TOOL_ROWS, strict=True):
        assert conversation_of(row, "x") == conversation_of(original, "x")
    assert read[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Rome",
        "where": {"lat": 1},
    }
    assert read[1].location.endswith("row 2")


def test_null_inside_of_json_stays_and_so_do_null_columns(tmp_path):
    arguments = {"city": "Rome", "unit": None}
    rows = [{"messages": turn(call("weather", arguments)), "hint": {"a": None, "b": 1}}]
    features = Features(
        {"messages": List(MESSAGE_FEATURES), "hint": {"a": Value("string"), "b": Value("int64")}}
    )
    hub.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    [row] = load_rows(str(tmp_path / "rows.parquet"), "train")
    assert row["messages"][1]["tool_calls"] == [call("weather", arguments)]
    assert row["hint"] == {"a": None, "b": 1}, "a reward function reads the column as it is"


def test_a_mixed_table_has_the_layout_of_each_row(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"messages": chat, "prompt": None, "completion": None},
        {"messages": None, "prompt": "a", "completion": "b"},
    ]
    hub.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    read = load_rows(str(tmp_path / "rows.parquet"), "train")
    conversation: Any = conversation_of(read[1], "x")
    assert [message["content"] for message in conversation] == ["a", "b"]
    assert all(prompt_of(row, "x") == chat[:1] for row in read)


def test_the_layout_of_multilingual_thinking_is_read(tmp_path):
    messages = [
        {"role": "system", "content": "reasoning language: French", "thinking": None},
        {"role": "user", "content": "Why?", "thinking": None},
        {"role": "assistant", "content": "Because.", "thinking": "Parce que."},
    ]
    row = {
        "reasoning_language": "French",
        "developer": "You are kind.",
        "user": "Why?",
        "analysis": "Parce que.",
        "final": "Because.",
        "messages": messages,
    }
    hub.Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    [read] = load_rows(str(tmp_path / "rows.parquet"), "train")
    assert conversation_of(read, "x") == [
        {"role": "system", "content": "reasoning language: French"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because.", "reasoning_content": "Parce que."},
    ]


def test_splits_may_have_any_name(tmp_path):
    for split, count in (("train_sft", 3), ("test_sft", 2), ("train_prefs", 1)):
        table = hub.Dataset.from_list([{"prompt": f"{split} {n}"} for n in range(count)])
        (tmp_path / "files/data").mkdir(parents=True, exist_ok=True)
        table.to_parquet(tmp_path / f"files/data/{split}-00000-of-00001.parquet")
        table.save_to_disk(tmp_path / "saved" / split)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train_sft", "test_sft"]}')
    for place in ("files", "saved"):
        dataset = str(tmp_path / place)
        splits = row_splits(dataset, None, 0, "train_sft", "test_sft")
        assert (len(splits.train), len(splits.test)) == (3, 2)
        assert len(row_splits(dataset, None, 0, "train_prefs").test) == 0
        assert has_split(dataset, "train_prefs")
        with pytest.raises(UserError, match=r"train_split=\.\.\."):
            open_rows(dataset, "train")
        with pytest.raises(UserError, match="has no validation"):
            row_splits(dataset, None, 0, "train_sft", "validation")
