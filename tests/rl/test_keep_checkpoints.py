"""The last n and the best k checkpoints of a run are kept, and the others are deleted."""

import asyncio
import itertools

import pytest
from digest_service import FakeService, Killed
from digit_env import DigitsBuilder
from hypothesis import given, strategies as st

from planish.errors import UserError
from planish.files import read_rows
from planish.runlog.evaluators import SamplingClientEvaluator
from planish.runlog.retention import Retention
from planish.training.rl_config import Config
from planish.training.train_rl import main

SCORES = (0.1, 0.7, 0.3, 0.9, 0.2, 0.7, 0.0)
"""The score of the weights after 0, 1, ... steps."""


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    monkeypatch.setattr("planish.training.run_loop.code_diff", lambda paths: "")


class Score(SamplingClientEvaluator):
    name = "test"

    async def __call__(self, sampling_client):
        return {"score": SCORES[sampling_client.weights.steps]}


def train(service, path, **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": DigitsBuilder(),
        "model_name": "tiny",
        "max_tokens": 8,
        "log_path": str(path),
        "save_every": 1,
        "eval_every": 1,
        "evaluator_builders": [Score],
        "num_groups_to_log": 0,
        "rollout_json_export": False,
        **changes,
    }
    return asyncio.run(main(Config(**options), service))


def batches(path):
    return [record["batch"] for record in read_rows(path / "checkpoints.jsonl")]


def paths(path):
    return {
        record[name]
        for record in read_rows(path / "checkpoints.jsonl")
        for name in ("state_path", "sampler_path")
    }


BEST = {"keep_last": 1, "keep_best": 2, "best_metric": "score"}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 2}, [4, 5, 6]),
        (BEST, [3, 5, 6]),
        ({**BEST, "keep_last": 2}, [3, 4, 5, 6]),
        ({**BEST, "keep_best": 3}, [1, 3, 5, 6]),
        ({**BEST, "best_metric_mode": "min"}, [2, 4, 5, 6]),
        ({**BEST, "keep_best": 9}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_last_and_the_best_are_kept_and_the_others_deleted(service, tmp_path, options, kept):
    train(service, tmp_path, **options)
    assert batches(tmp_path) == kept, "the last one is the final checkpoint"
    assert set(service.states) == paths(tmp_path)


def test_the_best_are_named_when_the_run_ends(service, tmp_path, capsys):
    train(service, tmp_path, **BEST)
    out = capsys.readouterr().out.replace("\n", " ")
    assert "score = 0.9 after 3 steps: tinker://run0/sampler_weights/000003" in out
    assert "score = 0.7 after 5 steps: tinker://run0/sampler_weights/000005" in out


def test_a_killed_run_keeps_the_same_checkpoints(service, tokenizer, tmp_path):
    whole = FakeService(tokenizer)
    train(whole, tmp_path / "whole", **BEST)
    for die_at in range(20, len(whole.operations), 23):
        path, killed = tmp_path / str(die_at), FakeService(tokenizer)
        killed.die_at = die_at
        with pytest.raises(Killed):
            train(killed, path, **BEST)
        killed.die_at = None
        train(killed, path, **BEST)
        assert batches(path) == [3, 5, 6]
        assert killed.clients[-1].weights == whole.clients[-1].weights


def test_a_deleted_checkpoint_of_another_kind_of_run_stays(service, tmp_path):
    """Rolling states have their own rule, and final ones are never deleted."""
    train(service, tmp_path, keep_last=1, save_every=2, rolling_save_every=1, max_steps=3)
    train(service, tmp_path, keep_last=1, save_every=2, rolling_save_every=1, max_steps=6)
    records = read_rows(tmp_path / "checkpoints.jsonl")
    final = [record["batch"] for record in records if record.get("final")]
    periodic = [
        record["batch"]
        for record in records
        if not record.get("final") and not record.get("rolling")
    ]
    assert (final, periodic) == ([3, 6], [4])


def test_the_options_may_change_when_a_run_resumes(service, tmp_path):
    train(service, tmp_path, max_steps=4)
    train(service, tmp_path, max_steps=6, keep_last=1)
    assert batches(tmp_path) == [4, 5, 6], "the final checkpoint after 4 steps stays"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last=0: give a whole number of at least 1"),
        ({"keep_best": -1}, "keep_best=-1: give a whole number"),
        ({"keep_best": 1, "best_metric": "score"}, "keep_last=None: give a number"),
        ({"keep_best": 1, "keep_last": 1}, "best_metric=None: give the metric"),
        ({"best_metric": "score"}, "best_metric=score: give keep_best too"),
        ({**BEST, "best_metric_mode": "best"}, "best_metric_mode=best: give max or min"),
        ({**BEST, "save_every": 3, "eval_every": 2}, "save_every=3: give a multiple of eval_every"),
        ({**BEST, "save_every": 0}, "save_every=0: give a multiple of eval_every"),
        (
            {**BEST, "eval_every": 0, "evaluator_builders": ()},
            "save_every=1: give a multiple of eval_every",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_rejected(service, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train(service, tmp_path / "run", **options)
    assert service.operations == []


def test_a_metric_that_the_evaluations_lack_is_named_before_the_first_step(service, tmp_path):
    with pytest.raises(UserError, match="best_metric=test/acc: .* give one of score$"):
        train(service, tmp_path, **{**BEST, "best_metric": "test/acc"})
    assert "optim_step" not in service.operations


@given(
    st.dictionaries(st.integers(0, 50), st.none() | st.integers(0, 4), max_size=12),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
)
def test_the_best_are_those_that_no_other_beats(scores, last, best, is_highest_best):
    values = {batch: score for batch, score in scores.items() if score is not None}
    retention = Retention(last, best, "score", is_highest_best)
    kept = retention.kept(scores, values)
    assert set(sorted(scores)[-last:]) <= kept <= set(scores)
    chosen = retention.best(scores, values)
    assert len(chosen) == min(best, len(values))

    def beats(a, b):
        order = values[a] - values[b] if is_highest_best else values[b] - values[a]
        return order > 0 or (order == 0 and a > b)

    assert all(beats(a, b) for a, b in itertools.pairwise(chosen))
    assert all(beats(a, b) for a in chosen for b in values.keys() - set(chosen))
