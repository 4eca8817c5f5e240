"""Strategies for failed rollouts.

    FailFast         raises the error and cancels the rest of the group
    RetryOnFailure   retries a failed rollout; raises the error when the retries are used up
    MinViableGroup   retries while too few rollouts have succeeded; then leaves failed rollouts out,
                     or drops the group if too few remain

A failure is an `Exception` from an environment, a builder, a grader or the policy. Three kinds of
errors are special:

* Cancellation, KeyboardInterrupt and other BaseExceptions are not failures. No strategy catches
  them.
* After `EngineClosedError` every further rollout would fail too, so every strategy raises it at
  once.
* `UserError` means that the call was wrong. It is never retried and never drops a group, since
  otherwise a mistake in the options would look like a run without data. Every strategy raises it,
  except that MinViableGroup may leave the trajectory out if enough others remain.

A strategy is plain data, since it is written to config.json and sent to rollout processes.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import chz

from planish.errors import UserError
from planish.rl.field_checks import field_validator, is_finite, is_whole


@dataclass(frozen=True)
class FailureRules:
    """The rules of a strategy for one group."""

    retries: int
    """Number of retries of the whole group, shared by its trajectories."""
    timeout_seconds: float | None
    """Maximum seconds of one trajectory; a longer one fails with TimeoutError."""
    min_successful: int
    """Minimum number of successful trajectories. When it is reached, further failures are not
    retried.
    """
    drops_group: bool
    """Whether a group with too few trajectories is dropped. If not, the error is raised."""

    @property
    def tolerates_failures(self) -> bool:
        """Whether a failure may be ignored or retried."""
        return self.retries > 0 or self.drops_group


@chz.chz
class RolloutStrategy(ABC):
    """How failures are handled. A new strategy is a subclass with other rules."""

    @abstractmethod
    def rules(self, group_size: int) -> FailureRules:
        """Return the rules for a group of `group_size` trajectories."""


_retry_count = field_validator(lambda value: is_whole(value, 0), "a whole number, 0 or more")
_seconds = field_validator(
    lambda value: is_finite(value) and value >= 0, "seconds, or 0 for no limit"
)
_optional_count = field_validator(
    lambda value: value is None or is_whole(value, 1),
    "a whole number of at least 1, or None for three quarters of the group",
)


@chz.chz
class FailFast(RolloutStrategy):
    """Raise the first error of a group and cancel its other rollouts."""

    def rules(self, group_size: int) -> FailureRules:
        """Return rules without retries."""
        return FailureRules(
            retries=0, timeout_seconds=None, min_successful=group_size, drops_group=False
        )


@chz.chz
class RetryOptions:
    """How often and when a rollout is retried."""

    max_retries: int = chz.field(
        default=3,
        validator=_retry_count,
        doc="number of failed rollouts of a group that are retried",
    )
    per_rollout_timeout: float = chz.field(
        default=0,
        validator=_seconds,
        doc="time limit of a trajectory in seconds; a longer one has failed; 0 = no limit",
    )


@chz.chz
class RetryOnFailure(RetryOptions, RolloutStrategy):
    """Retry failed rollouts in new environments with other seeds. If the retries are used up, the
    error is raised, so no group has fewer trajectories than environments.
    """

    def rules(self, group_size: int) -> FailureRules:
        """Return rules with up to `max_retries` retries; all trajectories must succeed."""
        return FailureRules(
            self.max_retries, self.per_rollout_timeout or None, group_size, drops_group=False
        )


@chz.chz
class MinViableGroup(RetryOptions, RolloutStrategy):
    """Allow slightly smaller groups. Advantages are noisier in a smaller group, since its baseline
    is the mean of fewer rewards.

    Failed rollouts are retried while fewer than `min_successful` have succeeded, and left out
    afterwards. A group that stays below `min_successful` is dropped.
    """

    min_successful: int | None = chz.field(
        default=None,
        validator=_optional_count,
        doc="minimum number of successful trajectories in a group; none = three quarters, rounded "
        "up",
    )

    def rules(self, group_size: int) -> FailureRules:
        """Return rules that require `min_successful` trajectories, at most `group_size`."""
        min_successful = (
            math.ceil(0.75 * group_size) if self.min_successful is None else self.min_successful
        )
        return FailureRules(
            self.max_retries,
            self.per_rollout_timeout or None,
            min(min_successful, group_size),
            drops_group=True,
        )


def strategy_from(rollout_error_tolerance: bool | RolloutStrategy | None) -> RolloutStrategy:
    """Return the strategy that an option stands for. False and None mean FailFast, True means
    RetryOnFailure with its defaults, and a strategy stands for itself. Other values raise
    UserError.
    """
    if isinstance(rollout_error_tolerance, RolloutStrategy):
        return rollout_error_tolerance
    if rollout_error_tolerance is None or rollout_error_tolerance is False:
        return FailFast()
    if rollout_error_tolerance is True:
        return RetryOnFailure()
    raise UserError(
        f"rollout_error_tolerance={rollout_error_tolerance!r}: give True, False, None, or one of "
        "FailFast(), RetryOnFailure(), MinViableGroup()"
    )
