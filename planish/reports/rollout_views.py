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
from planish.reports.rollout_overview import ending, kind_of, own_metrics, pooled, token_probability
from planish.reports.rollout_records import (
    TrajectoryRecord,
    TurnRecord,
    new_tokens,
    seen_after,
    trajectory_records,
)
from planish.reports.rollout_tokens import TokenTexts
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Trajectory

LAST_WORDS = 150
"""Number of characters, from the end of a text, that a folded section shows."""
LONG_TEXT, MANY_LINES = 1200, 18
"""A text with more characters or more lines than this is folded."""


@dataclass(frozen=True)
class Reading:
    """Text that the policy read."""

    html: Markup
    tokens: int
    is_long: bool
    last_words: str


@dataclass(frozen=True)
class Answer:
    """Tokens that the policy sampled. The page's script reads `sizes`, `ids`, `losses` and
    `controls`, which are lists of numbers separated by spaces.
    """

    text: str
    sizes: str
    """Size of each piece of text (`Piece.size`)."""
    ids: str
    """Token ids."""
    losses: str
    """-1000 x logprob of each token; "" if the policy gave no logprobs."""
    controls: str
    """Indices of the pieces that are control tokens."""
    tokens: int
    """Number of tokens."""


@dataclass(frozen=True)
class Turn:
    """One turn of a trajectory."""

    record: TurnRecord
    reading: Reading | None
    """The new part of the observation; None if it is the prompt of the group."""
    answer: Answer
    metrics: Mapping[str, float]
    logs: Mapping[str, Any]


@dataclass(frozen=True)
class TrajectoryView:
    """One trajectory."""

    record: TrajectoryRecord
    ending: str
    turns: list[Turn]
    after: Reading | None
    """Text of the environment after the last turn."""
    metrics: Mapping[str, float]
    """Means of the metrics of the turns and of the group's grading."""
    probability: float | None
    """Geometric mean of the probabilities of its tokens; None without logprobs."""
    log: Markup
    """The environment's log, as HTML."""

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(turn.answer.tokens for turn in self.turns)

    @property
    def last_words(self) -> str:
        """The end of the last answer."""
        return last_words(self.turns[-1].answer.text) if self.turns else ""


@dataclass(frozen=True)
class GroupView:
    """One group."""

    rollout: GroupRollout
    kind: str
    prompt: Reading | None
    trajectories: list[TrajectoryView]
    log: Markup

    @property
    def mean(self) -> float:
        """Mean reward of the trajectories."""
        return fmean(self._rewards)

    @property
    def spread(self) -> float:
        """Highest minus lowest reward."""
        return max(self._rewards) - min(self._rewards)

    @property
    def _rewards(self) -> list[float]:
        return [trajectory.record.total_reward for trajectory in self.trajectories]


def group_view(
    rollout: GroupRollout, advantages_G: Sequence[float] | None, texts: TokenTexts
) -> GroupView:
    """Return the view of a group; `advantages_G` is None if the group is not trained on."""
    records = list(trajectory_records(rollout, advantages_G))
    log = GroupLog.of(rollout.tree, rollout.group_idx, len(records))
    prompt = records[0].turns[0].new_tokens if records[0].turns else []
    return GroupView(
        rollout,
        kind=kind_of([record.total_reward for record in records]),
        prompt=_reading(prompt, texts),
        trajectories=[_trajectory(record, prompt, log, texts) for record in records],
        log=log.of_group(),
    )


def _trajectory(
    record: TrajectoryRecord, prompt: Sequence[int], log: GroupLog, texts: TokenTexts
) -> TrajectoryView:
    trajectory = record.trajectory
    turns = []
    for index, turn in enumerate(record.turns):
        is_prompt = index == 0 and turn.new_tokens == prompt
        turns.append(_turn(turn, None if is_prompt else _reading(turn.new_tokens, texts), texts))
    metrics = [*(turn.metrics for turn in trajectory.transitions), record.group_metrics]
    return TrajectoryView(
        record,
        ending=ending(trajectory),
        turns=turns,
        after=_after(trajectory, texts),
        metrics=own_metrics(pooled(metrics)),
        probability=token_probability([trajectory]),
        log=log.of_trajectory(record.number, [turn.answer.text for turn in turns]),
    )


def last_words(text: str) -> str:
    """Return the end of a text as one line."""
    words = " ".join(text[-4 * LAST_WORDS :].split())
    if len(words) <= LAST_WORDS:
        return words
    cut, space, rest = words[-LAST_WORDS:].partition(" ")
    return f"… {rest}" if space else f"…{cut}"


def _reading(tokens: Sequence[int], texts: TokenTexts) -> Reading | None:
    if not tokens:
        return None
    text = texts.text(tokens)
    is_long = len(text) > LONG_TEXT or text.count("\n") > MANY_LINES
    first_break = Markup('<i class="breaks"></i>') if text.startswith("\n") else Markup("")
    return Reading(first_break + texts.html(tokens), len(tokens), is_long, last_words(text))


def _turn(record: TurnRecord, reading: Reading | None, texts: TokenTexts) -> Turn:
    transition = record.transition
    return Turn(
        record,
        reading,
        answer=_answer(transition.ac, texts),
        metrics=own_metrics(transition.metrics),
        logs={name: visible(str(value)) for name, value in transition.logs.items()},
    )


def _after(trajectory: Trajectory, texts: TokenTexts) -> Reading | None:
    if not trajectory.transitions:
        return None
    new, continues = new_tokens(seen_after(trajectory.transitions[-1]), trajectory.final_ob)
    return _reading(new, texts) if continues else None


def _answer(action: TokensWithLogprobs, texts: TokenTexts) -> Answer:
    pieces = texts.pieces(action.tokens)
    return Answer(
        text="".join([piece.text for piece in pieces]),
        sizes=" ".join([piece.size for piece in pieces]),
        ids=" ".join(map(str, action.tokens)),
        losses=" ".join([f"{-1000 * logprob:.0f}" for logprob in action.maybe_logprobs or ()]),
        controls=" ".join([str(number) for number, piece in enumerate(pieces) if piece.is_control]),
        tokens=len(action.tokens),
    )
