"""How long an episode may last, what a badly formed answer costs, and what a limit means for the
reward.

All fields off is the default, and changes nothing. `simple()` is that; `agentic()` takes a position
on each question for episodes of many turns with tools. The pieces act in three places, and a
`RolloutConfig` holds them for all of them:

* The environment (`EnvFromMessageEnv`) checks `RolloutLimits.reached` between turns and answers
  parse errors.
* The rollout reads an environment's `rollout_limits`, if it has any, for what only the one who
  calls the policy can do: `turn_tokens` bounds each call, `sampling_turn_timeout_seconds` lets a
  slow one fail, and `rollout_timeout_seconds` ends the episode also while the policy writes.
* The group (`do_group_rollout`) and an environment that grades apply the `TerminationRewardPolicy`.

A limit ends an episode and what was played is kept; nothing is raised, so the rest of its group is
not touched. The one exception is `sampling_turn_timeout_seconds`: a policy that does not answer has
failed.
"""

import math
from typing import Any, Literal

import chz

from planish.errors import UserError
from planish.rl.types import StopReason

ToolExecution = Literal["parallel", "sequential"]
TOOL_EXECUTIONS = ("parallel", "sequential")

LIMIT_STOP_REASONS = (
    StopReason.MAX_TOKENS,
    StopReason.MAX_SAMPLED_TOKENS,
    StopReason.MAX_TURNS,
    StopReason.MAX_TOOL_CALLS,
    StopReason.ROLLOUT_TIMEOUT,
)
"""The episode did not end on its own terms: a budget cut it off."""


def _count(config: Any, name: str) -> None:
    value = getattr(config, name)
    if value is not None and (not _is_whole(value) or value < 1):
        _refuse(config, name, "a whole number of at least 1, or None for no limit")


def _seconds(config: Any, name: str) -> None:
    value = getattr(config, name)
    if value is not None and (not _is_finite(value) or value <= 0):
        _refuse(config, name, "seconds above 0, or None for no limit")


