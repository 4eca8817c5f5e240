"""What becomes of a group in which something failed.

    FailFast         the error is raised, and the rest of the group is cancelled
    RetryOnFailure   what failed is played again; the error is raised when the retries are used up
    MinViableGroup   the same while too few have succeeded; then the group goes on without what
                     failed, or is dropped

A failure is an `Exception` out of an environment, a builder, a grader or the policy. Three things
are told apart:

* Cancellation, KeyboardInterrupt and the like are no failures. No strategy catches them.
* After `EngineClosedError` every further rollout would fail too, so it is raised at once, whatever
  the strategy.
* A `UserError` says that the call was wrong, so it is not retried, and no group is dropped for it:
  it is raised, unless MinViableGroup can do without the trajectory. Otherwise a mistake in the
  options would look like a run without data.

A strategy is plain data: it is written into a run's config, and sent to the processes of a pool.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import chz

from planish.errors import UserError


@dataclass(frozen=True)
class FailureRules:
    """What a strategy means for one group."""

    retries: int
    """How many failures are made good by playing again; all trajectories of the group share them.
    """
    timeout_seconds: float | None
    """Time of one trajectory; a longer one has failed, by TimeoutError."""
    min_successful: int
    """Fewest trajectories of the group; once there are as many, nothing is played again."""
    drops_group: bool
    """A group that has too few is left out; otherwise its error is raised."""

    @property
    def tolerates_failures(self) -> bool:
        return self.retries > 0 or self.drops_group


@chz.chz
class RolloutStrategy(ABC):
    """How failures are dealt with; a new strategy is a class with other rules."""

    @abstractmethod
    def rules(self, group_size: int) -> FailureRules:
        """The rules for a group of so many trajectories."""


def _count(strategy: Any, name: str) -> None:
    value = getattr(strategy, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        _refuse(strategy, name, "a whole number, 0 or more")


def _seconds(strategy: Any, name: str) -> None:
    value = getattr(strategy, name)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < 0
    ):
        _refuse(strategy, name, "seconds, or 0 for no limit")


def _at_least_one(strategy: Any, name: str) -> None:
    value = getattr(strategy, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        _refuse(
            strategy, name, "a whole number of at least 1, or None for three quarters of the group"
        )


def _refuse(strategy: Any, name: str, wanted: str) -> None:
    field = name.removeprefix("X_")  # chz keeps a field's value under this name
    raise UserError(f"{type(strategy).__name__}.{field}={getattr(strategy, name)!r}: give {wanted}")


@chz.chz
class FailFast(RolloutStrategy):
    """Any failure ends the group, and is raised."""

    def rules(self, group_size: int) -> FailureRules:
        return FailureRules(
            retries=0, timeout_seconds=None, min_successful=group_size, drops_group=False
        )


@chz.chz
class RetryOnFailure(RolloutStrategy):
    """What failed is played again in a fresh environment with other draws. A group is whole, or its
    error is raised.
    """

    max_retries: int = chz.field(
        default=3, validator=_count, doc="failures of one group that are played again"
    )
    per_rollout_timeout: float = chz.field(
        default=0,
        validator=_seconds,
        doc="seconds of one trajectory; a longer one has failed; 0 = no limit",
    )

    def rules(self, group_size: int) -> FailureRules:
        return FailureRules(
            self.max_retries, self.per_rollout_timeout or None, group_size, drops_group=False
        )


@chz.chz
class MinViableGroup(RolloutStrategy):
    """A group may be smaller, but not by much: the fewer rewards its baseline is made of, the
    noisier is every advantage.

    What fails is played again as long as fewer than `min_successful` trajectories have succeeded,
    and left out afterwards. A group that stays below is dropped.
    """

    min_successful: int | None = chz.field(
        default=None,
        validator=_at_least_one,
        doc="fewest trajectories of a group; none = three quarters, rounded up",
    )
    max_retries: int = chz.field(
        default=3, validator=_count, doc="failures of one group that are played again"
    )
    per_rollout_timeout: float = chz.field(
        default=0,
        validator=_seconds,
        doc="seconds of one trajectory; a longer one has failed; 0 = no limit",
    )

    def rules(self, group_size: int) -> FailureRules:
        wanted = (
            math.ceil(0.75 * group_size) if self.min_successful is None else self.min_successful
        )
        return FailureRules(
            self.max_retries,
            self.per_rollout_timeout or None,
            min(wanted, group_size),
            drops_group=True,
        )


def strategy_from(rollout_error_tolerance: bool | RolloutStrategy | None) -> RolloutStrategy:
    """False or None: FailFast. True: RetryOnFailure with its defaults. A strategy is itself."""
    if isinstance(rollout_error_tolerance, RolloutStrategy):
        return rollout_error_tolerance
    if rollout_error_tolerance is None or rollout_error_tolerance is False:
        return FailFast()
    if rollout_error_tolerance is True:
        return RetryOnFailure()
    raise UserError(
        f"rollout_error_tolerance={rollout_error_tolerance!r}: give True, False, None, or one of FailFast(), "
        "RetryOnFailure(), MinViableGroup()"
    )
