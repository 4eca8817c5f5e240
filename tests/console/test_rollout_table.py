"""Rollouts by column: filters, orders, histograms, and iterations that were written twice."""

import math

import numpy as np
import pytest

from planish.console.rollout_table import Filter, RolloutTable, histogram, rows_of_summary


def row(step, group=0, sample=0, reward=0.0, **fields):
    return {
        "step": step,
        "split": "train",
        "group": group,
        "sample": sample,
        "reward": reward,
        "tags": ["sums"],
        "errors": [],
        "ending": "completed",
        "tokens": 10,
        **fields,
    }


@pytest.fixture
def table() -> RolloutTable:
    found = RolloutTable()
    found.add(
        [
            row(0, 0, 0, 0.0, ending="max_tokens"),
            row(0, 0, 1, 1.0, tokens=30),
            row(0, 1, 0, 0.5, tags=["words", "hard"]),
            row(0, 1, 1, math.nan, errors=["TimeoutError"]),
            row(0, 0, 0, 0.25, split="eval/test"),
            row(1, 0, 0, 0.75),
        ]
    )
    return found


def chosen(table, **fields) -> list[tuple]:
    return [
        (found["step"], found["group"], found["sample"])
        for found in map(table.row, table.select(Filter(**fields)))
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"split": "train", "step_to": 0}, [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]),
        ({"split": "eval/test"}, [(0, 0, 0)]),
        ({"reward_from": 0.5}, [(0, 0, 1), (0, 1, 0), (1, 0, 0)]),
        ({"reward_to": 0.1}, [(0, 0, 0)]),
        ({"tag": "hard"}, [(0, 1, 0)]),
        ({"ending": "max_tokens"}, [(0, 0, 0)]),
        ({"error": "TimeoutError"}, [(0, 1, 1)]),
        ({"step_from": 1}, [(1, 0, 0)]),
        ({"group": 1}, [(0, 1, 0), (0, 1, 1)]),
        ({"tag": "none"}, []),
    ],
)
def test_filters(table, fields, expected):
    assert chosen(table, **fields) == expected


def test_orders_put_missing_values_last(table):
    rows = table.select(Filter(split="train"))
    best = [table.row(index)["reward"] for index in table.ordered(rows, "-reward")]
    assert best == [1, 0.75, 0.5, 0, None]
    worst = [table.row(index)["reward"] for index in table.ordered(rows, "reward")]
    assert worst == [0, 0.5, 0.75, 1, None]
    assert table.ordered(rows, "no such column").tolist() == rows.tolist()


def test_choices_are_counted(table):
    assert table.choices("split") == [("train", 5), ("eval/test", 1)]
    assert table.choices("tags") == [("sums", 5), ("hard", 1), ("words", 1)]


def test_an_iteration_that_was_written_twice_counts_once(table):
    table.add([row(1, 0, 0, 0.1), row(1, 0, 1, 0.2)])
    assert [table.row(i)["reward"] for i in table.select(Filter(step_from=1))] == [0.1, 0.2]
    table.add([row(1, 0, 0, 0.9)])
    assert [table.row(i)["reward"] for i in table.select(Filter(step_from=1))] == [0.9]


def test_rows_without_a_place_are_counted_and_left_out():
    table = RolloutTable()
    wrong = [{**row(0), "group": "x"}, {**row(2), "reward": "much"}]
    table.add([{"step": 0}, row(None), *wrong])
    assert table.num_invalid == 3
    assert [table.row(i)["reward"] for i in table.live_rows()] == [None]


def test_a_histogram_has_a_bar_for_each_of_few_values():
    bars = histogram(np.array([0.0, 1.0, 1.0, math.nan]))
    assert bars == [
        {"low": 0.0, "high": 0.0, "count": 1},
        {"low": 1.0, "high": 1.0, "count": 2},
    ]
    assert histogram(np.array([math.nan])) == []
    many = histogram(np.linspace(0, 1, 1000))
    assert len(many) == 24
    assert sum(bar["count"] for bar in many) == 1000


def test_summaries_of_the_public_cookbook_are_rows():
    summary = {
        "split": "train",
        "iteration": 3,
        "group_idx": 1,
        "traj_idx": 2,
        "tags": ["gsm8k"],
        "total_reward": 0.5,
        "sampling_client_step": 3,
        "steps": [
            {"ac_len": 7, "metrics": {}},
            {"ac_len": 5, "metrics": {"stop/completed": 0.0, "stop/max_tokens": 1.0}},
        ],
    }
    found = rows_of_summary(summary)
    assert found["step"] == 3
    assert found["tokens"] == 12
    assert found["turns"] == 2
    assert found["ending"] == "max_tokens"
    assert rows_of_summary({})["step"] is None
