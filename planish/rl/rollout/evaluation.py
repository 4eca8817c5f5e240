"""Evaluation of a policy on environments."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from planish import SamplingClient
from planish.completers import TinkerTokenCompleter, derived_seed
from planish.errors import AbstainError
from planish.processes.interruption import gather_or_cancel
from planish.rl.rollout.metrics import environment_metrics, repeated_sample_metrics
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.rollout.runner import GroupRolloutRunner
from planish.rl.rollout.strategy import FailFast
from planish.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, Trajectory
from planish.runlog.console import Stage
from planish.runlog.evaluators import SamplingClientEvaluator


@dataclass(frozen=True)
class RepeatedGroup(EnvGroupBuilder):
    """Several groups for the same problem, rolled out and reported as one. Each of `inners` grades
    and cleans up its own environments.
    """

    inners: Sequence[EnvGroupBuilder]
    _index_by_env_id: dict[int, int] = field(
        default_factory=dict[int, int], repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "plays_together", self.inners[0].plays_together)

    async def make_envs(self) -> Sequence[Env]:
        """Return new environments of all groups."""
        all_envs: list[Env] = []
        for index, inner in enumerate(self.inners):
            envs = await inner.make_envs()
            self._index_by_env_id.update({id(env): index for env in envs})
            all_envs += envs
        return all_envs

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics] | AbstainError]:
        """Return the rewards and metrics of each group's trajectories."""
        grades: dict[int, tuple[float, Metrics] | AbstainError] = {}
        for index, inner in enumerate(self.inners):
            own = [
                (trajectory, env)
                for trajectory, env in zip(trajectory_group, env_group, strict=True)
                if self._index_by_env_id[id(env)] == index
            ]
            if own:
                trajectories, envs = map(list, zip(*own, strict=True))
                graded: Sequence[tuple[float, Metrics] | AbstainError]
                try:
                    graded = await inner.compute_group_rewards(trajectories, envs)
                except AbstainError as error:
                    graded = [error] * len(envs)
                grades |= {id(env): grade for env, grade in zip(envs, graded, strict=True)}
        return [grades[id(env)] for env in env_group]

    async def cleanup(self) -> None:
        """Clean up all groups. The first error is raised after all have been cleaned up."""
        results = await asyncio.gather(
            *(inner.cleanup() for inner in self.inners), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def logging_tags(self) -> list[str]:
        """Return the tags of the groups."""
        return self.inners[0].logging_tags()


@dataclass(eq=False)
class RLTestSetEvaluator(SamplingClientEvaluator):
    """Rolls out every group of a dataset and returns the metrics NAME/env/all/.... Their
    definitions are those of the training metrics env/all/....

    With `num_samples` > 1, every group is rolled out that many times, as one larger group. The
    metrics avg@n and pass@k are added (`repeated_sample_metrics`).

    Every evaluation samples with the same seeds, which are derived from `seed` and the index of the
    group. So random numbers do not favour one policy over another.
    """

    dataset: RLDataset
    max_tokens: int
    name: str = "test"
    _: KW_ONLY
    temperature: float = 1.0
    num_groups_to_log: int = 4
    seed: int = 0
    num_samples: int = 1

    def __post_init__(self) -> None:
        self.builders = self._make_builders()
        if self.num_samples > 1:
            # A builder may keep state of its group, so each repetition has its own.
            repetitions = [self._make_builders() for _ in range(self.num_samples - 1)]
            self.builders = [
                RepeatedGroup(inners) for inners in zip(self.builders, *repetitions, strict=True)
            ]

    def _make_builders(self) -> list[EnvGroupBuilder]:
        return [
            builder
            for index in range(len(self.dataset))
            for builder in self.dataset.get_batch(index)
        ]

    async def __call__(self, sampling_client: SamplingClient) -> Mapping[str, float]:
        """Roll out all groups in this process and return the metrics. A failed rollout raises its
        error.
        """
        runner = GroupRolloutRunner(FailFast(), termination=None)
        return self.metrics(await self.roll_out(sampling_client, runner))

    async def roll_out(
        self,
        sampling_client: SamplingClient,
        runner: GroupRolloutRunner,
        context_window: int | None = None,
        sampler_step: int | None = None,
        progress: Stage | None = None,
    ) -> list[GroupRollout]:
        """Return the rollouts in order, without groups that were dropped. `context_window` (in
        tokens) limits a prompt and its answer together (see TinkerTokenCompleter).
        """
        policy = TinkerTokenCompleter(
            sampling_client, self.max_tokens, self.temperature, context_window
        )

        async def one(group_idx: int, builder: EnvGroupBuilder) -> GroupRollout | None:
            return await runner.run(
                builder,
                policy,
                batch=self.name,
                group_idx=group_idx,
                seed=derived_seed(self.seed, group_idx),
                sampler_step=sampler_step,
                is_logged=group_idx < self.num_groups_to_log,
                progress=progress,
            )

        finished = await gather_or_cancel(
            one(index, builder) for index, builder in enumerate(self.builders)
        )
        return [group for group in finished if group is not None]

    def metrics(self, groups: Sequence[GroupRollout]) -> dict[str, float]:
        """Return the metrics of these groups, and the number of dropped groups if there are any."""
        skipped = len(self.builders) - len(groups)
        metrics = environment_metrics(groups)
        if self.num_samples > 1:
            metrics |= repeated_sample_metrics(groups)
        if skipped:
            metrics["rollout_errors/groups_skipped"] = skipped
        return {f"{self.name}/{key}": value for key, value in metrics.items()}