def _whole(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not _is_whole(value) or value < 0:
        _refuse(config, name, "a whole number, 0 or more")


def _finite(config: Any, name: str) -> None:
    if not _is_finite(getattr(config, name)):
        _refuse(config, name, "a finite number")


def _not_negative(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not _is_finite(value) or value < 0:
        _refuse(config, name, "a finite number, 0 or more")


def _has_details(config: Any, name: str) -> None:
    if "{details}" not in getattr(config, name):
        _refuse(config, name, "a text with {details}, the place of the error")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(config: Any, name: str, wanted: str) -> None:
    field = name.removeprefix("X_")  # chz keeps a field's value under this name
    raise UserError(f"{type(config).__name__}.{field}={getattr(config, name)!r}: give {wanted}")


@chz.chz
class RolloutLimits:
    """Budgets of one episode; None = no limit."""

    max_turns: int | None = chz.field(default=None, validator=_count, doc="answers of the policy")
    max_trajectory_tokens: int | None = chz.field(
        default=None, validator=_count, doc="tokens of the whole episode, prompts and answers"
    )
    max_sampled_tokens: int | None = chz.field(
        default=None, validator=_count, doc="tokens of all answers together"
    )
    max_tool_calls: int | None = chz.field(
        default=None, validator=_count, doc="calls that are run, over all turns"
    )
    max_turn_tokens: int | None = chz.field(
        default=None,
        validator=_count,
        doc="tokens of one answer; one that is cut off here need not end the episode",
    )
    rollout_timeout_seconds: float | None = chz.field(
        default=None,
        validator=_seconds,
        doc="time of the whole episode, without its grading; what was played until then is kept",
    )
    sampling_turn_timeout_seconds: float | None = chz.field(
        default=None,
        validator=_seconds,
        doc="time of one answer; a longer one is an error of the rollout (TimeoutError)",
    )

    @property
    def bounds_turns(self) -> bool:
        """Whether an episode ends by these limits, whatever the policy writes and the environment
        answers.
        """
        ends = (self.max_turns, self.max_sampled_tokens, self.rollout_timeout_seconds)
        return any(limit is not None for limit in ends)

    @property
    def bounds_tokens(self) -> bool:
        """Whether an answer may be cut off by these limits alone."""
        budgets = (self.max_trajectory_tokens, self.max_sampled_tokens, self.max_turn_tokens)
        return any(budget is not None for budget in budgets)

    def turn_tokens(self, prompt_tokens: int, sampled_tokens: int) -> int | None:
        """Most tokens of the next answer, after a prompt of `prompt_tokens` and `sampled_tokens` in
        earlier answers.

        None = no limit; never below 1, since `reached` ends an episode that has no token left.
        """
        rooms = [
            self.max_turn_tokens,
            None
            if self.max_trajectory_tokens is None
            else self.max_trajectory_tokens - prompt_tokens,
            None if self.max_sampled_tokens is None else self.max_sampled_tokens - sampled_tokens,
        ]
        given = [room for room in rooms if room is not None]
        return max(1, min(given)) if given else None

    def reached(
        self, *, turns: int, trajectory_tokens: int, sampled_tokens: int, seconds: float
    ) -> StopReason | None:
        """The limit that forbids a further turn; None if there is room for one.

        `trajectory_tokens` is the length of the next prompt, or of the whole episode where there is
        none.
        """
        if self.max_turns is not None and turns >= self.max_turns:
            return StopReason.MAX_TURNS
        if self.rollout_timeout_seconds is not None and seconds >= self.rollout_timeout_seconds:
            return StopReason.ROLLOUT_TIMEOUT
        if self.max_sampled_tokens is not None and sampled_tokens >= self.max_sampled_tokens:
            return StopReason.MAX_SAMPLED_TOKENS
        if (
            self.max_trajectory_tokens is not None
            and trajectory_tokens >= self.max_trajectory_tokens
        ):
            return StopReason.MAX_TOKENS
        return None


@chz.chz
class ParseErrorPolicy:
    """What an answer that cannot be read leads to. With no policy, EnvFromMessageEnv's own two
    options decide.

    Two kinds of failure differ. An answer that never ended properly ends the episode with
    `terminal_reward`: nobody knows where the message stops, so there is nothing to answer to. An
    answer that is whole, but whose tool calls are all unreadable, is answered with the error, and
    the policy may try again, up to `max_consecutive` times in a row.
    """

    max_consecutive: int = chz.field(
        default=0,
        validator=_whole,
        doc="unreadable answers in a row that are answered; the next one ends",
    )
    retry_message_template: str = chz.field(
        default="The previous message had a formatting issue.\nError: {details}",
        validator=_has_details,
        doc="the user message that answers; {details} is the error",
    )
    penalty_per_error: float = chz.field(
        default=0.0,
        validator=_not_negative,
        doc="taken from the reward at each error that is answered",
    )
    terminal_reward: float = chz.field(
        default=0.0, validator=_finite, doc="of the turn that ends the episode by an error"
    )
    mask_error_turns: bool = chz.field(
        default=False, doc="do not train on the tokens of turns with an error"
    )

    def retry_message(self, details: str) -> str:
        # Not str.format: a model's text may hold braces, and so may the template.
        return self.retry_message_template.replace("{details}", details)


@chz.chz
class TerminationRewardPolicy:
    """What the way an episode ended means for its reward: graded as any other, then bounded.

    A policy must not profit from running into a budget, yet a flat penalty would erase the order
    among failures. So with `zero_reward_on_limit` the total reward of an episode that a limit ended
    becomes min(reward, 0).
    """

    zero_reward_on_limit: bool = chz.field(
        default=False, doc="bound the reward of episodes that a limit ended by 0"
    )
    limit_stop_reasons: tuple[str, ...] = chz.field(
        default=tuple(str(reason) for reason in LIMIT_STOP_REASONS),
        doc="the stop reasons that count as a limit",
    )
    skip_grading_on_timeout: bool = chz.field(
        default=False,
        doc="do not grade an episode that ran out of time if its reward is bounded by 0 anyway; it gets 0",
    )
    grader_timeout_seconds: float | None = chz.field(
        default=None,
        validator=_seconds,
        doc="time of one grading; a longer one is an error of the rollout (TimeoutError)",
    )
    pass_all_messages_to_grader: bool = chz.field(
        default=False,
        doc="a reward function sees the whole conversation; otherwise what came after the initial messages",
    )

    @chz.validate
    def _reasons_exist(self) -> None:
        unknown = [reason for reason in self.limit_stop_reasons if reason not in set(StopReason)]
        if unknown:
            raise UserError(
                f"TerminationRewardPolicy.limit_stop_reasons holds {unknown}; there are {', '.join(StopReason)}"
            )

    def is_limit(self, stop_reason: str | None) -> bool:
        return stop_reason in self.limit_stop_reasons

    def skips_grading(self, stop_reason: str | None) -> bool:
        """The grade could only lower the reward below 0, and is not worth its time."""
        timed_out = stop_reason == StopReason.ROLLOUT_TIMEOUT
        return (
            self.skip_grading_on_timeout
            and self.zero_reward_on_limit
            and timed_out
            and self.is_limit(stop_reason)
        )

    def bounded(self, total_reward: float, stop_reason: str | None) -> float:
        """The total reward of an episode that ended by `stop_reason`."""
        if self.zero_reward_on_limit and self.is_limit(stop_reason):
            return min(total_reward, 0.0)
        return total_reward


@chz.chz
class RolloutConfig:
    """The rules of an episode as one object."""

    limits: RolloutLimits = chz.field(default_factory=RolloutLimits)
    parse_errors: ParseErrorPolicy | None = None
    termination: TerminationRewardPolicy | None = None
    tool_execution: ToolExecution = chz.field(
        default="parallel", doc="sequential: one call after the other, in their order"
    )

    @chz.validate
    def _execution_exists(self) -> None:
        if self.tool_execution not in TOOL_EXECUTIONS:
            raise UserError(
                f"tool_execution={self.tool_execution!r}: give {' or '.join(TOOL_EXECUTIONS)}"
            )


def simple() -> RolloutConfig:
    """No limits, nothing repeated, rewards as they are, tools side by side."""
    return RolloutConfig()


def agentic() -> RolloutConfig:
    """For agents with tools.

    Budgets turn the long tail of episodes that go round in circles into recorded stop reasons. Two
    unreadable calls in a row are answered, as a deployed agent's harness would. Episodes that a
    limit ended are graded and earn at most 0; a grader that hangs fails after 15 minutes. Tools run
    one after the other, since they often share a file system.
    """
    return RolloutConfig(
        limits=RolloutLimits(max_turns=10, max_trajectory_tokens=65536, max_tool_calls=30),
        parse_errors=ParseErrorPolicy(max_consecutive=2),
        termination=TerminationRewardPolicy(
            zero_reward_on_limit=True, skip_grading_on_timeout=True, grader_timeout_seconds=900
        ),
        tool_execution="sequential",
    )
