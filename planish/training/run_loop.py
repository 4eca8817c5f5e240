"""The loop of a training run. The loop ends after the last step, or earlier if a signal or an error
stops the run.

A learner runs the training steps. `planish.training.rl_learner` does reinforcement learning, and
`planish.training.supervised_learner` does supervised training. The loop does what every run needs:
it resumes the run, evaluates, saves checkpoints and logs metrics. After a signal or an error the
run can be resumed.

A run resumes at the beginning of a step. The metrics row and the files of a step are written before
its checkpoint is recorded. When a run starts or resumes, the rows of steps after the newest
checkpoint are dropped, because those steps are trained again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from planish import SamplingClient, ServiceClient
from planish.client.local import models_used_together
from planish.datasets.row_digests import RowDigest
from planish.files import write_atomically
from planish.processes.blocking import call_function
from planish.processes.interruption import Interrupted, Interruption, first_error, run_uncancelled
from planish.runlog.checkpoints import RunCheckpoints, RunStart, recipe_metadata, start_training
from planish.runlog.console import StepDisplay
from planish.runlog.evaluators import (
    Evaluator,
    TrainingClientEvaluator,
    add_metrics,
    evaluator_errors,
    evaluator_name,
    validate_metrics,
)
from planish.runlog.metrics_log import MetricLog, open_metric_logs
from planish.runlog.provenance import code_diff
from planish.runlog.run_directory import (
    CODE_DIFF,
    STOP_REQUEST,
    CheckpointRecord,
    RunDirectory,
    names_at_default,
)
from planish.runlog.spans import Spans, TraceFile
from planish.training.run_options import RunOptions, StartOptions
from planish.training.schedules import learning_rate_at

Metrics = dict[str, float]
SaveCheckpoint = Callable[[int, Mapping[str, Any]], CheckpointRecord]
EvaluateOne = Callable[[Evaluator], Awaitable[Metrics]]


class Learner(Protocol):
    """Runs the training steps, and reports each finished step to its loop."""

    async def run_steps(self) -> None:
        """Run the steps from `loop.steps_done` to `loop.num_steps`, and evaluate the final
        weights.
        """

    async def settle_after_error(self) -> bool:
        """After a failure, log the steps whose updates were applied. Return False if the weights
        may contain more than the logged steps, so that they must not be saved.
        """
        ...

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Return extra fields for the checkpoint's row."""
        ...


