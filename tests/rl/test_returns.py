"""Returns of turns, answers that were cut off, and the penalty of long answers, by their formulas
in exact arithmetic.
"""

import asyncio
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import chz
import digest_service
import numpy as np
import pytest
from digest_service import FakeSamplingClient, FakeService
from digit_env import DigitsBuilder
from metric_tables import definition_of

from planish.completers import TokensWithLogprobs
from planish.errors import UserError
from planish.files import read_rows
from planish.rl.advantages import ADVANTAGES
from planish.rl.data_processing import assemble_training_data, trajectory_to_data
from planish.rl.returns import TrainingRewards, discounted_returns, overlong_penalty
from planish.rl.types import Trajectory, TrajectoryGroup, Transition
from planish.training.rl_config import Config, check
from planish.training.train_rl import main
from planish.types import ModelInput, StopReason


def turn(reward, num_tokens=1, stop_reason: StopReason = "stop"):
    tokens = list(range(num_tokens))
    action = TokensWithLogprobs(tokens, [-1.0] * num_tokens, stop_reason)
    return Transition(ModelInput.from_ints([1, 2]), action, reward, False)


def episode(*turns):
    return Trajectory(list(turns), ModelInput.empty())


def group_of(trajectories, finals=None):
    finals = finals or [0.0] * len(trajectories)
    return TrajectoryGroup(trajectories, finals, [{} for _ in trajectories])


