"""Digests of rows depend on each value of each row and on the order, and on nothing else."""

import datetime
import json

import datasets as hub
import pytest

from planish.datasets.row_digests import digest_of, recorded_rows
from planish.datasets.rows import open_rows

ROWS = [
    {"prompt": "Say 1.", "tools": [{"name": "look", "limit": 1}], "score": 0.5},
    {"prompt": "Say 2.", "tools": None, "score": 1.5},
]
EDITS = {
    "a text": lambda rows: rows[1].update(prompt="Say 3."),
    "a value deep inside": lambda rows: rows[0]["tools"][0].update(limit=2),
    "a null": lambda rows: rows[1].update(tools=[]),
    "the order": lambda rows: rows.reverse(),
    "a column": lambda rows: [row.update(source="web") for row in rows],
}


def as_jsonl(rows, path):
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(rows, path):
    path = path.with_suffix(".parquet")
    hub.Dataset.from_list(rows).to_parquet(path)
    return path


def as_saved(rows, path):
    hub.Dataset.from_list(rows).save_to_disk(path)
    return path


def recorded(path):
    with recorded_rows() as digests:
        open_rows(str(path), "train")
        open_rows(str(path), "train")
    [(name, digest)] = digests.items()
    assert name == f"{path}, train"
    return digest


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_saved])
def test_every_edit_changes_the_digest_and_a_copy_does_not(write, tmp_path):
    first = recorded(write(ROWS, tmp_path / "first"))
    assert first.rows == 2
    assert recorded(write(ROWS, tmp_path / "copy")) == first
    for number, edit in enumerate(EDITS.values()):
        rows = json.loads(json.dumps(ROWS))
        edit(rows)
        assert recorded(write(rows, tmp_path / f"edit{number}")) != first, list(EDITS)[number]


def test_the_digest_of_a_table_does_not_depend_on_its_chunks(tmp_path):
    rows = [{"prompt": f"Say {n}.", "tools": None if n % 3 else [n]} for n in range(2500)]
    whole = hub.Dataset.from_list(rows)
    parts = hub.concatenate_datasets([whole.select(range(700)), whole.select(range(700, 2500))])
    whole.save_to_disk(tmp_path / "whole")
    parts.save_to_disk(tmp_path / "parts", num_shards=3)
    picked = whole.select([*range(2500)][::-1]).select([*range(2500)][::-1])
    picked.save_to_disk(tmp_path / "picked")
    first, second, third = (recorded(tmp_path / name) for name in ("whole", "parts", "picked"))
    assert first == second == third
    assert first.rows == 2500


def test_values_that_json_lacks_count_too():
    day, next_day = datetime.date(2026, 11, 1), datetime.date(2026, 11, 2)
    values = [day, next_day, b"\xff\x00", b"\xff\x01", float("nan"), "\ud800", None]
    digests = {digest_of([{"value": value}]).sha256 for value in values}
    assert len(digests) == len(values)


def test_nothing_is_recorded_outside_of_a_block(tmp_path):
    path = as_jsonl(ROWS, tmp_path / "rows")
    with recorded_rows() as digests:
        pass
    open_rows(str(path), "train")
    assert digests == {}
