"""When a run is evaluated, and evaluations with several answers to each test problem."""

import asyncio
import itertools
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest
from digit_env import Digits, DigitsBuilder
from metric_tables import definition_of

from planish.errors import UserError
from planish.files import read_rows
from planish.rl.rollout.evaluation import RepeatedGroup, RLTestSetEvaluator
from planish.rl.rollout.play import play
from planish.rl.types import EnvGroupBuilder
from planish.training.rl_config import Config
from planish.training.train_rl import main


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    monkeypatch.setattr("planish.training.run_loop.code_diff", lambda paths: "")


def train(service, path, **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": DigitsBuilder(tests=3),
        "model_name": "tiny",
        "max_tokens": 8,
        "log_path": str(path),
        "eval_every": 2,
        "num_groups_to_log": 0,
        **changes,
    }
    return asyncio.run(main(Config(**options), service))


def evaluated_steps(path):
    return [
        row["step"]
        for row in read_rows(path / "metrics.jsonl")
        if "test/env/all/reward/total" in row
    ]


def test_the_initial_weights_are_evaluated_unless_eval_on_start_is_false(service, tmp_path):
    train(service, tmp_path / "a")
    assert evaluated_steps(tmp_path / "a") == [0, 2, 4, 6]
    train(service, tmp_path / "b", eval_on_start=False)
    assert evaluated_steps(tmp_path / "b") == [2, 4, 6]


def test_a_finished_run_that_is_extended_keeps_its_final_evaluation(service, tmp_path):
    train(service, tmp_path, eval_on_start=False, max_steps=3)
    train(service, tmp_path, eval_on_start=False, max_steps=5)
    assert evaluated_steps(tmp_path) == [2, 3, 4, 5]


class RightIfOdd(Digits):
    """Groups whose answers are right if their digit is odd."""

    def get_batch(self, index):
        return [replace(group, size=1) for group in super().get_batch(index)]


@pytest.fixture
def odd_is_right(monkeypatch):
    from digit_env import DigitEnv

    step = DigitEnv.step

    async def graded(self, action, *, extra=None):
        result = await step(self, action, extra=extra)
        return replace(result, metrics={**result.metrics, "correct": result.reward})

    monkeypatch.setattr(DigitEnv, "step", graded)


def rewards_by_problem(path, step):
    """Return the rewards of the answers to each problem, from the files of an evaluation."""
    rewards: dict[int, list[float]] = {}
    for row in read_rows(path / f"eval_test_iteration_{step:06d}_rollout_summaries.jsonl"):
        rewards.setdefault(row["group_idx"], []).append(row["total_reward"])
    return rewards


@pytest.mark.usefixtures("odd_is_right")
def test_pass_at_k_is_the_chance_that_a_subset_of_k_answers_has_a_right_one(
    service, tmp_path, monkeypatch
):
    monkeypatch.setattr("digit_env.Digits", RightIfOdd)
    train(service, tmp_path, eval_samples=5, max_steps=2)
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    answers = rewards_by_problem(tmp_path, 0)
    assert {number: len(rewards) for number, rewards in answers.items()} == {0: 5, 1: 5, 2: 5}
    assert row["test/env/all/avg@5"] == pytest.approx(fmean(map(fmean, answers.values())))
    assert row["test/env/all/avg@5"] == pytest.approx(row["test/env/all/correct"])
    for k in (2, 4, 5):
        chances = [
            fmean(max(subset) for subset in itertools.combinations(rewards, k))
            for rewards in answers.values()
        ]
        assert row[f"test/env/all/pass@{k}"] == pytest.approx(fmean(chances))
    assert not any("pass@3" in name or name.startswith("env/all/pass") for name in row)
    for name in ("test/env/all/avg@5", "test/env/all/pass@4"):
        assert definition_of(name) is not None


@pytest.mark.usefixtures("odd_is_right")
def test_the_first_of_several_answers_is_the_one_of_an_evaluation_with_one(
    service, tmp_path, monkeypatch
):
    monkeypatch.setattr("digit_env.Digits", RightIfOdd)
    for name, samples in (("one", 1), ("three", 3)):
        train(service, tmp_path / name, eval_samples=samples, max_steps=1)
    one, three = (rewards_by_problem(tmp_path / name, 0) for name in ("one", "three"))
    assert {number: rewards[:1] for number, rewards in three.items()} == one
    assert "test/env/all/avg@1" not in read_rows(tmp_path / "one" / "metrics.jsonl")[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_samples": 0}, "eval_samples=0: give a whole number of at least 1"),
        ({"eval_samples": 2, "eval_temperature": 0.0}, "eval_samples=2: give 1, or an eval_temper"),
        ({"eval_samples": 2, "dataset_builder": DigitsBuilder()}, "has no test problems"),
    ],
)
def test_samples_that_teach_nothing_are_rejected(service, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train(service, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Named(EnvGroupBuilder):
    """A group that counts what is asked of it. Its reward is its name."""

    name: float
    calls: list[str]

    async def make_envs(self):
        return await Digits(1, 1).get_batch(0)[0].make_envs()

    async def compute_group_rewards(self, trajectory_group, env_group):
        self.calls.append(f"grade {len(env_group)} of {self.name}")
        return [(self.name, {}) for _ in env_group]

    async def cleanup(self):
        self.calls.append(f"clean {self.name}")
        if self.name == 1.0:
            raise RuntimeError("not clean")


def test_each_repetition_grades_and_cleans_up_its_own_environments(tokenizer):
    calls: list[str] = []
    group = play(
        RepeatedGroup([Named(20.0, calls), Named(30.0, calls)]), *["0"] * 8, tokenizer=tokenizer
    )
    assert group.final_rewards_G == [20.0] * 4 + [30.0] * 4
    assert calls == ["grade 4 of 20.0", "grade 4 of 30.0", "clean 20.0", "clean 30.0"]


def test_the_trajectories_that_remain_are_graded_by_their_own_group():
    calls: list[str] = []
    builder = RepeatedGroup([Named(2.0, calls), Named(3.0, calls)])

    async def grades():
        envs = await builder.make_envs()
        chosen = [envs[7], envs[0]]
        return await builder.compute_group_rewards([None] * 2, chosen)  # type: ignore[list-item]

    found: Any = asyncio.run(grades())
    assert [reward for reward, _ in found] == [3.0, 2.0]


def test_a_failing_cleanup_does_not_keep_the_other_repetitions_from_cleaning_up():
    calls: list[str] = []
    with pytest.raises(RuntimeError, match="not clean"):
        asyncio.run(RepeatedGroup([Named(1.0, calls), Named(2.0, calls)]).cleanup())
    assert calls == ["clean 1.0", "clean 2.0"]


def test_answers_without_a_verdict_give_no_pass_at_k(service):
    evaluator = RLTestSetEvaluator(Digits(1, 2), 8, num_samples=2)
    client = asyncio.run(service.create_sampling_client_async(base_model="tiny"))
    assert not any("@" in name for name in asyncio.run(evaluator(client)))
