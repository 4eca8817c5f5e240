"""Limits of an episode, the handling of malformed answers, and the reward of episodes that a limit
ended.

By default all of these are off. `simple()` returns the default; `agentic()` returns settings for
episodes of many turns with tools. A `RolloutConfig` holds all parts. Three places apply them:

* The environment (`EnvFromMessageEnv`) checks `RolloutLimits.reached` between turns and replies to
  malformed answers.
* The rollout (`do_single_rollout`) calls the policy, so it applies the limits of such a call:
  `max_answer_tokens`, `sampling_turn_timeout_seconds`, and `rollout_timeout_seconds` while the
  policy samples. It reads them from the environment's `rollout_limits`, if there are any.
* The group (`do_group_rollout`) and environments with a grader apply the `TerminationRewardPolicy`.

A limit ends the episode and keeps its turns. It raises no error, so the other rollouts of the group
continue. The exception is `sampling_turn_timeout_seconds`: a policy that takes longer fails, with
TimeoutError.
"""

import time
from typing import Literal

import chz

from planish.errors import UserError
from planish.rl.field_checks import field_validator, is_finite, is_whole
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
"""Stop reasons of episodes that a limit ended."""


_optional_count = field_validator(
    lambda value: value is None or is_whole(value, 1),
    "a whole number of at least 1, or None for no limit",
)
_optional_seconds = field_validator(
    lambda value: value is None or (is_finite(value) and value > 0),
    "seconds above 0, or None for no limit",
)
_count = field_validator(lambda value: is_whole(value, 0), "a whole number, 0 or more")
_finite = field_validator(is_finite, "a finite number")
_not_negative = field_validator(
    lambda value: is_finite(value) and value >= 0, "a finite number, 0 or more"
)
_has_details = field_validator(
    lambda value: "{details}" in value, "a text with {details}, which the error replaces"
)


