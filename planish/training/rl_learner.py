"""The steps of an RL run: each step samples a batch of groups and trains on it.

Legend: P groups of a batch, G trajectories of a group.

Batches are rolled out in the order of the dataset, and step j trains on batch j. The rollouts of
batch j begin as soon as the weights have had j - `max_steps_off_policy` updates. So no group is
staler than `max_steps_off_policy` steps, no group is thrown away, and no group is rolled out twice.
The price is that a step waits for the slowest group of its own batch. With `max_refills`, a step
adds further batches, which sample from the newest weights, and may leave some of their groups out.
The batches of later steps then follow the refills (planish/training/batch_order.py).

The lag is `max_steps_off_policy`, or 0 in synchronous training. With lag 0 a step publishes the
weights, rolls out and trains.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from planish import SamplingClient
from planish.completers import TinkerTokenCompleter, derived_seed
from planish.errors import UserError
from planish.processes.interruption import run_uncancelled
from planish.reports.rollout_files import RolloutFiles
from planish.reports.rollout_records import TrainedTokens
from planish.rl.data_processing import TrainingSequence
from planish.rl.kl import AdvantageShaping
from planish.rl.rollout.evaluation import RLTestSetEvaluator
from planish.rl.rollout.metrics import (
    environment_metrics,
    sampling_entropy,
    sampling_times,
    staleness,
    token_counts,
)
from planish.rl.rollout.processes.pool import RolloutPool
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.rollout.runner import GroupRolloutRunner
from planish.rl.rollout.strategy import strategy_from
from planish.rl.types import EnvGroupBuilder, Metrics, RLDataset, RolloutError
from planish.runlog.console import Stage
from planish.runlog.evaluators import Evaluator
from planish.runlog.run_directory import CheckpointRecord
from planish.runlog.spans import Spans
from planish.training.batch_order import BatchOrder
from planish.training.rl_config import Config
from planish.training.rl_step import TrainingStep, roll_out_and_submit
from planish.training.run_loop import RunLoop


@dataclass
class PendingBatch:
    """The groups of one step, while they are rolled out and afterwards."""

    groups: list[asyncio.Task[GroupRollout | None]] = field(
        default_factory=list[asyncio.Task[GroupRollout | None]]
    )
    progress: list[Stage] = field(default_factory=list[Stage])
    """The displays of the dataset's batches: one, and one for each refill."""
    errors_of_dropped: list[RolloutError] = field(default_factory=list[RolloutError])
    """The rollout errors of dropped groups."""