@dataclass
class RunLoop:
    """One run, with its client, files, logs and console while it is in progress."""

    options: RunOptions
    num_steps: int
    start: RunStart
    run_directory: RunDirectory
    checkpoints: RunCheckpoints
    display: StepDisplay
    metric_log: MetricLog
    trace: TraceFile | None
    interruption: Interruption = field(default_factory=Interruption)
    learner: Learner = field(init=False)

    def __post_init__(self) -> None:
        self.training_client = self.start.training_client
        self.steps_done = self.steps_saved = self.start.batch

    async def run_to_end(self, learner: Learner) -> bool:
        """Run all steps. Return False if a signal ended the run early. In that case the run has
        been saved and can be resumed.
        """
        self.learner = learner
        try:
            with first_error():
                await learner.run_steps()
        except Interrupted:
            await self.save_if_needed()
            self.display.say(
                f"stopped after {self.steps_done} of {self.num_steps} steps; the same command "
                "resumes there"
            )
            return False
        except Exception as error:
            await self._save_after_error(error)
            raise
        record = await self.save(self.checkpoints.save_final)
        self.display.say(
            f"state to resume from: {record.state_path}\n"
            f"weights for sampling: {record.sampler_path}"
        )
        for line in self.checkpoints.describe_best():
            self.display.say(line)
        return True

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`."""
        options = self.options
        return learning_rate_at(
            step, self.num_steps, options.learning_rate, options.lr_schedule, options.warmup_steps
        )

    def is_eval_due(self, step: int, every: int) -> bool:
        """Return whether evaluators with the interval `every` run before `step`; 0 = never.

        They run at every multiple of `every`, but at step 0 only with `eval_on_start`. They also
        run at the end of the run, where `step` is the number of steps, and at the first step if
        this run extends a finished run. Resuming drops the metrics row of the earlier final
        evaluation, so the first step evaluates the same weights again.
        """
        if every == 0:
            return False
        if step == self.num_steps or (step == self.start.batch and self.start.was_finished):
            return True
        return step % every == 0 and (step > 0 or self.options.eval_on_start)

    async def evaluate(
        self,
        step: int,
        evaluators: Sequence[Evaluator],
        spans: Spans,
        evaluate_one: EvaluateOne,
    ) -> Metrics:
        """Run all evaluators on the weights before `step`, and return their metrics. A signal
        cancels the evaluation.
        """

        async def evaluate_in_context(evaluator: Evaluator) -> Metrics:
            with evaluator_errors(evaluator, step):
                return await evaluate_one(evaluator)

        metrics: Metrics = {}
        for evaluator in evaluators:
            with spans.measure("run_evals"):
                result = await self.interruption.guard(evaluate_in_context(evaluator))
            add_metrics(metrics, result, evaluator)
        retention = self.options.retention
        if retention is not None and step % max(self.options.save_every, 1) == 0:
            retention.require_metric(metrics)
        return metrics

    async def evaluate_one(
        self, evaluator: Evaluator, sampling_client: SamplingClient | None
    ) -> Metrics:
        """Return the metrics of one evaluator. It gets the training client or the sampling client,
        depending on its class. An evaluator whose __call__ is not async runs in a thread.
        """
        name = evaluator_name(evaluator)
        with self.display.evaluation(name):
            if isinstance(evaluator, TrainingClientEvaluator):
                call = partial(evaluator, self.training_client)
            else:
                assert sampling_client is not None
                call = partial(evaluator, sampling_client)
            return validate_metrics(await call_function(call), f"the evaluator {name}")

    def log_step(
        self, step: int, metrics: Metrics, spans: Spans, times: Mapping[str, float] | None = None
    ) -> None:
        """Write the row of a step. `times` replaces the times of `spans` with the same names."""
        self.metric_log.log(step, metrics | spans.metrics() | dict(times or {}))
        self.run_directory.log_spans(step, spans.rows())
        if self.trace is not None:
            self.trace.write(step, spans)
        if step + 1 < self.num_steps and self.run_directory.take_stop_request():
            self.display.say(f"stopping after step {step}, as the file {STOP_REQUEST} asks")
            self.interruption.request_normal_exit()

    def due_checkpoint(self, steps_done: int) -> SaveCheckpoint | None:
        """Return the method that saves the checkpoint due after `steps_done` steps. None if no
        checkpoint is due, or if those steps are already saved.
        """
        if steps_done == self.steps_saved:
            return None
        return self.checkpoints.due_save(
            steps_done,
            save_every=self.options.save_every,
            rolling_save_every=self.options.rolling_save_every,
        )

    async def save(self, save_checkpoint: SaveCheckpoint) -> CheckpointRecord:
        """Save the steps that are done. A save that has started completes even if the run fails or
        is cancelled.
        """

        async def save_and_record() -> CheckpointRecord:
            record = await asyncio.to_thread(
                save_checkpoint, self.steps_done, self.learner.checkpoint_metadata()
            )
            self.steps_saved = self.steps_done
            return record

        with self.display.saving(self.steps_done):
            return await run_uncancelled(save_and_record())

    async def save_if_needed(self) -> None:
        """Save the steps that are done, unless the newest checkpoint contains all of them."""
        if self.steps_done > self.steps_saved:
            await self.save(self.checkpoints.save_state_only)

    async def _save_after_error(self, error: Exception) -> None:
        """Save the finished steps before `error` ends the run. Skip this if the weights contain
        more than those steps.
        """
        try:
            if not await self.learner.settle_after_error():
                return
            await self.save_if_needed()
        except Exception as save_error:
            # For example, the disk is full or the server is down. The run still ends with `error`,
            # so report the failed save as a note.
            error.add_note(
                f"the steps since the last checkpoint could not be saved: {save_error!r}"
            )
        else:
            self.display.say(
                f"failed after {self.steps_done} of {self.num_steps} steps; once the cause is "
                "removed, the same command resumes there"
            )


def start_run(
    options: StartOptions,
    service_client: ServiceClient,
    run_directory: RunDirectory,
    rows: Mapping[str, RowDigest],
    data_size: int,
    recipe_name: str | None,
) -> RunStart:
    """Begin a run, or resume it from its newest checkpoint, by calling `start_training`. Raises
    UserError if the rows of a resumed run have changed; `rows` are those of `recorded_rows`.
    """
    run_directory.require_rows(rows)
    return start_training(
        service_client,
        run_directory,
        model_name=options.model_name,
        lora_rank=options.lora_rank,
        lora_switches=options.lora_switches,
        seed=options.seed,
        load_checkpoint_path=options.load_checkpoint_path,
        data_size=data_size,
        user_metadata=recipe_metadata(recipe_name, options.renderer_name),
    )


@contextmanager
def open_client(
    options: Any, service_client: ServiceClient | None, other_models: Sequence[str | None] = ()
) -> Generator[ServiceClient]:
    """Provide `service_client` within the block. If it is None, open a client for the block: in
    this process, on the options' `replicas`, or at their `base_url`. `other_models` are additional
    base models to load.
    """
    if service_client is not None:
        yield service_client
        return
    deterministic = getattr(options, "deterministic", None)
    models = models_used_together(
        options.base_url, getattr(options, "model_name", None), *other_models
    )
    with ServiceClient(
        models=models, deterministic=deterministic, **options.client_options
    ) as own_client:
        yield own_client


async def run_training(
    options: RunOptions,
    service_client: ServiceClient,
    *,
    config: Mapping[str, Any],
    may_change: Sequence[str],
    num_steps: int,
    rows: Mapping[str, RowDigest],
    data_size: int,
    make_learner: Callable[[RunLoop], Awaitable[Learner]],
    console_metrics: Mapping[str, str] | None = None,
    remedy: str = "",
) -> Path:
    """Start or resume the run in `options.log_path`, and run its steps. Return the directory.

    `config` is written to config.json. When a run is resumed, only the options in `may_change` may
    differ from the saved config, and `rows` must be those of the run (`start_run`). `console_metrics` maps names of metrics to their formats on the
    console; None shows all metrics. If the run is already finished, no step runs and a message is
    printed. `remedy` is the part of this message that says how to extend the run.

    After Ctrl-C or SIGTERM the run is saved, so that it can be resumed. Then KeyboardInterrupt or
    planish.processes.interruption.Terminated is raised. After `run_directory.request_stop`, the run
    is saved too, and planish.processes.interruption.Stopped is raised (exit status 0).
    """
    with RunDirectory(
        options.log_path, config, may_change=may_change, at_default=names_at_default(options)
    ) as run_directory:
        start = await asyncio.to_thread(
            start_run, options, service_client, run_directory, rows, data_size, options.recipe_name
        )
        if start.batch > num_steps or (start.batch == num_steps and start.was_finished):
            print(
                f"{run_directory.path}: all {start.batch} steps are done{remedy}; give another "
                "log_path to begin a new run"
            )
            return run_directory.path
        run_directory.resume_at(start.batch)
        run_directory.record_command()
        diff = await asyncio.to_thread(code_diff, [Path(__file__), Path.cwd()])
        write_atomically(run_directory.path / CODE_DIFF, diff)
        checkpoints = RunCheckpoints(
            start,
            run_directory,
            options.ttl_seconds,
            options.rolling_ttl_seconds,
            service_client,
            options.retention,
        )
        with (
            StepDisplay(num_steps, start.batch) as display,
            open_metric_logs(
                options.loggers,
                run_directory,
                num_steps=num_steps,
                console=display.console,
                console_metrics=console_metrics,
                project=options.wandb_project,
                name=options.wandb_name,
            ) as metric_log,
            TraceFile(run_directory.path, start.batch)
            if options.enable_trace
            else nullcontext() as trace,
        ):
            display.say(
                f"{options.model_name}: steps {start.batch} to "
                f"{num_steps}{explain_fewer_steps(options, num_steps)}, written to "
                f"{run_directory.path}"
            )
            loop = RunLoop(
                options, num_steps, start, run_directory, checkpoints, display, metric_log, trace
            )
            learner = await make_learner(loop)
            with loop.interruption.handle_signals(display.say):
                is_finished = await loop.run_to_end(learner)
    if not is_finished:
        raise loop.interruption.exit_exception
    return run_directory.path


def explain_fewer_steps(options: RunOptions, num_steps: int) -> str:
    """Return an explanation if the run has fewer steps than `max_steps`, otherwise ""."""
    if options.max_steps is None or options.max_steps <= num_steps:
        return ""
    epochs = "one pass" if options.num_epochs == 1 else f"{options.num_epochs} passes"
    return f" ({epochs} over the data; raise num_epochs to reach max_steps={options.max_steps})"