@chz.chz
class RolloutLimits:
    """Budgets of one episode; None = no limit."""

    max_turns: int | None = chz.field(
        default=None, validator=_optional_count, doc="maximum number of answers of the policy"
    )
    max_trajectory_tokens: int | None = chz.field(
        default=None,
        validator=_optional_count,
        doc="maximum tokens in the episode, prompts and answers",
    )
    max_sampled_tokens: int | None = chz.field(
        default=None, validator=_optional_count, doc="maximum tokens in all answers together"
    )
    max_tool_calls: int | None = chz.field(
        default=None, validator=_optional_count, doc="maximum number of tool calls in the episode"
    )
    max_turn_tokens: int | None = chz.field(
        default=None,
        validator=_optional_count,
        doc="maximum tokens in one answer; truncation at this limit need not end the episode",
    )
    rollout_timeout_seconds: float | None = chz.field(
        default=None,
        validator=_optional_seconds,
        doc="time limit of the episode, without grading; the turns until then are kept",
    )
    sampling_turn_timeout_seconds: float | None = chz.field(
        default=None,
        validator=_optional_seconds,
        doc="time limit of one answer; exceeding it fails the rollout (TimeoutError)",
    )

    @property
    def ends_every_episode(self) -> bool:
        """Whether these limits end every episode, whatever the policy and the environment do."""
        episode_limits = (self.max_turns, self.max_sampled_tokens, self.rollout_timeout_seconds)
        return any(limit is not None for limit in episode_limits)

    @property
    def can_truncate_answers(self) -> bool:
        """Whether these limits can cut off an answer."""
        token_limits = (self.max_trajectory_tokens, self.max_sampled_tokens, self.max_turn_tokens)
        return any(limit is not None for limit in token_limits)

    def seconds_left(self, start_time: float) -> float | None:
        """Return the seconds left of an episode that began at `start_time` on the monotonic clock;
        None = no limit.
        """
        return (
            None
            if self.rollout_timeout_seconds is None
            else self.rollout_timeout_seconds - (time.monotonic() - start_time)
        )

    def max_answer_tokens(self, prompt_tokens: int, sampled_tokens: int) -> int | None:
        """Return the maximum number of tokens in the next answer; None = no limit. `prompt_tokens`
        is the length of its prompt, `sampled_tokens` the number of tokens in earlier answers.

        The result is at least 1, since `reached` ends an episode that has no token left.
        """
        token_limits: list[int] = []
        if self.max_turn_tokens is not None:
            token_limits.append(self.max_turn_tokens)
        if self.max_trajectory_tokens is not None:
            token_limits.append(self.max_trajectory_tokens - prompt_tokens)
        if self.max_sampled_tokens is not None:
            token_limits.append(self.max_sampled_tokens - sampled_tokens)
        return max(1, min(token_limits)) if token_limits else None

    def reached(
        self, *, turns: int, trajectory_tokens: int, sampled_tokens: int, seconds: float
    ) -> StopReason | None:
        """Return the stop reason of the first limit that is reached; None if the episode may
        continue.

        `trajectory_tokens` is the length of the next prompt, or of the whole episode if there is no
        next prompt. `turns` and `seconds` count from the start of the episode.
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
    """How malformed answers are handled. The policy replaces the options `failed_parse_reward` and
    `terminate_on_parse_error` of EnvFromMessageEnv.

    There are two kinds of malformed answers. An answer without a stop sequence ends the episode
    with `terminal_reward`, since its message may be incomplete. A complete answer with tool calls
    that are all unreadable gets the error as a reply. The model may then try again, up to
    `max_consecutive` times in a row.
    """

    max_consecutive: int = chz.field(
        default=0,
        validator=_count,
        doc="number of consecutive unreadable answers that get a reply; the next one ends the "
        "episode",
    )
    retry_message_template: str = chz.field(
        default="The previous message had a formatting issue.\nError: {details}",
        validator=_has_details,
        doc="user message that replies to an unreadable answer; {details} is the error",
    )
    penalty_per_error: float = chz.field(
        default=0.0,
        validator=_not_negative,
        doc="penalty of each error that gets a reply",
    )
    terminal_reward: float = chz.field(
        default=0.0, validator=_finite, doc="reward of the turn whose error ends the episode"
    )
    mask_error_turns: bool = chz.field(
        default=False, doc="do not train on the tokens of turns with an error"
    )

    def retry_message(self, details: str) -> str:
        """Return the reply to an answer with the error `details`."""
        # str.format would fail on a template with other braces.
        return self.retry_message_template.replace("{details}", details)


@chz.chz
class TerminationRewardPolicy:
    """The reward of an episode that a limit ended.

    A policy must not profit from running into a limit. A constant penalty would make all such
    episodes equal, although some fail worse than others. So such an episode is graded like any
    other, and with `zero_reward_on_limit` its total reward becomes min(reward, 0).
    """

    zero_reward_on_limit: bool = chz.field(
        default=False, doc="limit the reward of episodes that a limit ended to at most 0"
    )
    limit_stop_reasons: tuple[str, ...] = chz.field(
        default=tuple(str(reason) for reason in LIMIT_STOP_REASONS),
        doc="stop reasons that count as a limit",
    )
    skip_grading_on_timeout: bool = chz.field(
        default=False,
        doc="do not grade an episode that ran out of time if its reward is at most 0 in any case; "
        "it gets 0",
    )
    grader_timeout_seconds: float | None = chz.field(
        default=None,
        validator=_optional_seconds,
        doc="time limit of one grading; exceeding it fails the rollout (TimeoutError)",
    )
    pass_all_messages_to_grader: bool = chz.field(
        default=False,
        doc="reward functions see the whole conversation; False = only the messages after the "
        "initial ones",
    )

    @chz.validate
    def _reasons_exist(self) -> None:
        unknown = [reason for reason in self.limit_stop_reasons if reason not in set(StopReason)]
        if unknown:
            raise UserError(
                f"TerminationRewardPolicy.limit_stop_reasons has {unknown}; valid reasons are "
                f"{', '.join(StopReason)}"
            )

    def is_limit(self, stop_reason: str | None) -> bool:
        """Return whether `stop_reason` counts as a limit."""
        return stop_reason in self.limit_stop_reasons

    def skips_grading(self, stop_reason: str | None) -> bool:
        """Return whether an episode that ended with `stop_reason` is not graded, because it ran out
        of time and could only get a reward of 0 or less.
        """
        timed_out = stop_reason == StopReason.ROLLOUT_TIMEOUT
        return (
            self.skip_grading_on_timeout
            and self.zero_reward_on_limit
            and timed_out
            and self.is_limit(stop_reason)
        )

    def clamp(self, total_reward: float, stop_reason: str | None) -> float:
        """Return the total reward of an episode with this stop reason: at most 0 after a limit."""
        return (
            min(total_reward, 0.0)
            if self.zero_reward_on_limit and self.is_limit(stop_reason)
            else total_reward
        )


@chz.chz
class RolloutConfig:
    """The limits of an episode, and how malformed answers, rewards and tool calls are handled."""

    limits: RolloutLimits = chz.field(default_factory=RolloutLimits)
    parse_errors: ParseErrorPolicy | None = None
    termination: TerminationRewardPolicy | None = None
    tool_execution: ToolExecution = chz.field(
        default="parallel",
        doc="parallel = all calls at once, sequential = one after the other, in their order",
    )

    @chz.validate
    def _execution_exists(self) -> None:
        if self.tool_execution not in TOOL_EXECUTIONS:
            raise UserError(
                f"tool_execution={self.tool_execution!r}: give {' or '.join(TOOL_EXECUTIONS)}"
            )


def simple() -> RolloutConfig:
    """Return a config without limits, retries of malformed answers or changes of rewards. Tool
    calls run in parallel.
    """
    return RolloutConfig()


def agentic() -> RolloutConfig:
    """Return a config for agents with tools.

    Limits end episodes that make no progress, with a recorded stop reason. Up to two unreadable
    calls in a row get the error as a reply, as in a deployed agent. Episodes that a limit ended are
    graded, and their reward is at most 0. A grader that runs longer than 15 minutes fails with
    TimeoutError. Tool calls run sequentially, since tools often share a file system.
    """
    return RolloutConfig(
        limits=RolloutLimits(max_turns=10, max_trajectory_tokens=65536, max_tool_calls=30),
        parse_errors=ParseErrorPolicy(max_consecutive=2),
        termination=TerminationRewardPolicy(
            zero_reward_on_limit=True, skip_grading_on_timeout=True, grader_timeout_seconds=900
        ),
        tool_execution="sequential",
    )