@dataclass
class RLLearner:
    """Runs the steps of one RL run."""

    loop: RunLoop
    config: Config
    dataset: RLDataset
    files: RolloutFiles
    evaluators: Sequence[Evaluator]
    shaping: AdvantageShaping | None
    context_window: int | None
    in_flight: deque[PendingBatch] = field(default_factory=deque[PendingBatch])
    """Batches that have not been trained on, the next one first."""
    current_update: TrainingStep | None = None
    """The update of the step that is being trained on."""
    has_printed_page: bool = False

    def __post_init__(self) -> None:
        self.training_client = self.loop.training_client
        record = self.loop.start.record
        self.counters = RunCounters.from_checkpoint(record)
        self.batch_order = BatchOrder.from_checkpoint(record, self.loop.steps_done)

    async def run_steps(self) -> None:
        """Run all steps, evaluate the final weights, and log their metrics in a separate row."""
        strategy = strategy_from(self.config.rollout_error_tolerance)
        async with (
            RolloutPool.open(self.config.rollout_processes, self.config.ray) as pool,
            asyncio.TaskGroup() as tasks,
        ):
            runner = GroupRolloutRunner(strategy, self.config.termination, pool)
            for step in range(self.loop.steps_done, self.loop.num_steps):
                await self.step(step, runner, tasks)
            await self.final_eval(runner)

    async def step(self, step: int, runner: GroupRolloutRunner, tasks: asyncio.TaskGroup) -> None:
        """Run one step: save and evaluate if due, roll out, train, log."""
        loop, spans = self.loop, Spans(self.loop.trace)
        if (save_checkpoint := loop.due_checkpoint(loop.steps_done)) is not None:
            with spans.measure("save_checkpoint"):
                await loop.save(save_checkpoint)
        with spans.measure("publish"):
            sampling_client = await self.publish()
        evals: Metrics = {}
        if loop.is_eval_due(step, self.config.eval_every):
            evals = await self.evaluate(step, sampling_client, runner, spans)
        start = partial(self.add_rollouts, self.policy(sampling_client), step, runner, tasks)
        self.start_batches(step, start)
        batch = self.in_flight[0]
        self.current_update = TrainingStep(
            self.config, self.training_client, self.shaping, loop.learning_rate(step)
        )
        rollouts = await roll_out_and_submit(
            self.current_update,
            batch.groups,
            loop.interruption.guard,
            spans,
            lambda: start(batch, step, self.batch_order.refill()),
        )
        self.in_flight.popleft()
        for progress in batch.progress:
            progress.close()
        # The trainer applies a submitted update even if this task is cancelled. So log the step in
        # any case: otherwise a checkpoint would contain an update that the log does not have.
        await run_uncancelled(self.finish(step, self.current_update, batch, rollouts, evals, spans))

    async def finish(
        self,
        step: int,
        update: TrainingStep,
        batch: PendingBatch,
        rollouts: Sequence[GroupRollout],
        evals: Metrics,
        spans: Spans,
    ) -> None:
        """Wait until the trainer is done with a submitted step, and log the step."""
        train_metrics = await self.train_metrics(step, update, spans)
        with spans.measure("rollout_files"):
            groups, rewards = [rollout.group for rollout in rollouts], self.config.training_rewards
            advantages = [rewards.mean_advantages(group) for group in groups]
            await self.write_files("train", step, rollouts, advantages, update.trained_tokens)
        self.print_first_page(step)
        self.counters.add_step(rollouts, batch.groups, update.data_D, batch.errors_of_dropped)
        metrics = {
            "progress/batch": step,
            "progress/done_frac": (step + 1) / self.loop.num_steps,
            **environment_metrics(rollouts),
            **rewards.metrics(groups),
            **train_metrics,
            **self.epoch_metrics(),
            **sampling_entropy(update.sampled_D),
            **(staleness(rollouts, step) if self.config.async_config else {}),
            **self.counters.metrics(),
            **evals,
            **sampling_times(rollouts),
        }
        self.loop.log_step(step, metrics, spans)
        self.loop.display.step_done()
        self.loop.steps_done, self.current_update = step + 1, None
        self.batch_order.finish_step()

    async def train_metrics(self, step: int, update: TrainingStep, spans: Spans) -> Metrics:
        """Wait until the trainer is done with a step, and return its metrics."""
        with (
            spans.measure("train"),
            self.loop.display.training(step, update.num_minibatches) as progress,
        ):
            metrics = await update.finish(progress.advance)
        if self.config.compute_post_kl:
            with spans.measure("compute_post_kl"):
                metrics |= await update.post_update_kl()
        return metrics

    def policy(self, sampling_client: SamplingClient) -> TinkerTokenCompleter:
        """Return the policy that training groups are rolled out with."""
        return TinkerTokenCompleter(
            sampling_client, self.config.max_tokens, self.config.temperature, self.context_window
        )

    def start_batches(self, step: int, start: Callable[[PendingBatch, int, int], None]) -> None:
        """Start the rollouts of all batches up to `step` + lag that have not started yet. They
        sample from the weights before the update of `step`.
        """
        end_batch = min(step + self.config.lag + 1, self.loop.num_steps)
        for index in range(step + len(self.in_flight), end_batch):
            batch = PendingBatch()
            start(batch, index, self.batch_order.start_step())
            self.in_flight.append(batch)

    def add_rollouts(
        self,
        policy: TinkerTokenCompleter,
        sampler_step: int,
        runner: GroupRolloutRunner,
        tasks: asyncio.TaskGroup,
        batch: PendingBatch,
        step: int,
        data_index: int,
    ) -> None:
        """Start the rollouts of the dataset's batch `data_index`, and add them to `batch`, which
        `step` trains on. `sampler_step` is the step of the policy's weights.
        """
        builders = self.group_builders(data_index)
        progress = self.loop.display.sampling(step, len(builders))
        batch.progress.append(progress)
        batch.groups += [
            tasks.create_task(
                runner.run(
                    builder,
                    policy,
                    batch=f"step {step}",
                    group_idx=group_idx,
                    seed=derived_seed(self.config.seed, step, group_idx),
                    sampler_step=sampler_step,
                    is_logged=group_idx < self.config.num_groups_to_log,
                    progress=progress,
                    errors_of_dropped=batch.errors_of_dropped,
                )
            )
            for group_idx, builder in enumerate(builders, start=len(batch.groups))
        ]

    def epoch_metrics(self) -> Metrics:
        """Return the number of epochs whose batches have been rolled out, if there are refills."""
        config = self.config
        if config.max_refills == 0:
            return {}
        epoch_size = len(self.dataset) / (config.num_epochs * (1 + config.max_refills))
        return {"dynamic_sampling/epochs": self.batch_order.next_index / epoch_size}

    def group_builders(self, index: int) -> list[EnvGroupBuilder]:
        """Return the groups of a batch. An error of the dataset names the batch."""
        try:
            builders = list(self.dataset.get_batch(index) or ())
        except Exception as error:
            error.add_note(f"in batch {index} of {type(self.dataset).__name__}")
            raise
        if not builders:
            raise UserError(f"the dataset's batch {index} has no groups; give at least one in each")
        return builders

    async def publish(self) -> Any:
        """Return a sampling client of the current weights."""
        return await self.training_client.save_weights_and_get_sampling_client_async()

    async def evaluate(
        self, step: int, sampling_client: SamplingClient, runner: GroupRolloutRunner, spans: Spans
    ) -> Metrics:
        """Run all evaluators on the weights before `step`, and return their metrics."""

        async def evaluate_one(evaluator: Evaluator) -> Metrics:
            if isinstance(evaluator, RLTestSetEvaluator):
                return await self.evaluate_rl_test_set(step, evaluator, sampling_client, runner)
            return await self.loop.evaluate_one(evaluator, sampling_client)

        return await self.loop.evaluate(step, self.evaluators, spans, evaluate_one)

    async def evaluate_rl_test_set(
        self,
        step: int,
        evaluator: RLTestSetEvaluator,
        sampling_client: SamplingClient,
        runner: GroupRolloutRunner,
    ) -> Metrics:
        """Roll out a test set, write its rollouts to files, and return its metrics."""
        with self.loop.display.evaluation(evaluator.name, len(evaluator.builders)) as progress:
            rollouts = await evaluator.roll_out(
                sampling_client,
                runner,
                context_window=self.context_window,
                sampler_step=step,
                progress=progress,
            )
        await self.write_files(f"eval/{evaluator.name}", step, rollouts, None)
        return evaluator.metrics(rollouts)

    async def final_eval(self, runner: GroupRolloutRunner) -> None:
        """Evaluate the final weights, and log the metrics in a separate row."""
        if not self.evaluators:
            return
        num_steps, spans = self.loop.num_steps, Spans(self.loop.trace)
        evals = await self.evaluate(num_steps, await self.publish(), runner, spans)
        row = {"progress/batch": num_steps, "progress/done_frac": 1.0, **evals}
        self.loop.log_step(num_steps, row, spans)

    async def write_files(
        self,
        split: str,
        step: int,
        rollouts: Sequence[GroupRollout],
        advantages: list[list[float | None]] | None,
        trained: Mapping[tuple[int, int], TrainedTokens] | None = None,
    ) -> None:
        """Write the rollouts of a step to files. `advantages` are those of the trajectories,
        [P][G], each None if the trajectory is not trained on; or None for evaluations. `trained`
        has the trained tokens by (group, trajectory).
        """
        write = partial(self.files.write, split, step, rollouts, advantages, trained=trained)
        await run_uncancelled(asyncio.to_thread(write))
        log = self.loop.metric_log
        if log.takes_rollouts:
            rows = await asyncio.to_thread(
                self.files.logged_rows, split, step, rollouts, advantages
            )
            log.log_rollouts(step, split, rows)

    def print_first_page(self, step: int) -> None:
        """Print the path of the first page of rollouts, once per process."""
        if not self.has_printed_page and self.config.num_groups_to_log:
            self.has_printed_page = True
            page = self.files.path("train", step)
            self.loop.display.say(
                f"rollouts of step {step}, for reading: {page}; each step has a page"
            )

    async def settle_after_error(self) -> bool:
        """Return False if the step that failed has changed the weights."""
        return self.current_update is None or not await self.current_update.has_moved_weights()

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Return the counters and the order of the batches, which are saved with the checkpoint."""
        return {**self.counters.checkpoint_fields(), **self.batch_order.checkpoint_fields()}


@dataclass
class RunCounters:
    """Counts over the whole run. Checkpoints carry them, so that a resumed run continues them."""

    tokens: Counter[str]
    errors: Counter[str]
    step_tokens: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def from_checkpoint(cls, record: CheckpointRecord | None) -> Self:
        """Return the counts of a checkpoint; zeros without a checkpoint."""
        extra: Mapping[str, Any] = record.extra if record else {}
        return cls(
            Counter(extra.get("cumulative_tokens", {})), Counter(extra.get("rollout_errors", {}))
        )

    def checkpoint_fields(self) -> dict[str, dict[str, int]]:
        """Return the counts in the form of a checkpoint's row."""
        return {"cumulative_tokens": dict(self.tokens), "rollout_errors": dict(self.errors)}

    def add_step(
        self,
        rollouts: Sequence[GroupRollout],
        groups: Sequence[object],
        data_D: Sequence[TrainingSequence],
        errors_of_dropped: Sequence[RolloutError] = (),
    ) -> None:
        """Count one step. `rollouts` are the groups of `groups` that were not dropped. `data_D` are
        the trained sequences. `errors_of_dropped` are the errors of dropped groups.
        """
        trained_tokens = sum(len(sequence.tokens_N) - 1 for sequence in data_D)
        self.step_tokens = Counter({**token_counts(rollouts), "trained": trained_tokens})
        self.tokens.update(self.step_tokens)
        errors = [error for rollout in rollouts for error in rollout.group.rollout_errors]
        for error in [*errors, *errors_of_dropped]:
            self.errors.update([error.error_type, "total"])
        self.errors.update({"groups_skipped": len(groups) - len(rollouts)})

    def metrics(self) -> Metrics:
        """Return tokens/... of the step and tokens/cumulative/... of the run. After the run's first
        failure, rollout_errors/... are added.
        """
        errors = {f"rollout_errors/{name}": count for name, count in self.errors.items()}
        return {
            **{f"tokens/{name}": count for name, count in self.step_tokens.items()},
            **{f"tokens/cumulative/{name}": count for name, count in self.tokens.items()},
            **(errors if any(self.errors.values()) else {}),
        }
