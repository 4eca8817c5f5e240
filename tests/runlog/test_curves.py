"""The curves that are plotted, from metrics files of runs."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from planish.errors import UserError
from planish.runlog.curves import Run, panels_to_draw, points_by_metric, read_runs, running_means


def run(name: str, **points: dict[float, float]) -> Run:
    return Run(name, Path(name), {key.replace("__", "/"): values for key, values in points.items()})


def write_run(directory: Path, *rows: dict) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_a_metric_is_drawn_where_it_is_and_as_it_was_last():
    rows = [
        {"step": 0, "a": 1.0, "b": 5},
        {"step": 2, "a": 2.0},
        {"step": 1, "a": 3.0, "b": None},
        {"step": 2, "a": 4.0},
    ]
    assert points_by_metric(rows) == {"a": {0: 1.0, 1: 3.0, 2: 4.0}, "b": {0: 5}}
    assert list(points_by_metric(rows)["a"]) == [0, 1, 2]


def test_rows_without_a_step_are_placed_by_their_batch_or_left_out():
    assert points_by_metric(
        [{"progress/batch": 4, "a": 1.0}, {"a": 9.0}, {"step": None, "a": 8.0}]
    )["a"] == {4: 1.0}


def test_what_is_no_finite_number_is_no_point():
    row = {
        "step": 0,
        "text": "x",
        "flag": True,
        "nan": math.nan,
        "inf": math.inf,
        "list": [1],
        "a": 1,
    }
    assert points_by_metric([row]) == {"a": {0: 1}}


def test_default_panels_are_those_that_a_run_has_something_for():
    runs = [
        run(
            "a",
            env__all__reward__total={0: 0.1},
            reward__total={0: 0.2},
            test__env__all__correct={0: 0.3},
        ),
        run(
            "b",
            reward__total={0: 0.4},
            train_mean_nll={0: 2.0},
            test__nll={0: 3.0},
            env__all__turns_per_episode={0: 1},
        ),
    ]
    panels = {
        panel.title: [(c.run.name, c.key) for c in panel.curves]
        for panel in panels_to_draw(runs, None, 1)
    }
    assert panels == {
        "reward": [("a", "env/all/reward/total"), ("b", "reward/total")],
        "test": [("a", "test/env/all/correct")],
        "nats per learned token": [("b", "train_mean_nll"), ("b", "test/nll")],
    }


def test_turns_are_drawn_where_there_are_several():
    assert [
        p.title
        for p in panels_to_draw([run("a", env__all__turns_per_episode={0: 1, 1: 2.5})], None, 1)
    ] == ["turns per episode"]


def test_several_evaluators_share_the_test_panel_and_differ_in_style():
    both = run("a", test__env__all__correct={0: 0.5}, hard__env__all__correct={0: 0.1})
    [panel] = panels_to_draw([run("b", test__env__all__correct={0: 0.4}), both], None, 1)
    assert [(c.run_index, c.key, c.key_index) for c in panel.curves] == [
        (0, "test/env/all/correct", 0),
        (1, "hard/env/all/correct", 1),
        (1, "test/env/all/correct", 0),
    ]
    assert panel.keys == ["test/env/all/correct", "hard/env/all/correct"]


def test_chosen_metrics_are_a_panel_each():
    runs = [run("a", optim__lr={0: 1.0}, test__x={0: 1.0}, test__y={0: 2.0})]
    panels = panels_to_draw(runs, ["test/*", "optim/lr"], 1)
    assert [(panel.title, panel.keys) for panel in panels] == [
        ("test/*", ["test/x", "test/y"]),
        ("optim/lr", ["optim/lr"]),
    ]


def test_an_unknown_metric_is_rejected_with_the_list():
    with pytest.raises(UserError, match=r"metrics=rewards: no run has it; there are: optim/lr"):
        panels_to_draw([run("a", optim__lr={0: 1.0})], ["rewards"], 1)
    with pytest.raises(
        UserError, match=r"none of the usual metrics is there; name some of: optim/lr"
    ):
        panels_to_draw([run("a", optim__lr={0: 1.0})], None, 1)


def test_distances_over_powers_of_ten_are_logarithmic():
    [wide] = panels_to_draw([run("a", optim__kl_sample_train_v2={0: 1e-9, 1: 1e-4})], None, 1)
    [zero] = panels_to_draw([run("a", optim__kl_sample_train_v2={0: 0.0, 1: 1e-4})], None, 1)
    [reward] = panels_to_draw([run("a", reward__total={0: 1e-9, 1: 1.0})], None, 1)
    assert (wide.is_logarithmic, zero.is_logarithmic, reward.is_logarithmic) == (True, False, False)


def test_smoothing_counts_steps_not_points():
    assert running_means({0: 1.0, 1: 3.0, 2: 5.0, 3: 7.0}, 2) == [1.0, 2.0, 4.0, 6.0]
    assert running_means({0: 1.0, 20: 3.0, 40: 5.0}, 5) == [1.0, 3.0, 5.0]


@given(
    st.dictionaries(st.integers(0, 60), st.floats(-1e6, 1e6), min_size=1),
    st.integers(min_value=1, max_value=80),
)
def test_smoothing_equals_the_mean_of_the_window(points, window):
    points = dict(sorted(points.items()))
    slow = []
    for step in points:
        seen = [value for other, value in points.items() if step - window < other <= step]
        slow.append(math.fsum(seen) / len(seen))
    assert running_means(points, window) == slow


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    row = {"step": 0, "reward/total": 1.0}
    one, other = write_run(tmp_path / "a/lr_1", row), write_run(tmp_path / "b/lr_1", row)
    assert [r.name for r in read_runs([one])] == ["lr_1"]
    assert [r.name for r in read_runs([one, other / "metrics.jsonl"])] == ["a/lr_1", "b/lr_1"]
    assert [r.name for r in read_runs([one, one])] == ["lr_1", "lr_1"]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere: there is no such run"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match=r"there is no metrics\.jsonl in it"):
        read_runs([tmp_path])
    with pytest.raises(UserError, match=r"empty/metrics\.jsonl: no step has been written yet"):
        read_runs([write_run(tmp_path / "empty")])
