"""The loop of supervised training: a batch, its gradient, a step, again; the next batch is on its
way before the results are there.

Up to `submit_ahead` steps are submitted before the oldest is waited for; the engine works through
them in order, so results are the same at any number. An update follows its gradient when no more
than `submit_ahead` - 1 steps before it are left: by default none, so that no update lies behind a
step that fails, and the steps before that can be saved. Before a test or a checkpoint everything
submitted is waited for and written down: what is measured or saved after `done` steps has seen the
batches 0 .. done - 1, each once, and nothing of the next.

A run is resumed at a step's beginning. Batch and learning rate of a step are functions of its
number alone.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.errors import UserError
from planish.processes.interruption import Interrupted, Interruption
from planish.runlog.checkpoints import RunCheckpoints, Start
from planish.runlog.console import StepDisplay
from planish.runlog.evaluators import (
    Evaluator,
    TrainingClientEvaluator,
    add_metrics,
    asking,
    checked_metrics,
    evaluator_name,
)
from planish.runlog.metrics_log import MetricLog
from planish.runlog.run_directory import RunDirectory
from planish.runlog.spans import Spans, TraceFile
from planish.supervised.objective import Gradient, Metrics, Objective
from planish.supervised.types import Batch, SupervisedDataset
from planish.training.schedules import learning_rate_at
from planish.training.supervised_config import Config
from planish.types import AdamParams


@dataclass(frozen=True)
class Measured:
    """Evaluators that are asked every so many steps; 0 = never."""

    every: int
    evaluators: Sequence[Evaluator]

    def is_due(self, step: int, *, is_edge: bool) -> bool:
        """`is_edge`: a step at which everything is measured that is measured at all."""
        return self.every > 0 and (is_edge or step % self.every == 0)


@dataclass(frozen=True)
class Submitted:
    """A step under way. Without data there is neither gradient nor update."""

    step: int
    batch: Batch
    gradient: Gradient | None
    update: Any
    tests: Metrics
    spans: Spans

    async def is_applied(self) -> bool:
        """Whether the weights have made this step, as far as is known; waits for it. A UserError
        says that they have not.
        """
        try:
            if self.update is not None:
                await self.update
        except Exception as error:
            return not isinstance(error, UserError)
        return True


@dataclass
class Loop:
    """One run, from its start to its last step or to Ctrl-C."""

    config: Config
    dataset: SupervisedDataset
    objective: Objective
    steps: int
    start: Start
    run: RunDirectory
    checkpoints: RunCheckpoints
    measured: Sequence[Measured]
    display: StepDisplay
    log: MetricLog
    trace: TraceFile | None
    interruption: Interruption = field(default_factory=Interruption)
    ahead: deque[Submitted] = field(default_factory=deque)
    """Steps whose results are to come, the oldest first."""
    has_moved: bool = False
    """The weights may be further than the steps that are written down or ahead: a step is between
    the two, or on its way there.
    """

    def __post_init__(self) -> None:
        self.training_client = self.start.training_client
        self.done = self.saved = self.start.batch
        self.epoch: int | None = None
        """That the data set is in."""
        self.last_row = time.perf_counter()

    async def run_to_end(self) -> bool:
        """Whether the last step was reached. If not, the run is saved where it can be resumed."""
        try:
            await self.make_steps()
        except Interrupted:
            await self.save_unless_saved()
            self.display.say(
                f"stopped after {self.done} of {self.steps} steps; the same command goes on from there"
            )
            return False
        except Exception as error:
            await self.rescue(error)
            raise
        record = await asyncio.to_thread(self.checkpoints.final, self.steps, self.row())
        self.display.say(
            f"state to go on from: {record.state_path}\nweights for sampling: {record.sampler_path}"
        )
        return True

    async def make_steps(self) -> None:
        for step in range(self.start.batch, self.steps):
            if self.interruption.is_asked:
                await self.settle()
                raise Interrupted
            await self.begin(step)
            await self.settle(left=self.config.submit_ahead)
            if self.is_checkpoint_due(step + 1):
                await self.settle()
                await self.save()
        await self.settle()
        spans = Spans(self.trace)
        tests = await self.tests(self.steps, spans)
        if tests:
            self.write_down(self.steps, {"progress": 1.0, **tests}, spans)

    async def rescue(self, error: Exception) -> None:
        """Before an error ends the run, write down the steps that are applied and save them, unless
        the weights may be further than that.
        """
        if self.has_moved:
            return
        are_applied = [await submitted.is_applied() for submitted in self.ahead]
        failed = are_applied.count(False)
        if any(are_applied[len(self.ahead) - failed :]):  # one behind a step that failed
            return
        try:
            await self.settle(left=failed)
            await self.save_unless_saved()
        except Exception as another:  # a disk or a server that is gone: the first error says more
            error.add_note(f"the steps since the last checkpoint could not be saved: {another!r}")
        else:
            self.display.say(
                f"failed after {self.done} of {self.steps} steps; the same command goes on from there"
            )

    async def begin(self, step: int) -> None:
        """Test if it is time, and submit the step."""
        spans = Spans(self.trace)
        tests = await self.tests(step, spans)
        with spans.measure("render"):
            batch = await asyncio.to_thread(self.batch_of, step)
        if not batch:
            if step == 0:
                raise UserError(
                    "the first batch has nothing to learn: what is learned lies behind max_length in each of its "
                    "conversations; give a larger max_length"
                )
            self.ahead.append(Submitted(step, batch, None, None, tests, spans))
            return
        gradient = await self.objective.submit(self.training_client, batch)
        await self.settle(left=max(self.config.submit_ahead - 1, 0))
        self.has_moved = True
        update = await self.training_client.optim_step_async(self.adam(step))
        self.ahead.append(Submitted(step, batch, gradient, update, tests, spans))
        self.has_moved = False

    def batch_of(self, step: int) -> Batch:
        epoch, index = divmod(step, len(self.dataset))
        if epoch != self.epoch:
            self.dataset.set_epoch(epoch)
            self.epoch = epoch
        return Batch.of(self.dataset.get_batch(index))

    async def settle(self, left: int = 0) -> None:
        """Wait for the oldest steps, and write each down, until so many are left."""
        while len(self.ahead) > left:
            submitted = self.ahead[0]
            with (
                submitted.spans.measure("wait"),
                self.display.begin(f"training, step {submitted.step}"),
            ):
                metrics = await results(submitted)
            self.ahead.popleft()
            step, self.has_moved = submitted.step, True
            self.write_down(
                step,
                {
                    "epoch": step // len(self.dataset),
                    "progress": (step + 1) / self.steps,
                    "learning_rate": self.learning_rate(step),
                    **counts(submitted.batch),
                    **metrics,
                    **submitted.tests,
                },
                submitted.spans,
            )
            self.display.step_done()
            self.done, self.has_moved = step + 1, False

    async def tests(self, step: int, spans: Spans) -> Metrics:
        """What is due to be measured before `step`, and everything after the last one.

        Also everything at the step with which a finished run goes on: its row takes the place of
        the one that the run ended in.
        """
        is_edge = step == self.steps or (step == self.start.batch and self.start.was_finished)
        due = [part for part in self.measured if part.is_due(step, is_edge=is_edge)]
        evaluators = [evaluator for part in due for evaluator in part.evaluators]
        if not evaluators:
            return {}
        await self.settle()
        metrics: Metrics = {}
        sampling_client = None
        for evaluator in evaluators:
            with (
                spans.measure("run_evals"),
                self.display.begin(f"evaluating {evaluator_name(evaluator)}"),
            ):
                if isinstance(evaluator, TrainingClientEvaluator):
                    client = self.training_client
                else:
                    sampling_client = sampling_client or await self.publish()
                    client = sampling_client
                found = await self.interruption.guard(self.test(step, evaluator, client))
            add_metrics(metrics, found, evaluator)
        return metrics

    async def test(self, step: int, evaluator: Evaluator, client: Any) -> Metrics:
        with asking(evaluator, step):
            return checked_metrics(
                await evaluator(client), f"the evaluator {evaluator_name(evaluator)}"
            )

    async def publish(self) -> Any:
        return await self.training_client.save_weights_and_get_sampling_client_async()

    def write_down(self, step: int, metrics: Metrics, spans: Spans) -> None:
        now = time.perf_counter()
        shared = {"time/total": now - self.last_row}
        if "num_tokens" in metrics:
            shared["tokens_per_second/trained"] = metrics["num_tokens"] / (now - self.last_row)
        self.last_row = now
        self.log.log(step, metrics | spans.metrics() | shared)
        self.run.log_spans(step, spans.rows())
        if self.trace is not None:
            self.trace.write(step, spans)

    def is_checkpoint_due(self, done: int) -> bool:
        # the final one follows the last step
        return done < self.steps and self.how_to_save(done) is not None

    def how_to_save(self, done: int) -> Any:
        config = self.config
        return self.checkpoints.due(
            done, save_every=config.save_every, rolling_save_every=config.rolling_save_every
        )

    async def save(self) -> None:
        save = self.how_to_save(self.done)
        with self.display.begin(f"saving, step {self.done}"):
            await asyncio.to_thread(save, self.done, self.row())
        self.saved = self.done

    async def save_unless_saved(self) -> None:
        if self.done != self.saved:
            await asyncio.to_thread(self.checkpoints.state_only, self.done, self.row())

    def row(self) -> dict[str, int]:
        """What a checkpoint's row says besides the number of batches."""
        return {"epoch": self.done // len(self.dataset)}

    def learning_rate(self, step: int) -> float:
        config = self.config
        return learning_rate_at(
            step, self.steps, config.learning_rate, config.lr_schedule, config.warmup_steps
        )

    def adam(self, step: int) -> AdamParams:
        config = self.config
        return AdamParams(
            learning_rate=self.learning_rate(step),
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )


async def results(submitted: Submitted) -> Metrics:
    """What gradient and update say of themselves."""
    if submitted.gradient is None:
        return {}
    metrics = await submitted.gradient.metrics()
    return metrics | {
        f"optim/{name}": value for name, value in (await submitted.update).metrics.items()
    }


def counts(batch: Batch) -> Metrics:
    return {
        "num_sequences": len(batch),
        "num_tokens": sum(datum.model_input.length for datum in batch),
        "num_truncated": batch.truncated,
        "num_left_out": batch.left_out,
    }
