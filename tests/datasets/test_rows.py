"""Datasets on disk, in the directory layouts that are supported."""

import json
import logging
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from planish.datasets import rows
from planish.datasets.rows import has_split, load_rows
from planish.errors import UserError
from planish.evaluation.tasks import load_task


def write(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [{"n": value} for value in values]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in made))


LAYOUTS = {
    "flat": "train.jsonl",
    "a folder of the configuration": "main/train.jsonl",
    "shards in it": "main/train-00000-of-00001.parquet",
    "data": "data/train-00000-of-00001.parquet",
    "as the hub converts": "default/train/0000.parquet",
    "the only configuration": "socratic/train.jsonl",
    "a folder of the split": "train/part.jsonl",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_of_the_hub_is_read(tmp_path, layout):
    write(tmp_path / LAYOUTS[layout], 1, 2)
    write(tmp_path / LAYOUTS[layout].replace("train", "test"), 3)
    assert load_rows(str(tmp_path), "train") == [{"n": 1}, {"n": 2}]
    assert load_rows(str(tmp_path), "test") == [{"n": 3}]
    assert has_split(str(tmp_path), "test")
    assert not has_split(str(tmp_path), "validation")


def test_a_configuration_is_named_after_a_colon(tmp_path):
    write(tmp_path / "one/train.jsonl", 1)
    write(tmp_path / "two/train.jsonl", 2)
    assert load_rows(f"{tmp_path}:two", "train") == [{"n": 2}]
    assert has_split(f"{tmp_path}:two", "train")
    with pytest.raises(UserError, match="several configurations: one, two; name one, such as"):
        load_rows(str(tmp_path), "train")
    with pytest.raises(UserError, match="its folder three; found one/train.jsonl, two/train.jsonl"):
        load_rows(f"{tmp_path}:three", "train")


def test_other_folders_with_files_of_the_split_are_named_once(tmp_path, caplog):
    write(tmp_path / "main/train.jsonl", 1)
    write(tmp_path / "socratic/train.jsonl", 2)
    assert load_rows(str(tmp_path), "train") == [{"n": 1}]
    message = (
        f"dataset {tmp_path}: main/train.jsonl is read, and not the train split in socratic; to read "
        f"that, name the folder: {tmp_path}:socratic"
    )
    assert has_split(str(tmp_path), "train")
    assert caplog.messages == [message]
    write(tmp_path / "train.jsonl", 3)
    assert load_rows(str(tmp_path), "train") == [{"n": 3}]
    assert "train.jsonl is read, and not the train split in main, socratic" in caplog.messages[1]
    assert load_rows(f"{tmp_path}:socratic", "train") == [{"n": 2}]
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            ["00000-of-00003", "00002-of-00003"],
            "has 2 of the 3 files of its train split; number 1 ",
        ),
        (["00000-of-00002"], "has 1 of the 2 files of its train split; number 1 is missing"),
        (["2-of-2"], "has 1 of the 2 files of its train split; number 1 is missing"),
        (["0-of-1", "0-of-2", "1-of-2"], "its train split in 1 and in 2 files"),
    ],
)
def test_missing_files_of_a_divided_split_are_an_error(tmp_path, numbers, message):
    for number in numbers:
        write(tmp_path / f"data/train-{number}.parquet", 1)
    with pytest.raises(UserError, match=message):
        load_rows(str(tmp_path), "train")


def test_files_of_a_divided_split_may_be_numbered_from_1(tmp_path):
    write(tmp_path / "train-1-of-2.jsonl", 1)
    write(tmp_path / "train-2-of-2.jsonl", 2)
    assert load_rows(str(tmp_path), "train") == [{"n": 1}, {"n": 2}]


def test_an_error_lists_what_is_there(tmp_path):
    write(tmp_path / "main/training.jsonl", 1)
    with pytest.raises(UserError, match="no train.jsonl .* found main/training.jsonl. Add that"):
        load_rows(str(tmp_path), "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="found no data files"):
        load_rows(str(tmp_path / "empty"), "train")


def test_a_directory_with_the_name_of_a_hub_dataset_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rows, "_logged_warnings", set())
    write(tmp_path / "openai/gsm8k/train.jsonl", 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert load_rows("openai/gsm8k", "train") == [{"n": 1}]
    assert caplog.messages == [
        "dataset openai/gsm8k: the directory of this name is read, not the hub"
    ]


def test_an_empty_directory_that_hides_a_hub_name_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai/gsm8k").mkdir(parents=True)
    with pytest.raises(UserError, match="rename the directory to read the hub's dataset"):
        load_rows("openai/gsm8k", "train")


def test_an_evaluation_takes_the_layouts_too(tmp_path):
    path = tmp_path / "main/test.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"question": "1+1?", "answer": "2\n#### 2"}) + "\n")
    assert len(load_task("gsm8k", data=str(tmp_path)).questions) == 1


def test_a_split_in_a_file_of_its_own_and_in_others_is_not_read_twice(tmp_path):
    for other in ("train-old.jsonl", "train-00000-of-00001.jsonl", "train/part.jsonl"):
        folder = tmp_path / other.replace("/", "-")
        write(folder / "train.jsonl", 1, 2)
        write(folder / other, 1, 2)
        with pytest.raises(UserError, match=f"train split in train.jsonl, and also in {other}"):
            load_rows(str(folder), "train")


def test_files_of_a_split_that_are_not_numbered_are_named(tmp_path, caplog):
    write(tmp_path / "train-old.jsonl", 1, 2)
    write(tmp_path / "train-new.jsonl", 1, 2)
    assert len(load_rows(str(tmp_path), "train")) == 4
    message = (
        f"dataset {tmp_path}: the train split is read from 2 files, train-new.jsonl, train-old"
    )
    assert message in caplog.text


def test_numbered_files_of_a_split_are_read_without_a_warning(tmp_path, caplog):
    for number in range(2):
        write(tmp_path / f"train-{number}.jsonl", 1, 2)
        write(tmp_path / "validation" / f"000{number}.jsonl", 1, 2)
    for split in ("train", "validation"):
        assert len(load_rows(str(tmp_path), split)) == 4
    assert caplog.text == ""
