"""What a rollout page shows of a group, its trajectories and their turns: text, numbers, and what
to say of them.

A prompt that all trajectories of a group begin with is shown once; a turn shows only what is new to
the policy.
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
from planish.reports.rollout_tokens import TokenTexts
from planish.reports.rollout_tree import new_tokens
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Observation, RolloutError, Trajectory, Transition

LAST_WORDS = 150
LONG_TEXT, MANY_LINES = 1200, 18


@dataclass(frozen=True)
class Reading:
    """Text that the policy was given."""

    html: Markup
    tokens: int
    is_long: bool
    last_words: str


@dataclass(frozen=True)
class Answer:
    """Tokens that the policy sampled. The strings have one number a piece (sizes) or a token
    (others), between spaces.
    """

    text: str
    sizes: str
    ids: str
    losses: str
    """-1000 x logprob; "" if the policy gave none."""
    controls: str
    """The pieces that are control tokens, by number."""
    tokens: int


@dataclass(frozen=True)
class Turn:
    reading: Reading | None
    """What is new; None for the prompt of the group."""
    goes_on: bool
    """The observation begins with all that the policy saw and wrote before."""
    ob_len: int
    answer: Answer
    was_cut_off: bool
    is_trained: bool
    reward: float
    metrics: Mapping[str, float]
    logs: Mapping[str, Any]


@dataclass(frozen=True)
class TrajectoryView:
    number: int
    reward: float
    step_rewards: float
    final_reward: float
    advantage: float | None
    ending: str
    turns: list[Turn]
    after: Reading | None
    """What the environment said behind the last turn."""
    metrics: Mapping[str, float]
    """Means over its turns and of the group's grading."""
    group_metrics: Mapping[str, float]
    probability: float | None
    """Geometric mean of its tokens' probabilities."""
    log: Markup

    @property
    def tokens(self) -> int:
        return sum(turn.answer.tokens for turn in self.turns)

    @property
    def last_words(self) -> str:
        return last_words(self.turns[-1].answer.text) if self.turns else ""


@dataclass(frozen=True)
class GroupView:
    number: int
    tags: list[str]
    kind: str
    sampler_step: int | None
    prompt: Reading | None
    trajectories: list[TrajectoryView]
    log: Markup
    errors: list[RolloutError]

    @property
    def mean(self) -> float:
        return fmean(trajectory.reward for trajectory in self.trajectories)

    @property
    def spread(self) -> float:
        rewards = [trajectory.reward for trajectory in self.trajectories]
        return max(rewards) - min(rewards)


def group_view(
    rollout: GroupRollout, advantages_G: Sequence[float] | None, texts: TokenTexts
) -> GroupView:
    group = rollout.group
    rewards_G = group.get_total_rewards()
    advantages = [None] * len(rewards_G) if advantages_G is None else advantages_G
    log = GroupLog.of(rollout.tree, rollout.group_idx, len(rewards_G))
    prompt = _first_tokens(group.trajectories_G[0])
    views: list[TrajectoryView] = []
    played = zip(
        group.trajectories_G,
        rewards_G,
        group.final_rewards_G,
        advantages,
        group.metrics_G,
        strict=True,
    )
    for number, (trajectory, reward, final, advantage, metrics) in enumerate(played):
        turns = _turns(trajectory, prompt, texts)
        view = TrajectoryView(
            number=number,
            reward=reward,
            step_rewards=trajectory.step_rewards,
            final_reward=final,
            advantage=advantage,
            ending=ending(trajectory),
            turns=turns,
            after=_after(trajectory, texts),
            metrics=own_metrics(
                pooled([*(turn.metrics for turn in trajectory.transitions), metrics])
            ),
            group_metrics=metrics,
            probability=token_probability([trajectory]),
            log=log.of_trajectory(number, [turn.answer.text for turn in turns]),
        )
        views.append(view)
    return GroupView(
        number=rollout.group_idx,
        tags=rollout.tags,
        kind=kind_of(rewards_G),
        sampler_step=rollout.sampler_step,
        prompt=_reading(prompt, texts),
        trajectories=views,
        log=log.of_group(),
        errors=group.rollout_errors,
    )


def last_words(text: str) -> str:
    """The end of a text on one line."""
    words = " ".join(text[-4 * LAST_WORDS :].split())
    if len(words) <= LAST_WORDS:
        return words
    cut, space, rest = words[-LAST_WORDS:].partition(" ")
    return f"… {rest}" if space else f"…{cut}"


def _first_tokens(trajectory: Trajectory) -> list[int]:
    return trajectory.transitions[0].ob.to_ints() if trajectory.transitions else []


def _reading(tokens: Sequence[int], texts: TokenTexts) -> Reading | None:
    if not tokens:
        return None
    text = texts.text(tokens)
    is_long = len(text) > LONG_TEXT or text.count("\n") > MANY_LINES
    first_break = Markup('<i class="breaks"></i>') if text.startswith("\n") else Markup("")
    return Reading(first_break + texts.html(tokens), len(tokens), is_long, last_words(text))


def _turns(trajectory: Trajectory, prompt: Sequence[int], texts: TokenTexts) -> list[Turn]:
    turns: list[Turn] = []
    seen: list[int] = []
    for transition in trajectory.transitions:
        new, goes_on = new_tokens(seen, transition.ob)
        is_prompt = not turns and new == prompt
        turns.append(_turn(transition, None if is_prompt else _reading(new, texts), goes_on, texts))
        seen = [*transition.ob.to_ints(), *transition.ac.tokens]
    return turns


def _turn(
    transition: Transition, reading: Reading | None, goes_on: bool, texts: TokenTexts
) -> Turn:
    return Turn(
        reading=reading,
        goes_on=goes_on,
        ob_len=transition.ob.length,
        answer=_answer(transition.ac, texts),
        was_cut_off=transition.ac.stop_reason == "length",
        is_trained=transition.train_on_action,
        reward=transition.reward,
        metrics=own_metrics(transition.metrics),
        logs={name: visible(str(value)) for name, value in transition.logs.items()},
    )


def _after(trajectory: Trajectory, texts: TokenTexts) -> Reading | None:
    if not trajectory.transitions:
        return None
    last = trajectory.transitions[-1]
    seen = [*last.ob.to_ints(), *last.ac.tokens]
    final: Observation = trajectory.final_ob
    new, goes_on = new_tokens(seen, final)
    return _reading(new, texts) if goes_on else None


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
