"""The data that the template of the rollout page shows: groups, trajectories and turns.

A prompt that all trajectories of a group begin with is shown once. A turn shows only the part of
its observation that the policy has not seen before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from markupsafe import Markup

from planish.completers import TokensWithLogprobs
from planish.logtree.html import visible
from planish.reports.rollout_log import GroupLog
from planish.reports.rollout_overview import (
    mean_metrics,
    reward_class,
    stop_reason,
    token_probability,
    without_stop_metrics,
)
from planish.reports.rollout_records import (
    TrajectoryRecord,
    TurnRecord,
    context_after,
    new_tokens,
    trajectory_records,
)
from planish.reports.rollout_tokens import DisplayDetokenizer
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Trajectory

MAX_TAIL_CHARACTERS = 150
"""Number of characters, from the end of a text, that a folded section shows."""
MAX_OPEN_CHARACTERS, MAX_OPEN_LINES = 1200, 18
"""A text with more characters or more lines than this is folded."""


@dataclass(frozen=True)
class ObservationView:
    """Text that the policy read."""

    html: Markup
    num_tokens: int
    is_long: bool
    tail: str


@dataclass(frozen=True)
class AnswerView:
    """Tokens that the policy sampled. The page's script reads `piece_lengths`, `token_ids`,
    `milli_nlls` and `control_indices`, which are lists of numbers separated by spaces.
    """

    text: str
    piece_lengths: str
    """Length of each piece of text (`Piece.length_code`)."""
    token_ids: str
    """Token ids."""
    milli_nlls: str
    """-1000 x logprob of each token, rounded; "" if the policy gave no logprobs."""
    control_indices: str
    """Indices of the pieces that are control tokens."""
    num_tokens: int
    """Number of tokens."""


@dataclass(frozen=True)
class TurnView:
    """One turn of a trajectory."""

    record: TurnRecord
    observation: ObservationView | None
    """The new part of the observation; None if it is the prompt of the group."""
    answer: AnswerView
    metrics: Mapping[str, float]
    logs: Mapping[str, Any]


@dataclass(frozen=True)
class TrajectoryView:
    """One trajectory."""

    record: TrajectoryRecord
    stop_reason: str
    turns: list[TurnView]
    final_observation: ObservationView | None
    """Text of the environment after the last turn."""
    metrics: Mapping[str, float]
    """Means of the metrics of the turns and of the group's grading."""
    token_probability: float | None
    """Geometric mean of the probabilities of its tokens; None without logprobs."""
    log_html: Markup
    """The environment's log, as HTML."""

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(turn.answer.num_tokens for turn in self.turns)

    @property
    def tail(self) -> str:
        """The end of the last answer."""
        return text_tail(self.turns[-1].answer.text) if self.turns else ""


@dataclass(frozen=True)
class GroupView:
    """One group."""

    rollout: GroupRollout
    reward_class: str
    prompt: ObservationView | None
    trajectories: list[TrajectoryView]
    log_html: Markup

    @property
    def mean_reward(self) -> float:
        """Mean reward of the trajectories."""
        return fmean(self._rewards)

    @property
    def reward_spread(self) -> float:
        """Highest minus lowest reward."""
        return max(self._rewards) - min(self._rewards)

    @property
    def _rewards(self) -> list[float]:
        return [trajectory.record.total_reward for trajectory in self.trajectories]


def group_view(
    rollout: GroupRollout,
    advantages_G: Sequence[float | None] | None,
    detokenizer: DisplayDetokenizer,
) -> GroupView:
    """Return the view of a group; `advantages_G` is None if the group is not trained on."""
    records = list(trajectory_records(rollout, advantages_G))
    group_log = GroupLog.from_tree(rollout.tree, rollout.group_idx, len(records))
    prompt = records[0].turns[0].new_tokens if records[0].turns else []
    return GroupView(
        rollout,
        reward_class=reward_class([record.total_reward for record in records]),
        prompt=_observation_view(prompt, detokenizer),
        trajectories=[
            _trajectory_view(record, prompt, group_log, detokenizer) for record in records
        ],
        log_html=group_log.group_html(),
    )


def _trajectory_view(
    record: TrajectoryRecord,
    prompt: Sequence[int],
    group_log: GroupLog,
    detokenizer: DisplayDetokenizer,
) -> TrajectoryView:
    trajectory = record.trajectory
    turns = []
    for index, turn in enumerate(record.turns):
        is_prompt = index == 0 and turn.new_tokens == prompt
        turns.append(
            _turn_view(
                turn,
                None if is_prompt else _observation_view(turn.new_tokens, detokenizer),
                detokenizer,
            )
        )
    metrics = [*(turn.metrics for turn in trajectory.transitions), record.group_metrics]
    return TrajectoryView(
        record,
        stop_reason=stop_reason(trajectory),
        turns=turns,
        final_observation=_final_observation(trajectory, detokenizer),
        metrics=without_stop_metrics(mean_metrics(metrics)),
        token_probability=token_probability([trajectory]),
        log_html=group_log.trajectory_html(record.index, [turn.answer.text for turn in turns]),
    )


def text_tail(text: str) -> str:
    """Return the end of a text as one line."""
    words = " ".join(text[-4 * MAX_TAIL_CHARACTERS :].split())
    if len(words) <= MAX_TAIL_CHARACTERS:
        return words
    cut, space, rest = words[-MAX_TAIL_CHARACTERS:].partition(" ")
    return f"… {rest}" if space else f"…{cut}"


def _observation_view(
    tokens: Sequence[int], detokenizer: DisplayDetokenizer
) -> ObservationView | None:
    if not tokens:
        return None
    text = detokenizer.text(tokens)
    is_long = len(text) > MAX_OPEN_CHARACTERS or text.count("\n") > MAX_OPEN_LINES
    first_break = Markup('<i class="breaks"></i>') if text.startswith("\n") else Markup("")
    return ObservationView(
        first_break + detokenizer.html(tokens), len(tokens), is_long, text_tail(text)
    )


def _turn_view(
    record: TurnRecord, observation: ObservationView | None, detokenizer: DisplayDetokenizer
) -> TurnView:
    transition = record.transition
    return TurnView(
        record,
        observation,
        answer=_answer_view(transition.ac, detokenizer),
        metrics=without_stop_metrics(transition.metrics),
        logs={name: visible(str(value)) for name, value in transition.logs.items()},
    )


def _final_observation(
    trajectory: Trajectory, detokenizer: DisplayDetokenizer
) -> ObservationView | None:
    if not trajectory.transitions:
        return None
    tokens, extends_context = new_tokens(
        context_after(trajectory.transitions[-1]), trajectory.final_ob
    )
    return _observation_view(tokens, detokenizer) if extends_context else None


def _answer_view(action: TokensWithLogprobs, detokenizer: DisplayDetokenizer) -> AnswerView:
    pieces = detokenizer.pieces(action.tokens)
    return AnswerView(
        text="".join([piece.text for piece in pieces]),
        piece_lengths=" ".join([piece.length_code for piece in pieces]),
        token_ids=" ".join(map(str, action.tokens)),
        milli_nlls=" ".join([f"{-1000 * logprob:.0f}" for logprob in action.maybe_logprobs or ()]),
        control_indices=" ".join(
            [str(index) for index, piece in enumerate(pieces) if piece.is_control]
        ),
        num_tokens=len(action.tokens),
    )
