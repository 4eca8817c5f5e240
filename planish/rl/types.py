"""The types of reinforcement learning: environments, trajectories, groups and datasets.

Legend: G trajectories of a group, T turns of a trajectory, P groups of a batch.

An `Env` is used for one episode. An `EnvGroupBuilder` makes the environments of one group, whose
rewards are compared with each other. A builder holds plain data, so it can be pickled and sent to
another process. An `RLDataset` is a sequence of batches of builders. Names and fields are those of
the public cookbooks, so environments that were written for them run here
(docs/reference/porting.md).

Metrics are for reports only. The training loop reads other fields, such as the stop reason of a
trajectory and `train_on_action` of a turn.
"""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeAlias, TypedDict

import chz

from planish.completers import StopCondition, TokensWithLogprobs
from planish.errors import AbstainError
from planish.types import ModelInput, StopReason as SamplerStopReason

Action: TypeAlias = list[int]
Observation: TypeAlias = ModelInput
Logprobs: TypeAlias = list[float]
Metrics: TypeAlias = dict[str, float | int]
Logs: TypeAlias = dict[str, str | int | float]


class StopReason(StrEnum):
    """Why an episode ended. The metric stop/NAME of its last turn reports the reason."""

    COMPLETED = "completed"
    TOOL_STOPPED = "tool_stopped"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """An answer was cut off, or the episode reached `max_trajectory_tokens`."""
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_OVERFLOW = "context_overflow"
    PARSE_ERROR = "parse_error"
    ROLLOUT_TIMEOUT = "rollout_timeout"


class ActionExtra(TypedDict, total=False):
    """Optional information on an action, in addition to its tokens."""

    stop_reason: SamplerStopReason


@dataclass
class StepResult:
    """The result of one action."""

    reward: float
    episode_done: bool
    next_observation: Observation
    next_stop_condition: StopCondition
    metrics: Metrics = field(default_factory=Metrics)
    """Numbers by name. env/<tag>/NAME is the mean over the turns that have NAME."""
    logs: Logs = field(default_factory=Logs)
    """Values that are shown in the rollout files only."""
    stop_reason: StopReason | None = None
    """Why the episode is done; None = completed."""
    train_on_action: bool = True
    """Whether the tokens of the action are training targets. If not, they stay in the sequence."""


@dataclass(frozen=True)
class InitialObservationOverflow:
    """The result of `Env.initial_observation` if the prompt is too long. Nothing is sampled, but
    the reward still counts in its group.
    """

    reward: float = 0.0
    metrics: Metrics = field(default_factory=Metrics)
    logs: Logs = field(default_factory=Logs)


class Env(ABC):
    """One episode. The object holds its state."""

    @abstractmethod
    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Return the prompt of the first turn and the stop condition of its answer."""

    @abstractmethod
    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Apply the policy's tokens and return the result. Environments may leave out the parameter
        `extra`; they are then called without it.
        """


@dataclass(frozen=True)
class Transition:
    """One turn: an observation, the action that the policy sampled, and its result."""

    ob: Observation
    ac: TokensWithLogprobs
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=Metrics)
    logs: Logs = field(default_factory=Logs)
    train_on_action: bool = True


@dataclass(frozen=True)
class Trajectory:
    """The turns of one finished episode."""

    transitions: list[Transition]
    final_ob: Observation
    stop_reason: str | None = None
    seed: int | None = None
    """The seed of its policy. Turn t, counted from 1, samples with `derived_seed(seed, t)`. None if
    the rollout had no seed.
    """

    @property
    def step_rewards(self) -> float:
        """Sum of the rewards of its turns."""
        return sum(transition.reward for transition in self.transitions)


@dataclass(frozen=True)
class RolloutError:
    """A failed attempt at a trajectory, whether or not a retry succeeded."""

    error_type: str
    error_message: str


@dataclass(frozen=True)
class TrajectoryGroup:
    """Trajectories whose rewards are compared with each other."""

    trajectories_G: list[Trajectory]
    final_rewards_G: list[float]
    """Rewards of `EnvGroupBuilder.compute_group_rewards`, in addition to those of the turns."""
    metrics_G: list[Metrics]
    rollout_errors: list[RolloutError] = field(default_factory=list[RolloutError])
    num_abstained: int = 0
    """Number of trajectories that were left out because their grader abstained (AbstainError). If
    it abstained from all, the group has no trajectories.
    """

    def get_total_rewards(self) -> list[float]:
        """Return for each trajectory the sum of its turns' rewards and its group reward."""
        return [
            trajectory.step_rewards + final
            for trajectory, final in zip(self.trajectories_G, self.final_rewards_G, strict=True)
        ]