def random_group(seed, num_turns=4):
    """A group of 5 trajectories of 1 to `num_turns` turns, with rewards that are exact in binary."""
    generator = random.Random(seed)

    def number():
        return generator.randrange(-8, 9) / 4

    return group_of(
        [
            episode(*(turn(number()) for _ in range(generator.randint(1, num_turns))))
            for _ in range(5)
        ],
        [number() for _ in range(5)],
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("discount", [1.0, 0.5, 0.25])
def test_the_advantage_of_a_turn_equals_its_formula(seed, discount):
    """A_t = R_t minus the mean of R_t over the group, where R_t is 0 after a trajectory's end."""
    group = random_group(seed)
    d = Fraction(discount)
    rewards_G_T = [
        [Fraction(one.reward) for one in trajectory.transitions]
        for trajectory in group.trajectories_G
    ]
    for rewards_T, final in zip(rewards_G_T, group.final_rewards_G, strict=True):
        rewards_T[-1] += Fraction(final)

    def rest(rewards_T, t):
        return sum((d ** (k - t) * rewards_T[k] for k in range(t, len(rewards_T))), Fraction(0))

    advantages = TrainingRewards(turn_discount=discount).advantages(group)
    for rewards_T, advantages_T in zip(rewards_G_T, advantages, strict=True):
        assert advantages_T is not None
        assert len(advantages_T) == len(rewards_T)
        for t, advantage in enumerate(advantages_T):
            mean = sum(rest(other_T, t) for other_T in rewards_G_T) / len(rewards_G_T)
            assert advantage == pytest.approx(float(rest(rewards_T, t) - mean), abs=1e-12)


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_episodes_of_one_turn_do_not_depend_on_the_discount(estimator):
    group = random_group(0, num_turns=1)
    plain = TrainingRewards(estimator).advantages(group)
    assert plain == TrainingRewards(estimator, turn_discount=0.5).advantages(group)


def test_a_discount_of_one_with_a_last_reward_equals_the_default():
    group = group_of([episode(turn(0.0), turn(r)) for r in (0.0, 1.0, 1.0)], [0.5, 0.0, 0.25])
    default = TrainingRewards().advantages(group)
    assert TrainingRewards(turn_discount=1.0).advantages(group) == default
    assert default[0] == pytest.approx([-5 / 12] * 2)


def test_discounted_returns():
    assert discounted_returns([1.0, 2.0, 4.0], 0.5) == [3.0, 4.0, 4.0]
    assert discounted_returns([], 0.5) == []


def test_each_turn_is_trained_on_its_own_advantage():
    first = Transition(ModelInput.from_ints([1]), TokensWithLogprobs([2], [-1.0]), 0.0, False)
    second = Transition(
        ModelInput.from_ints([1, 2, 3]), TokensWithLogprobs([4, 5], [-1.0, -1.0]), 0.0, True
    )
    [sequence] = trajectory_to_data(episode(first, second), [0.5, -2.0])
    np.testing.assert_array_equal(sequence.advantages_N, [0, 0.5, 0, -2, -2])
    np.testing.assert_array_equal(sequence.mask_N, [0, 1, 0, 1, 1])
    with pytest.raises(ValueError, match="shorter"):
        trajectory_to_data(episode(first, second), [0.5])


@pytest.mark.parametrize(("max_tokens", "buffer"), [(20, 4), (10, 10), (7, 1), (16384, 4096)])
def test_the_penalty_of_long_answers_equals_its_formula(max_tokens, buffer):
    """DAPO, equation 13."""
    for length in {*range(1, 25), *range(max_tokens - buffer - 2, max_tokens + 3, 1 + buffer // 7)}:
        expected = Fraction(0)
        if length > max_tokens:
            expected = Fraction(-1)
        elif length > max_tokens - buffer:
            expected = Fraction(max_tokens - buffer - length, buffer)
        assert overlong_penalty(length, max_tokens, buffer) == pytest.approx(float(expected))


def penalising(**options):
    return TrainingRewards(truncated="penalise", max_tokens=10, overlong_buffer=4, **options)


def test_long_answers_lose_reward():
    lengths = [3, 6, 7, 8, 10]
    group = group_of([episode(turn(1.0, length)) for length in lengths])
    assert penalising().returns(group) == [[1.0, 1.0, 0.75, 0.5, 0.0]]
    assert penalising(overlong_coef=0.5).returns(group) == [[1.0, 1.0, 0.875, 0.75, 0.5]]
    assert not penalising().is_constant(group)
    assert penalising().metrics([group]) == {"truncated/penalty": (-0.25 - 0.5 - 1.0) / 5}
    assert TrainingRewards(max_tokens=10).returns(group) == [[1.0] * 5]
    assert group.get_total_rewards() == [1.0] * 5, "the reported rewards stay the same"


def test_an_answer_cut_off_by_a_smaller_limit_gets_the_full_penalty():
    group = group_of([episode(turn(1.0, 3, "length")), episode(turn(1.0, 3))])
    assert penalising().returns(group) == [[0.0, 1.0]]


def test_the_penalty_belongs_to_the_turn_of_the_answer():
    group = group_of([episode(turn(0.0, 8), turn(1.0, 2)), episode(turn(0.0, 2), turn(1.0, 10))])
    assert penalising().returns(group) == [[0.5, 0.0]]
    assert penalising(turn_discount=1.0).returns(group) == [[0.5, 0.0], [1.0, 0.0]]


def test_masked_answers_stay_in_the_baseline():
    cut_off = episode(turn(0.0, 3, "length"))
    group = group_of([episode(turn(1.0)), cut_off, episode(turn(0.5))])
    rewards = TrainingRewards(truncated="mask")
    advantages = rewards.advantages(group)
    assert advantages == [[0.5], None, [0.0]]
    assert rewards.metrics([group]) == {"truncated/masked": 1 / 3}
    assert rewards.mean_advantages(group) == [0.5, None, 0.0]
    data = assemble_training_data([group], [advantages])
    assert [sequence.advantages_N.max() for sequence in data] == [0.5, 0.0]
    kept = TrainingRewards().advantages(group)
    assert kept == [[0.5], [-0.5], [0.0]]


def test_an_episode_that_goes_on_after_a_cut_off_answer_is_not_masked():
    group = group_of([episode(turn(0.0, 3, "length"), turn(1.0)), episode(turn(0.0))])
    assert TrainingRewards(truncated="mask").advantages(group) == [[0.5, 0.5], [-0.5]]


class CuttingClient(FakeSamplingClient):
    """A sampling client whose answers are cut off if their first digit is odd."""

    async def sample_async(self, prompt, num_samples, sampling_params):
        response = await super().sample_async(prompt, num_samples, sampling_params)
        [sequence] = response.sequences
        reason = "length" if sequence.tokens[0] % 2 else "stop"
        return replace(response, sequences=[replace(sequence, stop_reason=reason)])


def config_of(path, **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": DigitsBuilder(batches=2),
        "model_name": "tiny",
        "max_tokens": 3,
        "log_path": str(path),
        "eval_every": 0,
        "num_groups_to_log": 1,
        **changes,
    }
    return Config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"truncated": "mask"},
        {"truncated": "penalise", "overlong_buffer": 2},
        {"turn_discount": 0.5, "dataset_builder": DigitsBuilder(batches=2, turns=2)},
    ],
)
def test_a_run_trains_on_these_returns(tokenizer, tmp_path, monkeypatch, options):
    monkeypatch.setattr("planish.training.run_loop.code_diff", lambda paths: "")
    monkeypatch.setattr(digest_service, "FakeSamplingClient", CuttingClient)
    builder = options.get("dataset_builder", DigitsBuilder(batches=2))
    data = {"dataset_builder": builder, "max_tokens": 4}
    runs = []
    for name, changes in (("default", data), ("changed", {**data, **options})):
        service = FakeService(tokenizer)
        asyncio.run(main(config_of(tmp_path / name, **changes), cast(Any, service)))
        runs.append((service, read_rows(tmp_path / name / "metrics.jsonl")))
    (default, default_rows), (changed, rows) = runs
    assert default_rows[0]["env/all/reward/total"] == rows[0]["env/all/reward/total"]
    assert default.clients[-1].weights != changed.clients[-1].weights
    assert all(definition_of(key) for row in rows for key in row if key.startswith("truncated/"))
    if options.get("truncated") == "mask":
        assert 0 < rows[0]["truncated/masked"] < 1
        assert changed.clients[-1].calls[0] == round(16 * (1 - rows[0]["truncated/masked"]))
    elif "truncated" in options:
        # All answers have 3 of at most 4 tokens, and some are cut off by a smaller limit.
        assert -1.0 < rows[0]["truncated/penalty"] < -0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncated": "drop"}, "truncated=drop: give one of keep, mask, penalise"),
        ({"truncated": "penalise", "overlong_buffer": 4}, "from 1 to max_tokens=3"),
        ({"truncated": "penalise", "overlong_buffer": 0}, "from 1 to max_tokens=3"),
        ({"truncated": "penalise", "overlong_coef": 0}, "overlong_coef=0: give a number above 0"),
        ({"overlong_buffer": 2}, "truncated=keep; give truncated=penalise too"),
        ({"truncated": "mask", "overlong_coef": 2.0}, "truncated=mask; give truncated=penalise"),
        ({"turn_discount": 0.0}, "turn_discount=0.0: give a number above 0 and at most 1, or None"),
        ({"turn_discount": 1.5}, "turn_discount=1.5: give"),
    ],
)
def test_wrong_options_are_rejected(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        check(config_of(tmp_path, **options))


def test_the_buffer_is_a_fifth_of_max_tokens():
    config = config_of("unused", max_tokens=12, truncated="penalise")
    assert config.training_rewards.overlong_buffer == 3
    assert chz.replace(config, overlong_buffer=7).training_rewards.overlong_buffer == 7
