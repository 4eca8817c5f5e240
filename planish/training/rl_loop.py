"""The loop of a training run: sample a batch of groups, train on it, again.

Legend: P groups of a batch, G trajectories of a group.

Synchronous training is asynchronous training with no lag. Batches are played in the data set's
order. That of step j begins as soon as the weights have seen at least j - `max_steps_off_policy`
steps, and is trained on in step j, so no group is ever older than that bound, none is thrown away
and none is played twice; the price is that a step waits for the slowest group of its own batch.
With lag 0 this is: publish, play, train.

A run is resumed at a step's beginning. The rows and files of a step are written before the
checkpoint that follows it is recorded, and rows of steps behind the newest checkpoint are dropped
at a start, since those steps are done again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.completers import TinkerTokenCompleter, derived_seed
from planish.errors import UserError
from planish.processes.interruption import Interrupted, Interruption, first_error
from planish.reports.rollout_files import RolloutFiles
from planish.rl.data_processing import compute_advantages
from planish.rl.kl import Pull
from planish.rl.rollout.evaluation import RLTestSetEvaluator
from planish.rl.rollout.metrics import (
    environment_metrics,
    sampling_entropy,
    sampling_times,
    staleness,
)
from planish.rl.rollout.processes.pool import RolloutPool
from planish.rl.rollout.rollouts import GroupRollout, to_its_end
from planish.rl.rollout.runner import GroupPlayer
from planish.rl.rollout.strategy import strategy_from
from planish.rl.types import EnvGroupBuilder, Metrics, RLDataset, RolloutError
from planish.runlog.checkpoints import RunCheckpoints, Start
from planish.runlog.console import Stage
from planish.runlog.evaluators import (
    Evaluator,
    TrainingClientEvaluator,
    add_metrics,
    asking,
    checked_metrics,
    evaluator_name,
)
from planish.runlog.metrics_log import MetricLog
from planish.runlog.run_directory import CheckpointRecord, RunDirectory
from planish.runlog.spans import Spans, TraceFile
from planish.training.rl_config import Config
from planish.training.rl_counters import Counters
from planish.training.rl_progress import TrainingProgress
from planish.training.rl_step import TrainingStep, train_on
from planish.training.schedules import learning_rate_at

SaveCheckpoint = Callable[[int, Mapping[str, Any]], CheckpointRecord]


@dataclass
class Batch:
    """The groups of one step, being played or done."""

    groups: list[asyncio.Task[GroupRollout | None]]
    playing: Stage
    errors_of_dropped: list[RolloutError]
    """What failed in the groups that were dropped."""


@dataclass
class Loop:
    """One run, from its start to its last step or to Ctrl-C."""

    config: Config
    batches: RLDataset
    steps: int
    start: Start
    run: RunDirectory
    files: RolloutFiles
    checkpoints: RunCheckpoints
    evaluators: Sequence[Evaluator]
    pull: Pull | None
    context_window: int | None
    progress: TrainingProgress
    log: MetricLog
    trace: TraceFile | None
    interruption: Interruption = field(default_factory=Interruption)
    ahead: deque[Batch] = field(default_factory=deque)
    """Batches whose step is to come, the next one first."""
    update: TrainingStep | None = None
    """Of the step under way."""
    has_named_page: bool = False

    def __post_init__(self) -> None:
        self.training_client = self.start.training_client
        self.counters = Counters.of(self.start.record)
        self.done = self.saved = self.start.batch

    async def run_to_end(self) -> bool:
        """Whether the last step was reached. If not, the run is saved where it can be resumed."""
        try:
            with first_error():
                await self.make_steps()
        except Interrupted:
            await self.save_unless_saved()
            self.progress.say(
                f"stopped after {self.done} of {self.steps} steps; the same command goes on from there"
            )
            return False
        except Exception as error:
            await self.rescue(error)
            raise
        record = await self.save(self.checkpoints.final)
        self.progress.say(f"weights for sampling: {record.sampler_path}")
        return True

    async def make_steps(self) -> None:
        strategy = strategy_from(self.config.rollout_error_tolerance)
        async with (
            RolloutPool.opened(self.config.rollout_processes) as pool,
            asyncio.TaskGroup() as tasks,
        ):
            player = GroupPlayer(strategy, self.config.termination, pool)
            for step in range(self.start.batch, self.steps):
                await self.step(step, player, tasks)
            await self.last_tests(player)

    async def step(self, step: int, player: GroupPlayer, tasks: asyncio.TaskGroup) -> None:
        """Save and test if it is time, play, train, write down."""
        spans = Spans(self.trace)
        if (save := self.due_checkpoint()) is not None:
            with spans.measure("save_checkpoint"):
                await self.save(save)
        with spans.measure("publish"):
            sampling_client = (
                await self.training_client.save_weights_and_get_sampling_client_async()
            )
        tests = (
            await self.tests(step, sampling_client, player, spans) if self.is_test_due(step) else {}
        )
        self.launch(step, sampling_client, player, tasks)
        batch = self.ahead[0]
        self.update = TrainingStep(
            self.config, self.training_client, self.pull, self.learning_rate(step)
        )
        rollouts = await train_on(self.update, batch.groups, self.interruption.guard, spans)
        self.ahead.popleft()
        batch.playing.close()
        # What is submitted is done in any case; finished, it can be saved, whatever fails or is
        # cancelled meanwhile.
        await to_its_end(self.finish(step, self.update, batch, rollouts, tests, spans))

    async def finish(
        self,
        step: int,
        update: TrainingStep,
        batch: Batch,
        rollouts: Sequence[GroupRollout],
        tests: Metrics,
        spans: Spans,
    ) -> None:
        """Wait until a step that is submitted is done, and write it down."""
        trained = await self.results(step, update, spans)
        with spans.measure("rollout_files"):
            await self.write_files("train", step, rollouts, self.advantages(rollouts))
        self.name_first_page(step)
        self.counters.count(rollouts, batch.groups, update.data_D, batch.errors_of_dropped)
        metrics = {
            "progress/batch": step,
            "progress/done_frac": (step + 1) / self.steps,
            **environment_metrics(rollouts),
            **trained,
            **sampling_entropy(update.data_D),
            **(staleness(rollouts, step) if self.config.async_config else {}),
            **self.counters.metrics(),
            **tests,
            **sampling_times(rollouts),
        }
        self.write_down(step, metrics, spans)
        self.progress.step_done()
        self.done, self.update = step + 1, None

    async def results(self, step: int, update: TrainingStep, spans: Spans) -> Metrics:
        """What is to be said of a step, once the trainer is done with it."""
        with (
            spans.measure("train"),
            self.progress.training(step, update.num_minibatches) as training,
        ):
            trained = await update.finish(training.advance)
        if self.config.compute_post_kl:
            with spans.measure("compute_post_kl"):
                trained |= await update.post_update_kl()
        return trained

    def launch(
        self, step: int, sampling_client: Any, player: GroupPlayer, tasks: asyncio.TaskGroup
    ) -> None:
        """Begin to play every batch that the weights of `step` may play and that was not begun
        before.
        """
        policy = TinkerTokenCompleter(
            sampling_client, self.config.max_tokens, self.config.temperature, self.context_window
        )
        for index in range(step + len(self.ahead), min(step + self.config.lag + 1, self.steps)):
            builders = self.builders(index)
            playing = self.progress.sampling(index, len(builders))
            errors_of_dropped: list[RolloutError] = []
            groups = [
                tasks.create_task(
                    player.play(
                        builder,
                        policy,
                        batch=f"step {index}",
                        group_idx=group_idx,
                        seed=derived_seed(self.config.seed, index, group_idx),
                        sampler_step=step,
                        is_logged=group_idx < self.config.num_groups_to_log,
                        playing=playing,
                        errors_of_dropped=errors_of_dropped,
                    )
                )
                for group_idx, builder in enumerate(builders)
            ]
            self.ahead.append(Batch(groups, playing, errors_of_dropped))

    def builders(self, index: int) -> list[EnvGroupBuilder]:
        """The groups of a batch; its errors say of which batch they are."""
        try:
            builders = list(self.batches.get_batch(index) or ())
        except Exception as error:
            error.add_note(f"in batch {index} of {type(self.batches).__name__}")
            raise
        if not builders:
            raise UserError(
                f"the data set's batch {index} has no groups; give at least one in each"
            )
        return builders

    def is_test_due(self, step: int) -> bool:
        """Also at the step with which a finished run goes on: its row takes the place of the one
        that the run ended in.
        """
        goes_on = step == self.start.batch and self.start.was_finished
        return self.config.eval_every > 0 and (step % self.config.eval_every == 0 or goes_on)

    async def tests(
        self, step: int, sampling_client: Any, player: GroupPlayer, spans: Spans
    ) -> Metrics:
        metrics: Metrics = {}
        for evaluator in self.evaluators:
            with spans.measure("run_evals"):
                found = await self.interruption.guard(
                    self.test(step, evaluator, sampling_client, player)
                )
            add_metrics(metrics, found, evaluator)
        return metrics

    async def test(
        self, step: int, evaluator: Evaluator, sampling_client: Any, player: GroupPlayer
    ) -> Metrics:
        with asking(evaluator, step):
            if isinstance(evaluator, RLTestSetEvaluator):
                return await self.test_on_environments(step, evaluator, sampling_client, player)
            name = evaluator_name(evaluator)
            with self.progress.evaluation(name):
                client = (
                    self.training_client
                    if isinstance(evaluator, TrainingClientEvaluator)
                    else sampling_client
                )
                return checked_metrics(await evaluator(client), f"the evaluator {name}")

    async def test_on_environments(
        self, step: int, evaluator: RLTestSetEvaluator, sampling_client: Any, player: GroupPlayer
    ) -> Metrics:
        with self.progress.evaluation(evaluator.name, len(evaluator.builders)) as playing:
            rollouts = await evaluator.play(
                sampling_client,
                player,
                context_window=self.context_window,
                sampler_step=step,
                playing=playing,
            )
        await self.write_files(f"eval/{evaluator.name}", step, rollouts, None)
        return evaluator.metrics(rollouts)

    async def last_tests(self, player: GroupPlayer) -> None:
        """The tests of the weights that the run ends with, as a row of their own."""
        if not self.evaluators:
            return
        spans = Spans(self.trace)
        sampling_client = await self.training_client.save_weights_and_get_sampling_client_async()
        tests = await self.tests(self.steps, sampling_client, player, spans)
        self.write_down(
            self.steps, {"progress/batch": self.steps, "progress/done_frac": 1.0, **tests}, spans
        )

    def learning_rate(self, step: int) -> float:
        config = self.config
        return learning_rate_at(
            step, self.steps, config.learning_rate, config.lr_schedule, config.warmup_steps
        )

    def advantages(self, rollouts: Sequence[GroupRollout]) -> list[list[float]]:
        return compute_advantages([rollout.group for rollout in rollouts], self.config.advantage)

    async def write_files(
        self,
        split: str,
        step: int,
        rollouts: Sequence[GroupRollout],
        advantages: list[list[float]] | None,
    ) -> None:
        await to_its_end(asyncio.to_thread(self.files.write, split, step, rollouts, advantages))

    def name_first_page(self, step: int) -> None:
        """Say on the console where the rollouts can be read, once."""
        if not self.has_named_page and self.config.num_groups_to_log:
            self.has_named_page = True
            page = self.files.path("train", step)
            self.progress.say(f"rollouts of step {step}, for reading: {page}; each step has a page")

    def write_down(self, step: int, metrics: Metrics, spans: Spans) -> None:
        """The row of a step."""
        self.log.log(step, metrics | spans.metrics())
        self.run.log_spans(step, spans.rows())
        if self.trace is not None:
            self.trace.write(step, spans)

    def due_checkpoint(self) -> SaveCheckpoint | None:
        """The kind of checkpoint that is to be saved before the next step."""
        config, done = self.config, self.done
        if done == self.saved:
            return None
        return self.checkpoints.due(
            done, save_every=config.save_every, rolling_save_every=config.rolling_save_every
        )

    async def save(self, save: SaveCheckpoint) -> CheckpointRecord:
        """Save the steps that are done. What is begun is finished, whatever fails or is cancelled
        meanwhile.
        """

        async def saving() -> CheckpointRecord:
            record = await asyncio.to_thread(save, self.done, self.counters.row())
            self.saved = self.done
            return record

        with self.progress.saving(self.done):
            return await to_its_end(saving())

    async def save_unless_saved(self) -> None:
        if self.done > self.saved:
            await self.save(self.checkpoints.state_only)

    async def rescue(self, error: Exception) -> None:
        """Before an error ends the run, save the steps that are done, unless the weights are not
        theirs any more.
        """
        if self.update is not None and await self.update.has_moved_weights():
            return
        try:
            await self.save_unless_saved()
        except Exception as another:  # a disk or a server that is gone: the first error says more
            error.add_note(f"the steps since the last checkpoint could not be saved: {another!r}")
        else:
            self.progress.say(
                f"failed after {self.done} of {self.steps} steps; the same command goes on from there"
            )
