"""Epochs, orders, splits, and rows that cannot be trained on."""

import json
from typing import Any

import datasets as hub
import pytest
from ledger_service import learned

from planish.errors import UserError
from planish.renderers import TrainOnWhat
from planish.supervised.datasets import (
    FromConversationFileBuilder,
    FromRowsBuilder,
    RowDataset,
    row_splits,
)
from planish.supervised.types import Batch, ChatDatasetBuilderCommonConfig

ROWS = [{"n": n} for n in range(10)]


def say(number):
    return {
        "messages": [
            {"role": "user", "content": f"Say {number}."},
            {"role": "assistant", "content": f"It is {number}."},
        ]
    }


def numbers(dataset):
    """Return a dataset of numbers in place of datums."""
    return [dataset.get_batch(index) for index in range(len(dataset))]


def of(rows, batch_size, **options):
    return RowDataset(rows, batch_size, lambda row: Batch([row["n"]]), **options)


def config(**changes):
    return ChatDatasetBuilderCommonConfig(
        **{"model_name_for_tokenizer": "tiny", "batch_size": 4, **changes}
    )


def test_each_epoch_shuffles_and_has_each_row_at_most_once():
    dataset = of(ROWS, 3, shuffle_seed=0)
    first = numbers(dataset)
    assert [len(batch) for batch in first] == [3, 3, 3]
    assert len({n for batch in first for n in batch}) == 9
    dataset.set_epoch(1)
    second = numbers(dataset)
    assert second != first
    dataset.set_epoch(0)
    assert numbers(dataset) == first
    assert numbers(of(ROWS, 3, shuffle_seed=1)) != first


def test_the_order_equals_that_of_published_runs():
    published = hub.Dataset.from_list(ROWS).shuffle(seed=0)
    dataset = of(ROWS, 10, shuffle_seed=0)
    for epoch in (0, 1, 2):
        dataset.set_epoch(epoch)
        assert numbers(dataset) == [published.shuffle(seed=epoch)["n"]]


