"""The nouns of reinforcement learning: environments, what a policy does in them, and where they
come from.

Legend: G trajectories of a group, T turns of a trajectory, P groups of a batch.

An `Env` is used once: it is made, played to its end and dropped. An `EnvGroupBuilder` makes the
environments of one group, whose rewards are compared with each other; it carries plain data, so it
pickles and can be sent to another process. An `RLDataset` is a sequence of batches of builders.
Names and fields are those of the public cookbooks, and environments that were written for them run
here (docs/porting.md).

Control does not flow through metrics: why a trajectory ended, and whether a turn is trained on, are
fields of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeAlias, TypedDict

import chz

from planish.completers import StopCondition, TokensWithLogprobs
from planish.types import ModelInput
from planish.types import StopReason as SamplerStopReason

Action: TypeAlias = list[int]
Observation: TypeAlias = ModelInput
Logprobs: TypeAlias = list[float]
Metrics: TypeAlias = dict[str, float | int]
Logs: TypeAlias = dict[str, str | int | float]


class StopReason(StrEnum):
    """Why an episode ended. Reported as the metric stop/NAME of its last turn."""

    COMPLETED = "completed"
    TOOL_STOPPED = "tool_stopped"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The policy was cut off within a turn."""
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_OVERFLOW = "context_overflow"
    PARSE_ERROR = "parse_error"
    ROLLOUT_TIMEOUT = "rollout_timeout"


class ActionExtra(TypedDict, total=False):
    """What an environment may want to know of an action beside its tokens."""

    stop_reason: SamplerStopReason


@dataclass
class StepResult:
    """What an environment answers to an action."""

    reward: float
    episode_done: bool
    next_observation: Observation
    next_stop_condition: StopCondition
    metrics: Metrics = field(default_factory=dict)
    """Numbers, reported as env/<tag>/NAME: the mean over all that have it."""
    logs: Logs = field(default_factory=dict)
    """For the rollout files only."""
    stop_reason: StopReason | None = None
    """Why the episode is done; None = completed."""
    train_on_action: bool = True
    """False: the action stays in the sequence but is not a training target."""


@dataclass(frozen=True)
class InitialObservationOverflow:
    """In place of a first observation: the prompt is too long. Nothing is sampled; the reward still
    counts in its group.
    """

    reward: float = 0.0
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)


class Env(ABC):
    """One episode. Its methods may await; state lives in the object."""

    @abstractmethod
    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """The prompt of the first turn, and where the policy is to stop."""

    @abstractmethod
    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Take the policy's tokens. Environments that take no `extra` are called without it."""


@dataclass(frozen=True)
class Transition:
    """One turn."""

    ob: Observation
    ac: TokensWithLogprobs
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    train_on_action: bool = True


@dataclass(frozen=True)
class Trajectory:
    """One episode as it was played."""

    transitions: list[Transition]
    final_ob: Observation
    stop_reason: str | None = None

    @property
    def step_rewards(self) -> float:
        """Sum of the rewards of its turns."""
        return sum(transition.reward for transition in self.transitions)


@dataclass(frozen=True)
class RolloutError:
    """An attempt at a trajectory that failed, whether or not another took its place."""

    error_type: str
    error_message: str


@dataclass(frozen=True)
class TrajectoryGroup:
    """Episodes whose rewards are compared with each other."""

    trajectories_G: list[Trajectory]
    final_rewards_G: list[float]
    """What the group's own grading adds to the rewards of the turns."""
    metrics_G: list[Metrics]
    rollout_errors: list[RolloutError] = field(default_factory=list)

    def get_total_rewards(self) -> list[float]:
        """Rewards of the turns plus that of the group, for each trajectory."""
        return [
            trajectory.step_rewards + final
            for trajectory, final in zip(self.trajectories_G, self.final_rewards_G, strict=True)
        ]


class EnvGroupBuilder(ABC):
    """Makes the environments of one group. Plain data: it must pickle."""

    plays_together: ClassVar[bool] = False
    """Its environments play with each other: when one fails, all are played again."""

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]:
        """Called again when a failed rollout is played again; `cleanup` comes once, after all."""

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """A reward and metrics for each trajectory, once all have ended; 0 and none if not
        overridden.
        """
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:  # noqa: B027  (nothing to do is the usual case)
        """Give back what `make_envs` took. Called once after every group, also when it failed or
        was cancelled.
        """

    def logging_tags(self) -> list[str]:
        """Names under which this group's metrics are reported beside env/all."""
        return []

    def teacher(self) -> str | None:
        """Name of the policy whose logprobs teach this group, in on-policy distillation; None = it
        has no teacher.
        """
        return None


class RLDataset(ABC):
    """Batches of groups. The same index gives the same batch, so that a run can be resumed; its
    builders are made anew each time, since two batches may be played at once.
    """

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]: ...

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    def data_size(self) -> int:
        """Problems, or batches if it does not say: a run goes on only with as many as it began
        with.
        """
        return len(self)


@chz.chz
class RLDatasetBuilder(ABC):
    """The options of a dataset; calling it gives the dataset for training and, if there is one, for
    tests.
    """

    @abstractmethod
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]: ...
