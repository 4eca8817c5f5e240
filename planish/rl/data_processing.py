"""From trajectories to training data.

Legend: P groups, G trajectories of a group, T turns of a trajectory, N tokens of a sequence, D
sequences.

A trajectory becomes one sequence if each observation extends the previous one: it must begin with
all tokens that were observed and sampled before it. Any other observation starts a new sequence.
Sampled tokens and their logprobs are used unchanged; no text is tokenised again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from planish.rl.advantages import is_constant
from planish.rl.own_functions import advantage_estimator, is_import_path
from planish.rl.types import Trajectory, TrajectoryGroup, Transition
from planish.types import Datum, EncodedTextChunk, ModelInput


@dataclass(frozen=True)
class TrainingSequence:
    """One sequence before the shift by one token. Logprobs, advantages and mask are 0 at observed
    tokens.
    """

    tokens_N: np.ndarray
    """Tokens, int64. 0 at the positions of images."""
    logprobs_N: np.ndarray
    """The sampler's logprobs, float32."""
    advantages_N: np.ndarray
    """Advantages, float32."""
    mask_N: np.ndarray
    """1 at sampled tokens that are trained on, else 0, float32."""
    teacher: str | None = None
    """Name of the teacher (`EnvGroupBuilder.teacher`)."""
    trajectory: int | None = None
    """Index of its trajectory in the group."""
    group_idx: int | None = None
    """Index of its group in the batch."""
    input_with_images: ModelInput | None = None
    """The tokens and images, [N]. None without images."""

    @property
    def model_input(self) -> ModelInput:
        """The tokens and images, [N]."""
        return self.input_with_images or ModelInput.from_ints(self.tokens_N)

    def datum(self, loss_fn: str) -> Datum:
        """Return the datum for the trainer: position i reads token i and predicts token i + 1. The
        datum has a mask only for losses that would otherwise count observed tokens (`LOSS_MASKS`)
        and for losses of the user's own.
        """
        inputs = {
            "target_tokens": self.tokens_N[1:],
            "logprobs": self.logprobs_N[1:],
            "advantages": self.advantages_N[1:],
        }
        mask_name = "mask" if is_import_path(loss_fn) else LOSS_MASKS.get(loss_fn)
        if mask_name is not None:
            inputs[mask_name] = self.mask_N[1:]
        return Datum(self.model_input.prefix(len(self.tokens_N) - 1), inputs)

    def with_advantages(self, advantages_N: np.ndarray) -> Self:
        """Return the sequence with other advantages [N]."""
        return replace(self, advantages_N=advantages_N.astype(np.float32))


LOSS_MASKS = {"gspo": "sequence_ratio_mask", "dro": "mask"}
"""The name of the mask input, by loss. These losses need a mask, because tokens with advantage 0
contribute to them too.
"""


def trajectory_to_data(
    trajectory: Trajectory, advantage: float | Sequence[float]
) -> list[TrainingSequence]:
    """Return the sequences of one trajectory; none if nothing was sampled in it. `advantage` is
    that of every turn, or one for each turn.
    """
    transitions = trajectory.transitions
    advantages_T = (
        [advantage] * len(transitions) if isinstance(advantage, int | float) else advantage
    )
    sequences: list[TrainingSequence] = []
    context: list[int] = []
    turns: list[_Turn] = []
    for transition, turn_advantage in zip(transitions, advantages_T, strict=True):
        if not transition.ac.tokens:
            continue
        observation_tokens = transition.ob.to_keys()
        if context and observation_tokens[: len(context)] != context:
            sequences.append(_sequence(turns))
            context, turns = [], []
        turns.append(_Turn(len(observation_tokens) - len(context), transition, turn_advantage))
        context = observation_tokens + transition.ac.tokens
    if turns:
        sequences.append(_sequence(turns))
    return sequences


def count_sequences(trajectory: Trajectory) -> int:
    """Return the number of sequences of one trajectory: 1, and 1 more for each turn whose prompt
    does not begin with the earlier prompt and answer.
    """
    num_sequences = 0
    context: list[int] = []
    for transition in trajectory.transitions:
        if not transition.ac.tokens:
            continue
        observation_tokens = transition.ob.to_keys()
        num_sequences += not context or observation_tokens[: len(context)] != context
        context = observation_tokens + transition.ac.tokens
    return num_sequences


@dataclass(frozen=True)
class _Turn:
    num_new_tokens: int
    """Number of observed tokens that the sequence does not have yet."""
    transition: Transition
    advantage: float


def _sequence(turns: Sequence[_Turn]) -> TrainingSequence:
    """Return the sequence of turns, of which the last observation contains the earlier ones."""
    last = turns[-1].transition
    tokens = [*last.ob.to_targets(), *last.ac.tokens]
    logprobs_N, advantages_N, mask_N = np.zeros((3, len(tokens)), np.float32)
    start = 0
    for turn in turns:
        start += turn.num_new_tokens
        end = start + len(turn.transition.ac.tokens)
        if turn.transition.train_on_action:
            logprobs_N[start:end] = turn.transition.ac.logprobs
            advantages_N[start:end] = turn.advantage
            mask_N[start:end] = 1.0
        start = end
    assert start == len(tokens)
    sequence = TrainingSequence(np.asarray(tokens, np.int64), logprobs_N, advantages_N, mask_N)
    if not last.ob.images:
        return sequence
    whole = last.ob.append(EncodedTextChunk(list(last.ac.tokens)))
    return replace(sequence, input_with_images=whole)


def compute_advantages(
    groups_P: Sequence[TrajectoryGroup], estimator: str = "mean"
) -> list[list[float]]:
    """Return advantages `[P][G]`; `estimator` is a name in `ADVANTAGES`, or an import path."""
    estimate = advantage_estimator(estimator)
    return [estimate(group.get_total_rewards()) for group in groups_P]


def assemble_training_data(
    groups_P: Sequence[TrajectoryGroup],
    advantages_P: Sequence[Sequence[float | Sequence[float] | None]],
    teacher: str | None = None,
) -> list[TrainingSequence]:
    """Return the sequences of all trajectories in order. Sequences without a trained token are left
    out. `advantages_P` has for each trajectory its advantage, or one for each turn, or None to
    leave the trajectory out. The sequences get the name `teacher`.
    """
    return [
        replace(sequence, teacher=teacher, trajectory=index)
        for group, advantages_G in zip(groups_P, advantages_P, strict=True)
        for index, (trajectory, advantage) in enumerate(
            zip(group.trajectories_G, advantages_G, strict=True)
        )
        if advantage is not None
        for sequence in trajectory_to_data(trajectory, advantage)
        if sequence.mask_N.any()
    ]


def remove_constant_reward_groups(groups_P: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Return the groups whose rewards differ; possibly none."""
    return [group for group in groups_P if not is_constant(group.get_total_rewards())]
