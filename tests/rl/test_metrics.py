"""The rollout metrics of a step equal their definitions, written out by hand."""

from math import log

import pytest

from planish.completers import TokensWithLogprobs
from planish.rl.data_processing import count_sequences, trajectory_to_data
from planish.rl.rollout.metrics import (
    environment_metrics,
    sampling_entropy,
    sampling_times,
    staleness,
    token_counts,
)
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import RolloutError, Trajectory, TrajectoryGroup, Transition
from planish.runlog.run_directory import CheckpointRecord
from planish.training.rl_learner import RunCounters
from planish.types import ModelInput


def turn(observed, sampled, reward=0.0, *, cached=0, **metrics):
    action = TokensWithLogprobs([1] * sampled, [-0.5] * sampled, prompt_cache_hit_tokens=cached)
    return Transition(ModelInput.from_ints([1] * observed), action, reward, False, metrics)


def rollout(*trajectories, final=None, metrics=None, tags=(), errors=(), step=0, seconds=0.0):
    group = TrajectoryGroup(
        [Trajectory(list(turns), ModelInput.empty()) for turns in trajectories],
        list(final or [0.0] * len(trajectories)),
        list(metrics or [{} for _ in trajectories]),
        list(errors),
    )
    return GroupRollout(0, list(tags), group, step, None, seconds)


def test_each_rollout_metric_equals_its_definition():
    first = rollout([turn(4, 2, 0.5, cached=3), turn(8, 4, 0.5)], [turn(4, 6)])  # rewards 1 and 0
    second = rollout([turn(2, 1)], [turn(2, 3)], final=[0.6, 0.6])  # all equal and good
    metrics = environment_metrics([first, second])
    assert metrics == {
        "env/all/reward/total": pytest.approx((1 + 0 + 0.6 + 0.6) / 4),
        "env/all/abstained": 0.0,
        "env/all/ac_tokens_per_turn": (2 + 4 + 6 + 1 + 3) / 5,
        "env/all/ob_tokens_per_turn": (4 + 8 + 4 + 2 + 2) / 5,
        "env/all/turns_per_episode": 5 / 4,
        "env/all/sequences_per_episode": 1.0,
        "env/all/total_episodes": 4,
        "env/all/total_turns": 5,
        "env/all/total_ac_tokens": 16,
        "env/all/total_ob_tokens": 20,
        "env/all/total_cached_ob_tokens": 3,
        "env/all/by_group/frac_mixed": 0.5,
        "env/all/by_group/frac_degenerate": 0.5,
        "env/all/by_group/frac_all_good": 0.5,
        "env/all/by_group/frac_all_bad": 0.0,
    }


def test_a_rewritten_prompt_is_counted_as_another_sequence():
    """The second prompt is shorter than the first prompt and its answer."""
    group = rollout([turn(4, 2), turn(3, 1), turn(8, 1)], [turn(4, 2)])
    trajectory = group.group.trajectories_G[0]
    assert len(trajectory_to_data(trajectory, 1.0)) == count_sequences(trajectory) == 2
    assert environment_metrics([group])["env/all/sequences_per_episode"] == 3 / 2


def test_environment_metrics_are_means_over_the_turns_that_have_them():
    """Metrics of turns and of trajectories are averaged together."""
    group = rollout(
        [turn(1, 1, correct=1.0), turn(1, 1)],
        [turn(1, 1, correct=0)],
        metrics=[{"correct": 0.5, "won": 1}, {}],
    )
    metrics = environment_metrics([group])
    assert metrics["env/all/correct"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert metrics["env/all/won"] == 1


def test_an_environment_metric_must_not_use_a_builtin_name():
    group = rollout([turn(1, 1, 0.25, **{"reward/total": 7.0, "total_turns": 7})])
    metrics = environment_metrics([group])
    assert (metrics["env/all/reward/total"], metrics["env/all/total_turns"]) == (0.25, 1)


def test_tag_metrics_are_reported_if_a_tag_distinguishes_groups():
    easy = rollout([turn(1, 1, 1.0)], tags=["sums", "easy", "easy"])
    hard = rollout([turn(1, 1, 0.0)], tags=["sums"])
    metrics = environment_metrics([easy, hard])
    rewards = {name: value for name, value in metrics.items() if name.endswith("reward/total")}
    assert rewards == {
        "env/easy/reward/total": 1.0,
        "env/sums/reward/total": 0.5,
        "env/all/reward/total": 0.5,
    }
    assert {name.split("/")[1] for name in environment_metrics([easy, easy])} == {"all"}


def test_no_groups_give_no_metrics():
    assert (
        environment_metrics([])
        == staleness([], 3)
        == sampling_times([])
        == sampling_entropy([])
        == {}
    )
    assert token_counts([]) == {"sampled": 0, "prefill_cached": 0, "prefill_uncached": 0}


def test_entropy_is_the_mean_over_trained_tokens():
    masked = Transition(
        ModelInput.from_ints([1]),
        TokensWithLogprobs([2], [-100.0]),
        0.0,
        False,
        train_on_action=False,
    )
    seen = Transition(
        ModelInput.from_ints([1, 2, 3]),
        TokensWithLogprobs([4, 5], [log(0.5), log(0.25)]),
        0.0,
        True,
    )
    data = trajectory_to_data(Trajectory([masked, seen], ModelInput.empty()), 1.0)
    assert sampling_entropy(data) == {"optim/entropy": pytest.approx((log(2) + log(4)) / 2)}


def test_staleness_and_times_are_reported():
    groups = [
        rollout([turn(1, 1)], step=step, seconds=seconds)
        for step, seconds in ((3, 1.0), (5, 2.0), (4, 6.0))
    ]
    assert staleness(groups, 5) == {
        "training_client/step": 5,
        "sampling_client/step_max": 5,
        "sampling_client/step_min": 3,
        "sampling_client/step_mean": 4,
        "async/staleness_max": 2,
        "async/staleness_min": 0,
        "async/staleness_mean": 1,
    }
    assert sampling_times(groups) == {
        "time/sampling_time_max": 6.0,
        "time/sampling_time_min": 1.0,
        "time/sampling_time_mean": 3.0,
    }


def test_counters_continue_after_a_resume():
    errors = [RolloutError("TimeoutError", "late"), RolloutError("OSError", "gone")]
    group = rollout([turn(3, 2, cached=1)], errors=errors)
    counters = RunCounters.from_checkpoint(None)
    counters.add_step([group], [None, None], trajectory_to_data(group.group.trajectories_G[0], 1.0))
    first = counters.metrics()
    assert first == {
        "tokens/sampled": 2,
        "tokens/prefill_cached": 1,
        "tokens/prefill_uncached": 2,
        "tokens/trained": 4,
        "tokens/cumulative/sampled": 2,
        "tokens/cumulative/prefill_cached": 1,
        "tokens/cumulative/prefill_uncached": 2,
        "tokens/cumulative/trained": 4,
        "rollout_errors/TimeoutError": 1,
        "rollout_errors/OSError": 1,
        "rollout_errors/total": 2,
        "rollout_errors/groups_skipped": 1,
    }
    again = RunCounters.from_checkpoint(
        CheckpointRecord("000001", 1, extra=counters.checkpoint_fields())
    )
    again.add_step([group], [None], [])
    second = again.metrics()
    assert (second["tokens/trained"], second["tokens/cumulative/trained"]) == (0, 4)
    assert (second["tokens/cumulative/sampled"], second["rollout_errors/total"]) == (4, 4)
    assert not any(
        name.startswith("rollout_errors") for name in RunCounters.from_checkpoint(None).metrics()
    )