class EnvGroupBuilder(ABC):
    """Makes the environments of one group. A builder holds plain data, since it must be
    picklable.
    """

    plays_together: ClassVar[bool] = False
    """Whether the environments interact. If so, all are rolled out again when one fails."""

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]:
        """Return new environments. It is called again for each retry; `cleanup` is called once, at
        the end.
        """

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics] | AbstainError]:
        """Return a further reward and metrics for each trajectory, after all have ended. By
        default they are 0 and {}.

        An AbstainError in place of such a pair leaves the trajectory out of the group. If the
        method raises AbstainError, all trajectories are left out.
        """
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:  # noqa: B027  (nothing to do is the usual case)
        """Release the resources of `make_envs`. It is called once after every group, also if the
        group failed or was cancelled.
        """

    def logging_tags(self) -> list[str]:
        """Return the tags of the group: its metrics are reported as env/TAG/... and env/all/...."""
        return []

    def teacher(self) -> str | None:
        """Return the name of the group's teacher in on-policy distillation; None = no teacher."""
        return None


@dataclass(frozen=True)
class WrappedGroup(EnvGroupBuilder):
    """A group that forwards all calls to another group. Subclasses override some of them."""

    inner: EnvGroupBuilder

    async def make_envs(self) -> Sequence[Env]:
        """Return the other group's new environments."""
        return await self.inner.make_envs()

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics] | AbstainError]:
        """Return the rewards and metrics of the other group."""
        return await self.inner.compute_group_rewards(trajectory_group, env_group)

    async def cleanup(self) -> None:
        """Clean up the other group."""
        await self.inner.cleanup()

    def logging_tags(self) -> list[str]:
        """Return the tags of the other group."""
        return self.inner.logging_tags()


def prompt_id(prompt: ModelInput) -> str:
    """Return a text that identifies a prompt by its tokens and images, for files: 16 hexadecimal
    digits.
    """
    return hashlib.sha256(array("q", prompt.to_keys()).tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class PromptLength:
    """The length of a problem's first prompt."""

    num_tokens: int
    place: str
    """The name of the problem in messages, such as its file and line."""


def longest_of(lengths: Iterable[PromptLength | None]) -> PromptLength | None:
    """Return the longest of several prompts; None if no length is known."""
    known = [length for length in lengths if length is not None]
    return max(known, key=lambda length: length.num_tokens, default=None)


class RLDataset(ABC):
    """Batches of groups. The same index gives the same batch, so that a run can be resumed. The
    builders are made anew each time, since two batches may be rolled out at the same time.
    """

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return new builders for the groups of batch `index`."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches."""

    def require_full_batch(self) -> None:  # noqa: B027  (not every dataset has batches of one size)
        """Raise UserError if the batch size is larger than the dataset, which would be cut without
        notice. A run calls it before it trains.
        """

    def inner_datasets(self) -> "Sequence[RLDataset]":
        """Return the datasets that this one consists of; by default there are none."""
        return ()

    def longest_prompt(self, above: int = 0) -> PromptLength | None:
        """Return the longest of the first prompts that have more than `above` tokens; None if there
        is none, or if the prompts are known only during rollouts.
        """
        return longest_of(inner.longest_prompt(above) for inner in self.inner_datasets())

    def require_answers_fit(self, max_tokens: int) -> None:
        """Raise UserError if a model that grades the answers cannot read answers of `max_tokens`
        tokens. A run calls it before it trains.
        """
        for inner in self.inner_datasets():
            inner.require_answers_fit(max_tokens)

    def data_size(self) -> int:
        """Return the number of problems, or of batches if that is unknown. A run resumes only with
        the same number as at its start.
        """
        return len(self)


@chz.chz
class RLDatasetBuilder(ABC):
    """The options of a dataset. Calling it returns the training dataset and the test dataset, or
    None in place of the latter.
    """

    @abstractmethod
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset or None)."""

    def smallest_group_size(self) -> int | None:
        """Return the smallest number of trajectories in a training group: by default the option
        `group_size` if the builder has one; None if it is unknown.
        """
        return getattr(self, "group_size", None)


def smallest_group_size_of(builders: Sequence[RLDatasetBuilder]) -> int | None:
    """Return the smallest group size of several builders; None if no builder knows its own."""
    sizes = (builder.smallest_group_size() for builder in builders)
    return min((size for size in sizes if size is not None), default=None)