def test_without_a_seed_rows_keep_their_order():
    dataset = of(ROWS, 4, drop_last=False)
    dataset.set_epoch(3)
    assert numbers(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(IndexError):
        dataset.get_batch(3)


def test_a_batch_larger_than_an_epoch_is_rejected():
    with pytest.raises(UserError, match="batch_size=11: there are 10 rows"):
        of(ROWS, 11)
    with pytest.raises(UserError, match="batch_size=0"):
        of(ROWS, 0)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_evaluation_rows_are_the_test_split_or_held_out(tmp_path):
    file = write(tmp_path / "all.jsonl", ROWS)
    held = row_splits(file, 3, 0)
    assert (len(held.train), len(held.test)) == (7, 3)
    assert sorted(row["n"] for part in (held.train, held.test) for row in part) == list(range(10))
    assert list(row_splits(file, 3, 0).test) == list(held.test)
    assert list(row_splits(file, None, 0).test) == []
    assert list(row_splits(file, 0, 0).train) == ROWS
    (tmp_path / "both").mkdir()
    write(tmp_path / "both/train.jsonl", ROWS)
    write(tmp_path / "both/test.jsonl", ROWS[:5])
    for size, expected in ((None, 5), (2, 2), (0, 0), (9, 5)):
        splits = row_splits(str(tmp_path / "both"), size, 0)
        assert (len(splits.train), list(splits.test)) == (10, ROWS[:expected])
    for size in (10, -1):
        with pytest.raises(UserError, match=f"test_size={size}"):
            row_splits(file, size, 0)


def test_a_missing_test_split_is_not_requested(monkeypatch):
    tables = {"train": hub.Dataset.from_list(ROWS), "test": hub.Dataset.from_list(ROWS[:4])}
    monkeypatch.setattr(hub, "load_dataset", lambda name, config, split: tables[split])
    monkeypatch.setattr(hub, "get_dataset_split_names", lambda name, config: list(tables))
    assert [row["n"] for row in row_splits("some/chats", 2, 0).test] == [0, 1]
    del tables["test"]
    splits = row_splits("some/chats", 2, 0)
    assert (len(splits.train), len(splits.test)) == (8, 2)
    monkeypatch.setattr(hub, "get_dataset_split_names", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="the names of its splits"):
        row_splits("some/chats", 2, 0)


def test_a_file_of_conversations_is_read(chats, tokenizer):
    train, test = FromConversationFileBuilder(
        common_config=config(), file_path=str(chats), test_size=3
    )()
    assert test is not None
    assert (len(train), len(test)) == (2, 1)
    texts = [
        learned(datum, tokenizer)
        for part in (train, test)
        for index in range(len(part))
        for datum in part.get_batch(index)
    ]
    assert len(set(texts)) == 11
    assert all(text.startswith("It is ") and text.endswith(".<|im_end|>") for text in texts)


BAD = {
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "line 2: .*'robot'"),
    "nothing": (
        {"messages": [{"role": "user", "content": "x"}]},
        "line 2: .*nothing to train on",
    ),
    "form": ({"body": "x"}, "line 2: the row has"),
    "reasoning": (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "line 2: .*thinking",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_untrainable_row_is_named_before_training(name, tmp_path):
    row, message = BAD[name]
    good = {"messages": [{"role": "assistant", "content": "x"}]}
    path = write(tmp_path / "chats.jsonl", [good, row, good, good, good])
    with pytest.raises(UserError, match=message):
        FromRowsBuilder(common_config=config(), dataset=path)()


def test_held_out_rows_keep_their_numbers(tmp_path):
    good = {"messages": [{"role": "assistant", "content": "x"}]}
    path = write(tmp_path / "chats.jsonl", [*[good] * 9, {"body": "x"}])
    with pytest.raises(UserError, match="line 10: the row has"):
        FromRowsBuilder(common_config=config(), dataset=path, test_size=4)()


def test_unused_columns_are_named_once_with_their_rows(tmp_path, caplog):
    chat = say(1)
    rows = [chat, {**chat, "source": "web"}, {**chat, "source": "books", "id": 7}, chat]
    path = write(tmp_path / "chats.jsonl", rows)
    for _ in range(2):
        FromRowsBuilder(common_config=config(), dataset=path)()
    assert [record.getMessage() for record in caplog.records] == [
        f'dataset {path}: columns that are not used: "source" (2 rows, first in {path}, line 2), '
        f'"id" (1 row, first in {path}, line 3)'
    ]


def test_rows_that_do_not_fill_a_batch_are_counted(tmp_path, caplog):
    path = write(tmp_path / "chats.jsonl", [say(number) for number in range(12)])
    for batch_size in (4, 5):
        FromRowsBuilder(common_config=config(batch_size=batch_size), dataset=path, test_size=0)()
    assert [record.getMessage() for record in caplog.records] == [
        "batch_size=5: 2 of 12 rows do not fill a batch and are left out of each epoch"
    ]


def test_only_the_completion_is_learned(tmp_path, tokenizer):
    row = {
        "prompt": [*say(1)["messages"], {"role": "user", "content": "And?"}],
        "completion": [{"role": "assistant", "content": "More."}],
    }
    path = write(tmp_path / "chats.jsonl", [row])
    for what in ("all_assistant_messages", "all_messages", "last_assistant_turn"):
        train, _ = FromRowsBuilder(
            common_config=config(batch_size=1, train_on_what=TrainOnWhat(what)), dataset=path
        )()
        [datum] = train.get_batch(0)
        assert learned(datum, tokenizer) == "More.<|im_end|>"


@pytest.mark.parametrize("renderer_name", [None, "qwen3"])
def test_a_plain_text_is_learned_as_its_tokens(tmp_path, tokenizer, renderer_name):
    texts = ["Once upon a time.", "<|im_start|>user\nHi.<|im_end|>"]
    path = write(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    train, _ = FromRowsBuilder(
        common_config=config(batch_size=2, reduction="none", renderer_name=renderer_name),
        dataset=path,
        shuffle_seed=None,
    )()
    for text, datum in zip(texts, train.get_batch(0), strict=True):
        ids = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
        expected = tokenizer.encode(text, add_special_tokens=False)
        if expected[-1] != tokenizer.eos_token_id:
            expected.append(tokenizer.eos_token_id)
        assert ids == expected
        assert set(datum.loss_fn_inputs["weights"].tolist()) == {1.0}
    [cut] = FromRowsBuilder(common_config=config(batch_size=1, max_length=4), dataset=path)()[
        0
    ].get_batch(0)
    assert cut.model_input.length == 4


@pytest.mark.parametrize(
    "train_on_what", [TrainOnWhat.ALL_ASSISTANT_MESSAGES, TrainOnWhat.ALL_MESSAGES]
)
def test_conversations_that_end_without_an_answer_are_counted(tmp_path, caplog, train_on_what):
    rows = [say(number) for number in range(5)]
    for number in (1, 3):
        rows[number]["messages"].append({"role": "user", "content": "And then?"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    FromRowsBuilder(common_config=config(train_on_what=train_on_what), dataset=str(path))()
    message = f"2 of 5 conversations of {path}, the first in {path}, line 2, end without an answer"
    assert (message in caplog.text) == (train_on_what is TrainOnWhat.ALL_ASSISTANT_MESSAGES)


@pytest.mark.parametrize("empty", ["", " \n", []])
def test_empty_answers_are_counted(tmp_path, caplog, empty):
    rows: list[dict[str, Any]] = [say(number) for number in range(5)]
    rows[2]["messages"][1]["content"] = empty
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    rows[3]["messages"][1] |= {"content": empty, "tool_calls": [call]}
    rows[4]["messages"][1:1] = [{"role": "assistant", "content": empty, "weight": 0}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    FromRowsBuilder(common_config=config(), dataset=str(path))()
    message = f"1 of 5 conversations of {path}, the first in {path}, line 3, have an empty answer"
    assert message in caplog.text
