"""The steps of a supervised run: for each batch, compute its gradient and update the weights.

The next batch is submitted before the results of the previous batch arrive. Up to `submit_ahead`
steps stay unfinished while the next step is prepared. The engine executes them in order, so the
results do not depend on `submit_ahead`.

An optimizer step waits until at most `submit_ahead` - 1 earlier steps are unfinished (by default,
none). So by default no update is queued behind a step that may fail, and the steps before a failure
can be saved. Before an evaluation or a checkpoint, all submitted steps are awaited and logged. So
the weights of a checkpoint after `done` steps were trained on each of the batches 0 .. done - 1
exactly once.

The batch and the learning rate of a step depend only on the step's number.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.errors import UserError
from planish.processes.interruption import Interrupted
from planish.runlog.evaluators import Evaluator, TrainingClientEvaluator
from planish.runlog.spans import Spans
from planish.supervised.objective import Metrics, Objective, PendingGradient
from planish.supervised.types import Batch, SupervisedDataset
from planish.training.run_loop import RunLoop
from planish.training.supervised_config import Config
from planish.types import AdamParams


@dataclass(frozen=True)
class EvalSchedule:
    """Evaluators that run every `every` steps; 0 = never."""

    every: int
    evaluators: Sequence[Evaluator]


@dataclass(frozen=True)
class PendingStep:
    """A submitted step. With an empty batch, `gradient` and `update` are None."""

    step: int
    batch: Batch
    gradient: PendingGradient | None
    update: Any
    evals: Metrics
    spans: Spans

    async def is_applied(self) -> bool:
        """Wait for the update, and return whether the weights contain it. A UserError means that it
        was rejected. After any other error the weights may have changed, so return True.
        """
        try:
            if self.update is not None:
                await self.update
        except Exception as error:
            return not isinstance(error, UserError)
        return True


@dataclass
class SupervisedLearner:
    """Takes the steps of one supervised run."""

    loop: RunLoop
    config: Config
    dataset: SupervisedDataset
    objective: Objective
    schedules: Sequence[EvalSchedule]
    pending: deque[PendingStep] = field(default_factory=deque[PendingStep])
    """Steps whose results have not arrived, the oldest first."""
    weights_ahead_of_record: bool = False
    """Whether the weights may contain a step that is neither logged nor in `pending`. This is so
    while a step's update is being submitted, and while its row is being logged.
    """

    def __post_init__(self) -> None:
        self.training_client = self.loop.training_client
        self.epoch: int | None = None
        """The current epoch of the dataset."""
        self.last_row_time = time.perf_counter()

    async def run_steps(self) -> None:
        """Take all steps, evaluate the final weights, and log their metrics in a separate row."""
        loop = self.loop
        for step in range(loop.steps_done, loop.num_steps):
            if loop.interruption.is_stop_requested:
                await self.drain()
                raise Interrupted
            await self.submit_step(step)
            await self.drain(max_pending=self.config.submit_ahead)
            # The last step is followed by the final checkpoint.
            save_checkpoint = loop.due_checkpoint(step + 1) if step + 1 < loop.num_steps else None
            if save_checkpoint is not None:
                await self.drain()
                await loop.save(save_checkpoint)
        await self.drain()
        spans = Spans(loop.trace)
        evals = await self.evaluate(loop.num_steps, spans)
        if evals:
            self.log_step(loop.num_steps, {"progress": 1.0, **evals}, spans)

    async def settle_after_error(self) -> bool:
        """Log the steps that were applied. Return False if an update after the failed step was
        applied as well.
        """
        if self.weights_ahead_of_record:
            return False
        are_applied = [await pending.is_applied() for pending in self.pending]
        num_failed = are_applied.count(False)
        if any(are_applied[len(self.pending) - num_failed :]):
            return False
        await self.drain(max_pending=num_failed)
        return True

    async def submit_step(self, step: int) -> None:
        """Run the evaluators that are due, and submit the step."""
        spans = Spans(self.loop.trace)
        evals = await self.evaluate(step, spans)
        with spans.measure("render"):
            batch = await asyncio.to_thread(self.batch_of, step)
        if not batch:
            if step == 0:
                raise UserError(
                    "the first batch has no tokens to train on, because max_length cuts them off "
                    "in each conversation; give a larger max_length"
                )
            self.pending.append(PendingStep(step, batch, None, None, evals, spans))
            return
        gradient = await self.objective.submit(self.training_client, batch)
        await self.drain(max_pending=max(self.config.submit_ahead - 1, 0))
        self.weights_ahead_of_record = True
        update = await self.training_client.optim_step_async(self.adam_params(step))
        self.pending.append(PendingStep(step, batch, gradient, update, evals, spans))
        self.weights_ahead_of_record = False

    def batch_of(self, step: int) -> Batch:
        """Return the batch of `step`. It may be empty."""
        epoch, index = divmod(step, len(self.dataset))
        if epoch != self.epoch:
            self.dataset.set_epoch(epoch)
            self.epoch = epoch
        return Batch.from_data(self.dataset.get_batch(index))

    async def drain(self, max_pending: int = 0) -> None:
        """Wait for the oldest steps and log each, until at most `max_pending` are pending."""
        while len(self.pending) > max_pending:
            pending = self.pending[0]
            with pending.spans.measure("wait"), self.loop.display.training(pending.step):
                metrics = await results(pending)
            self.pending.popleft()
            step, self.weights_ahead_of_record = pending.step, True
            row = {
                "epoch": step // len(self.dataset),
                "progress": (step + 1) / self.loop.num_steps,
                "learning_rate": self.loop.learning_rate(step),
                **counts(pending.batch),
                **metrics,
                **pending.evals,
            }
            self.log_step(step, row, pending.spans)
            self.loop.display.step_done()
            self.loop.steps_done, self.weights_ahead_of_record = step + 1, False

    async def evaluate(self, step: int, spans: Spans) -> Metrics:
        """Return the metrics of the evaluators that are due before `step`. After the last step, all
        evaluators are due.
        """
        evaluators = [
            evaluator
            for schedule in self.schedules
            if self.loop.is_eval_due(step, schedule.every)
            for evaluator in schedule.evaluators
        ]
        if not evaluators:
            return {}
        await self.drain()
        sampling_client = None

        async def evaluate_one(evaluator: Evaluator) -> Metrics:
            nonlocal sampling_client
            if sampling_client is None and not isinstance(evaluator, TrainingClientEvaluator):
                sampling_client = (
                    await self.training_client.save_weights_and_get_sampling_client_async()
                )
            return await self.loop.evaluate_one(evaluator, sampling_client)

        return await self.loop.evaluate(step, evaluators, spans, evaluate_one)

    def log_step(self, step: int, metrics: Metrics, spans: Spans) -> None:
        """Write the row of a step. Several steps run at once, so time/total is the time in seconds
        since the previous row.
        """
        now = time.perf_counter()
        seconds, self.last_row_time = now - self.last_row_time, now
        times = {"time/total": seconds}
        if "num_tokens" in metrics:
            times["tokens_per_second/trained"] = metrics["num_tokens"] / seconds
        self.loop.log_step(step, metrics, spans, times)

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Return the epoch, which each checkpoint's row contains."""
        return {"epoch": self.loop.steps_done // len(self.dataset)}

    def adam_params(self, step: int) -> AdamParams:
        """Return the optimizer's parameters for `step`."""
        config = self.config
        return AdamParams(
            learning_rate=self.loop.learning_rate(step),
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )


async def results(pending: PendingStep) -> Metrics:
    """Wait for a step's gradient and update, and return their metrics."""
    if pending.gradient is None:
        return {}
    metrics = await pending.gradient.metrics()
    update_metrics = (await pending.update).metrics
    return metrics | {f"optim/{name}": value for name, value in update_metrics.items()}


def counts(batch: Batch) -> Metrics:
    """Return how many sequences and tokens a batch has, and how many were truncated or left out."""
    return {
        "num_sequences": len(batch),
        "num_tokens": sum(datum.model_input.length for datum in batch),
        "num_truncated": batch.num_truncated,
        "num_left_out": batch.num_left_out,
    }
