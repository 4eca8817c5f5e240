"""Metrics by column, and the series that charts draw."""

import numpy as np

from planish.console.metric_table import MetricTable


def table(rows) -> MetricTable:
    found = MetricTable()
    found.add(rows)
    return found


def test_a_metric_has_the_steps_of_its_own_rows():
    found = table([{"step": 0, "a": 1.0}, {"step": 1, "b": 2}, {"step": 2, "a": 3.0}])
    steps, values = found.values("a")
    assert steps.tolist() == [0, 2]
    assert values.tolist() == [1, 3]
    assert found.last("b") == 2.0
    assert found.last("none") is None


def test_a_later_row_of_a_step_counts():
    found = table([{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0}, {"step": 0, "a": 5.0}])
    steps, values = found.values("a")
    assert steps.tolist() == [0, 1]
    assert values.tolist() == [5, 2]


def test_rows_of_the_cookbook_count_by_their_batch():
    found = table([{"progress/batch": 3, "a": 1.0}])
    assert found.values("a")[0].tolist() == [3]


def test_values_that_are_no_finite_numbers_are_left_out():
    rows = [
        {"step": 0, "a": float("nan")},
        {"step": 1, "a": True},
        {"step": 2, "a": "text"},
        {"step": 3, "a": 10**400},
        {"step": 4, "a": 7},
        {"step": "x", "a": 8},
        {"a": 9},
    ]
    assert table(rows).values("a")[1].tolist() == [7]


def test_few_points_are_returned_as_they_are():
    series = table([{"step": i, "a": i * i} for i in range(10)]).series("a", 10)
    assert series.y.tolist() == [i * i for i in range(10)]
    assert series.low is None


def test_many_points_become_buckets_with_mean_and_extremes():
    values = np.arange(1000.0)
    series = table([{"step": i, "a": v} for i, v in enumerate(values.tolist())]).series("a", 100)
    buckets = values.reshape(100, 10)
    assert series.y.tolist() == buckets.mean(1).tolist()
    assert series.low is not None
    assert series.high is not None
    assert series.low.tolist() == buckets.min(1).tolist()
    assert series.high.tolist() == buckets.max(1).tolist()
    assert series.steps.tolist() == buckets[:, -1].tolist()
    assert series.num_points == 1000


def test_a_zoomed_series_reaches_one_point_beyond_both_edges():
    series = table([{"step": i, "a": i} for i in range(10)]).series("a", 100, low=3.5, high=6.5)
    assert series.steps.tolist() == [3, 4, 5, 6, 7]


def test_the_time_axis_is_the_sum_of_the_steps():
    rows = [{"step": 0, "time/total": 2.0, "a": 1}, {"step": 1, "time/total": 3.0, "a": 2}]
    assert table(rows).series("a", 10, by_time=True).x.tolist() == [2, 5]
    assert table([{"step": 0, "a": 1}]).series("a", 10, by_time=True).x.tolist() == []
