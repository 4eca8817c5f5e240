import numpy as np
import pytest
from hypothesis import given, strategies as st

from planish.completers import TokensWithLogprobs
from planish.rl.data_processing import (
    assemble_training_data,
    compute_advantages,
    remove_constant_reward_groups,
    trajectory_to_data,
)
from planish.rl.types import Trajectory, TrajectoryGroup, Transition
from planish.types import ModelInput


def turn(observed, sampled, *, reward=0.0, trained=True):
    action = TokensWithLogprobs(list(sampled), [-float(token) for token in sampled])
    return Transition(
        ModelInput.from_ints(observed), action, reward, False, train_on_action=trained
    )


def episode(*turns):
    return Trajectory(list(turns), ModelInput.empty())


def test_targets_logprobs_and_advantages_are_shifted_by_one():
    [sequence] = trajectory_to_data(episode(turn([1, 2, 3], [4, 5])), 0.5)
    datum = sequence.datum("importance_sampling")
    assert datum.model_input.to_ints() == [1, 2, 3, 4]
    assert {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": [2, 3, 4, 5],
        "logprobs": [0, 0, -4, -5],
        "advantages": [0, 0, 0.5, 0.5],
    }


def test_turns_that_extend_each_other_become_one_sequence():
    [sequence] = trajectory_to_data(episode(turn([1, 2], [3]), turn([1, 2, 3, 4], [5, 6])), 2.0)
    assert sequence.tokens_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert sequence.mask_N.tolist() == [0, 0, 1, 0, 1, 1]
    assert sequence.logprobs_N.tolist() == [0, 0, -3, 0, -5, -6]
    assert sequence.advantages_N.tolist() == [0, 0, 2, 0, 2, 2]


def test_a_turn_that_does_not_extend_begins_a_new_sequence():
    first, second = trajectory_to_data(episode(turn([1, 2], [3]), turn([1, 9], [5])), 1.0)
    assert (first.tokens_N.tolist(), second.tokens_N.tolist()) == ([1, 2, 3], [1, 9, 5])


def test_a_turn_without_training_stays_in_the_sequence_with_mask_zero():
    [sequence] = trajectory_to_data(
        episode(turn([1], [2], trained=False), turn([1, 2, 3], [4])), 1.0
    )
    assert sequence.mask_N.tolist() == [0, 0, 0, 1]
    assert sequence.logprobs_N.tolist() == [0, 0, 0, -4]


def test_a_trajectory_without_sampled_tokens_gives_no_data():
    assert trajectory_to_data(episode(turn([], [])), 1.0) == []


@pytest.mark.parametrize(("loss_fn", "name"), [("gspo", "sequence_ratio_mask"), ("dro", "mask")])
def test_losses_that_count_observed_tokens_receive_the_mask(loss_fn, name):
    [sequence] = trajectory_to_data(episode(turn([1, 2], [3])), 1.0)
    assert sequence.datum(loss_fn).loss_fn_inputs[name].tolist() == [0, 1]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(0, 9), min_size=1)),
        min_size=1,
    )
)
def test_a_merged_sequence_trains_the_same_tokens_as_single_turns(turns):
    """Merging turns changes the layout of tokens, but neither the trained tokens nor their
    prefixes.
    """
    running, transitions = [1], []
    for new, sampled in turns:
        observed = running + new
        transitions.append(turn(observed, sampled))
        running = observed + sampled
    [merged] = trajectory_to_data(episode(*transitions), 1.0)
    apart = [sequence for t in transitions for sequence in trajectory_to_data(episode(t), 1.0)]
    trained = [
        (tuple(s.tokens_N[:i]), s.tokens_N[i], s.logprobs_N[i])
        for s in apart
        for i in np.flatnonzero(s.mask_N)
    ]
    assert trained == [
        (tuple(merged.tokens_N[:i]), merged.tokens_N[i], merged.logprobs_N[i])
        for i in np.flatnonzero(merged.mask_N)
    ]


def group(*rewards):
    trajectories = [episode(turn([1], [2], reward=reward)) for reward in rewards]
    return TrajectoryGroup(trajectories, [0.0] * len(rewards), [{} for _ in rewards])


def test_advantages_are_relative_to_the_group():
    groups = [group(1.0, 0.0), group(5.0, 5.0)]
    advantages = compute_advantages(groups)
    assert advantages == [[0.5, -0.5], [0.0, 0.0]]
    data = assemble_training_data(groups, advantages)
    assert [float(sequence.advantages_N[-1]) for sequence in data] == [0.5, -0.5, 0.0, 0.0]
    assert remove_constant_reward_groups(groups) == groups[:1]
    assert remove_constant_reward_groups(groups[1:]) == []


def test_final_group_rewards_are_added_to_total_rewards():
    both = TrajectoryGroup([episode(turn([1], [2], reward=1.0))] * 2, [0.0, 3.0], [{}, {}])
    assert both.get_total_rewards() == [1.0, 4.0]
