"""Evaluation of a policy on environments."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from planish import SamplingClient
from planish.completers import TinkerTokenCompleter, derived_seed
from planish.processes.interruption import gather_or_cancel
from planish.rl.rollout.metrics import environment_metrics
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.rollout.runner import GroupRolloutRunner
from planish.rl.rollout.strategy import FailFast
from planish.rl.types import EnvGroupBuilder, RLDataset
from planish.runlog.console import Stage
from planish.runlog.evaluators import SamplingClientEvaluator


@dataclass(eq=False)
class RLTestSetEvaluator(SamplingClientEvaluator):
    """Rolls out every group of a dataset once and returns the metrics NAME/env/all/.... Their
    definitions are those of the training metrics env/all/....

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

    def __post_init__(self) -> None:
        self.builders = [
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
        if skipped:
            metrics["rollout_errors/groups_skipped"] = skipped
        return {f"{self.name}/{key}": value for key, value in metrics.items()}
