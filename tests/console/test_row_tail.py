"""Reading JSONL files that grow, are rewritten, or are damaged."""

import json
import os
from pathlib import Path

import pytest

from planish.console.row_tail import RowTail
from planish.files import RowFile, write_atomically


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(rows) -> list[int]:
    return [row["step"] for row in rows]


def lines(*numbers: int) -> bytes:
    return b"".join(json.dumps({"step": number}).encode() + b"\n" for number in numbers)


def test_only_new_rows_are_read(path):
    tail = RowTail(path)
    assert tail.read() == []
    path.write_bytes(lines(0, 1))
    assert steps(tail.read()) == [0, 1]
    assert tail.read() == []
    with open(path, "ab") as file:
        file.write(lines(2))
    assert steps(tail.read()) == [2]
    assert tail.generation == 0


def test_an_incomplete_last_line_is_read_when_it_is_complete(path):
    tail = RowTail(path)
    whole = lines(0, 1)
    path.write_bytes(whole[:-4])
    assert steps(tail.read()) == [0]
    path.write_bytes(whole)
    assert steps(tail.read()) == [1]
    assert tail.problems() == []


def test_a_row_that_is_cut_within_a_character_is_read_when_it_is_complete(path):
    line = json.dumps({"step": 0, "text": "é"}, ensure_ascii=False).encode() + b"\n"
    tail = RowTail(path)
    path.write_bytes(line[:-4])
    assert tail.read() == []
    path.write_bytes(line)
    assert steps(tail.read()) == [0]


def test_a_resumed_run_is_read_from_the_start(path):
    file = RowFile(path)
    file.append(*({"step": step} for step in range(5)))
    tail = RowTail(path)
    assert steps(tail.read()) == [0, 1, 2, 3, 4]
    file.keep(lambda row: row["step"] < 3)
    file.append({"step": 3, "again": True})
    assert steps(tail.read()) == [0, 1, 2, 3]
    assert tail.generation == 1
    file.close()


@pytest.mark.parametrize("size_change", [-9, 0, 12])
def test_a_file_that_is_rewritten_in_place_is_read_from_the_start(path, size_change):
    path.write_bytes(lines(10, 11, 12))
    tail = RowTail(path)
    assert len(tail.read()) == 3
    inode = path.stat().st_ino
    content = lines(20, 21, 22) + (lines(23) if size_change > 0 else b"")
    path.write_bytes(content if size_change >= 0 else lines(20, 21))
    assert path.stat().st_ino == inode
    assert steps(tail.read())[:2] == [20, 21]
    assert tail.generation == 1


def test_a_damaged_line_is_named_and_left_out(path):
    path.write_bytes(lines(0) + b"{broken\n" + b"[1]\n" + b"\xff\xfe\n" + lines(4))
    tail = RowTail(path)
    assert steps(tail.read()) == [0, 4]
    first, *_ = tail.problems()
    assert "metrics.jsonl, line 2 is not a JSON object" in first
    assert "{broken" in first
    assert tail.num_damaged == 3
    write_atomically(path, lines(0))
    assert steps(tail.read()) == [0]
    assert tail.problems() == []


def test_not_a_number_is_read_as_python_writes_it(path):
    path.write_text('{"step": 1, "loss": NaN, "kl": Infinity}\n')
    [row] = RowTail(path).read()
    assert row["loss"] != row["loss"]
    assert row["kl"] == float("inf")


def test_a_deep_line_is_damaged_and_nothing_worse(path):
    path.write_bytes(b"[" * 100_000 + b"\n" + lines(1))
    tail = RowTail(path)
    assert steps(tail.read()) == [1]
    assert tail.num_damaged == 1


def test_a_file_that_disappears_and_comes_back_is_read_again(path):
    path.write_bytes(lines(0))
    tail = RowTail(path)
    tail.read()
    os.remove(path)
    assert tail.read() == []
    path.write_bytes(lines(0, 1))
    assert steps(tail.read()) == [0, 1]
    assert tail.generation == 1


def test_a_directory_in_place_of_the_file_is_reported(path):
    path.mkdir()
    tail = RowTail(path)
    assert tail.read() == []
    assert "metrics.jsonl cannot be read" in tail.problems()[0]


def test_a_large_file_is_read_in_parts(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1000)))
    tail = RowTail(path, max_read_bytes=4000)
    parts = []
    while (rows := tail.read()) and len(parts) < 100:
        parts.append(rows)
        assert bool(tail.unread_bytes) == any("is being read" in text for text in tail.problems())
    assert [row["step"] for part in parts for row in part] == list(range(1000))
    assert len(parts) == 4
    assert tail.problems() == []
    with open(path, "a") as file:
        file.write(json.dumps({"text": "x" * 10_000}) + "\n")
    assert [len(row["text"]) for row in tail.read()] == [10_000]
    assert tail.unread_bytes == 0


def test_lines_that_would_join_are_damaged(tmp_path):
    """Blocks of lines are parsed together, and each line counts on its own all the same."""
    path = tmp_path / "rows.jsonl"
    lines = ['{"a":1},{"b":2}', '{"c":[{"d":1}', '{"e":2}]}', '{"f":3}']
    path.write_text("\n".join(lines) + "\n")
    tail = RowTail(path)
    assert tail.read() == [{"f": 3}]
    assert [damage.line for damage in tail.damaged] == [1, 2, 3]
