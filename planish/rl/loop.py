"""The loop of a training run: sample a batch of groups, train on it, again.

Legend: P groups of a batch, G trajectories of a group.

Synchronous training is asynchronous training with no lag. Batches are played in the data set's order. That of step j
begins as soon as the weights have seen at least j - `max_steps_off_policy` steps, and is trained on in step j, so no group is
ever older than that bound, none is thrown away and none is played twice; the price is that a step waits for the slowest
group of its own batch. With lag 0 this is: publish, play, train.

A run is resumed at a step's beginning. The rows and files of a step are written before the checkpoint that follows it is
recorded, and rows of steps behind the newest checkpoint are dropped at a start, since those steps are done again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from planish.checkpointing import RunCheckpoints, Start
from planish.completers import TinkerTokenCompleter, derived_seed
from planish.console import Stage
from planish.errors import UserError
from planish.evaluators import Evaluator, TrainingClientEvaluator
from planish.metric_logs import MetricLog
from planish.rl.config import Config
from planish.rl.counters import Counters
from planish.rl.data_processing import compute_advantages
from planish.rl.evaluation import RLTestSetEvaluator
from planish.rl.interruption import Interrupted, Interruption
from planish.rl.metrics import environment_metrics, sampling_entropy, staleness
from planish.rl.playing import GroupPlayer
from planish.rl.progress import TrainingProgress
from planish.rl.rollout_files import RolloutFiles
from planish.rl.rollout_pool import RolloutPool
from planish.rl.rollout_strategy import strategy_from
from planish.rl.rollouts import GroupRollout
from planish.rl.training_step import TrainingStep, train_on
from planish.rl.types import Metrics, RLDataset
from planish.runs import RunDirectory
from planish.schedules import learning_rate_at
from planish.timing import Spans, TraceFile


@dataclass
class Batch:
    """The groups of one step, being played or done."""

    groups: list[asyncio.Task[GroupRollout | None]]
    playing: Stage


@dataclass
class Loop:
    """One run, from its start to its last step or to Ctrl-C."""

    config: Config
    batches: RLDataset
    steps: int
    start: Start
    run: RunDirectory
    checkpoints: RunCheckpoints
    evaluators: Sequence[Evaluator]
    reference: Any
    context_window: int | None
    progress: TrainingProgress
    log: MetricLog
    trace: TraceFile | None
    interruption: Interruption = field(default_factory=Interruption)
    ahead: deque[Batch] = field(default_factory=deque)
    """Batches whose step is to come, the next one first."""

    def __post_init__(self) -> None:
        config, self.training_client = self.config, self.start.training_client
        self.files = RolloutFiles(
            self.run.path,
            config.rollout_layout,
            config.num_groups_to_log,
            config.rollout_json_export,
            self.training_client.get_tokenizer(),
        )
        self.files.remove_from(self.start.batch)
        self.counters = Counters.of(self.start.record)
        self.saved_batch = self.start.batch

    async def run_to_end(self) -> bool:
        """Whether the last step was reached. If not, the run is saved where it can be resumed."""
        self.done = self.start.batch
        try:
            with first_error():
                await self.make_steps()
        except Interrupted:
            await self.save(self.done, is_interrupted=True)
            self.progress.say(f"stopped after {self.done} of {self.steps} steps; the same command goes on from there")
            return False
        record = await asyncio.to_thread(self.checkpoints.final, self.steps, self.counters.row())
        self.progress.say(f"weights for sampling: {record.sampler_path}")
        return True

    async def make_steps(self) -> None:
        strategy = strategy_from(self.config.rollout_error_tolerance)
        async with RolloutPool.opened(self.config.rollout_processes) as pool, asyncio.TaskGroup() as tasks:
            player = GroupPlayer(strategy, self.config.termination, pool)
            for step in range(self.start.batch, self.steps):
                await self.step(step, player, tasks)
            await self.last_tests(player)

    async def step(self, step: int, player: GroupPlayer, tasks: asyncio.TaskGroup) -> None:
        """Publish, test if it is time, play, train, write down, save if it is time."""
        spans = Spans(self.trace)
        with spans.measure("publish"):
            sampling_client = await self.training_client.save_weights_and_get_sampling_client_async()
        tests = await self.tests(step, sampling_client, player, spans) if self.is_test_due(step) else {}
        self.launch(step, sampling_client, player, tasks)
        batch = self.ahead[0]
        update = TrainingStep(self.config, self.training_client, self.reference, self.learning_rate(step))
        with spans.measure("sampling"):
            rollouts = await train_on(update, batch.groups, self.interruption.guard)
        self.ahead.popleft()
        batch.playing.close()
        with spans.measure("train"), self.progress.training(step, update.num_minibatches) as training:
            trained = await update.finish(training.advance)
        if self.config.compute_post_kl:
            with spans.measure("compute_post_kl"):
                trained |= await update.post_update_kl()
        with spans.measure("rollout_files"):
            self.files.write("train", step, rollouts, self.advantages(rollouts))
        self.counters.count(rollouts, batch.groups, update.data_D)
        metrics = {
            "progress/batch": step,
            "progress/done_frac": (step + 1) / self.steps,
            **(environment_metrics(rollouts) if rollouts else {}),
            **trained,
            **sampling_entropy(update.data_D),
            **(staleness(rollouts, step) if self.config.async_config else {}),
            **self.counters.metrics(),
            **tests,
        }
        self.write_down(step, metrics, spans)
        self.progress.step_done()
        self.done = step + 1
        await self.save(self.done)

    def launch(self, step: int, sampling_client: Any, player: GroupPlayer, tasks: asyncio.TaskGroup) -> None:
        """Begin to play every batch that the weights of `step` may play and that was not begun before."""
        policy = TinkerTokenCompleter(
            sampling_client, self.config.max_tokens, self.config.temperature, self.context_window
        )
        for index in range(step + len(self.ahead), min(step + self.config.lag + 1, self.steps)):
            builders = self.batches.get_batch(index)
            if not builders:
                raise UserError(f"the data set's batch {index} has no groups; give at least one in each")
            playing = self.progress.sampling(index, len(builders))
            groups = [
                tasks.create_task(
                    player.play(
                        builder,
                        policy,
                        group_idx=group_idx,
                        seed=derived_seed(self.config.seed, index, group_idx),
                        sampler_step=step,
                        is_logged=group_idx < self.config.num_groups_to_log,
                        playing=playing,
                    )
                )
                for group_idx, builder in enumerate(builders)
            ]
            self.ahead.append(Batch(groups, playing))

    def is_test_due(self, step: int) -> bool:
        """Also at the step with which a finished run goes on: its row takes the place of the one that the run ended in."""
        goes_on = step == self.start.batch and self.start.was_finished
        return self.config.eval_every > 0 and (step % self.config.eval_every == 0 or goes_on)

    async def tests(self, step: int, sampling_client: Any, player: GroupPlayer, spans: Spans) -> Metrics:
        metrics: Metrics = {}
        for evaluator in self.evaluators:
            with spans.measure("run_evals"):
                metrics |= await self.interruption.guard(self.test(step, evaluator, sampling_client, player))
        return metrics

    async def test(self, step: int, evaluator: Evaluator, sampling_client: Any, player: GroupPlayer) -> Metrics:
        if isinstance(evaluator, RLTestSetEvaluator):
            with self.progress.evaluation(evaluator.name, len(evaluator.builders)) as playing:
                rollouts = await evaluator.play(sampling_client, player, sampler_step=step, playing=playing)
            self.files.write(f"eval/{evaluator.name}", step, rollouts, None)
            return evaluator.metrics(rollouts)
        with self.progress.evaluation(type(evaluator).__name__, None):
            client = self.training_client if isinstance(evaluator, TrainingClientEvaluator) else sampling_client
            return dict(await evaluator(client))

    async def last_tests(self, player: GroupPlayer) -> None:
        """The tests of the weights that the run ends with, as a row of their own."""
        if self.config.eval_every == 0 or not self.evaluators:
            return
        spans = Spans(self.trace)
        sampling_client = await self.training_client.save_weights_and_get_sampling_client_async()
        tests = await self.tests(self.steps, sampling_client, player, spans)
        self.write_down(self.steps, {"progress/batch": self.steps, "progress/done_frac": 1.0, **tests}, spans)

    def learning_rate(self, step: int) -> float:
        config = self.config
        return learning_rate_at(step, self.steps, config.learning_rate, config.lr_schedule, config.warmup_steps)

    def advantages(self, rollouts: Sequence[GroupRollout]) -> list[list[float]]:
        return compute_advantages([rollout.group for rollout in rollouts], self.config.advantage)

    def write_down(self, step: int, metrics: Metrics, spans: Spans) -> None:
        self.log.log(step, metrics | spans.metrics())
        self.run.log_spans(step, spans.rows())
        if self.trace is not None:
            self.trace.write(step, spans)

    async def save(self, done: int, *, is_interrupted: bool = False) -> None:
        """A checkpoint after `done` steps, if one is due."""
        save = self.due_checkpoint(done, is_interrupted)
        if save is not None:
            with self.progress.saving(done):
                await asyncio.to_thread(save, done, self.counters.row())
            self.saved_batch = done

    def due_checkpoint(self, done: int, is_interrupted: bool) -> Callable[[int, Mapping[str, Any]], object] | None:
        config = self.config
        if done == self.saved_batch:
            return None
        if is_interrupted:
            return self.checkpoints.state_only
        if done == self.steps:
            return None  # the final checkpoint follows
        if config.save_every and done % config.save_every == 0:
            return self.checkpoints.periodic
        if config.rolling_save_every and done % config.rolling_save_every == 0:
            return self.checkpoints.rolling
        return None


@contextmanager
def first_error() -> Iterator[None]:
    """Several tasks run at once; the error of the first that failed is raised as it is, and says how many others failed."""
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = sorted(leaves_of(group), key=lambda error: isinstance(error, Interrupted))
        if len(leaves) > 1:
            leaves[0].add_note(f"{len(leaves) - 1} more tasks failed, the first of them with: {leaves[1]!r}")
        raise leaves[0] from leaves[0].__cause__


def leaves_of(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in leaves_of(part)]
