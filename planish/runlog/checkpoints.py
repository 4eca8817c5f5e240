"""Start or resume a run's training client, and save the run's checkpoints.

Each checkpoint has a row in checkpoints.jsonl, with the number of batches that were trained before
it. There are three kinds of checkpoints:
    periodic   state and weights for sampling, with a time to live
    rolling    state alone, short-lived; deleted after the next state of any kind is saved
    final      state and weights for sampling, which do not expire
With a `Retention` (planish/runlog/retention.py), older periodic checkpoints are deleted and their
rows removed.
A run resumes at the last row that has a state. This includes runs that reached `max_steps`, so the
same command with more steps extends the run. If the newest state has expired or its files are
damaged, the run resumes from the newest earlier state that can be loaded.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from planish import ServiceClient, TrainingClient
from planish.errors import (
    CheckpointError,
    DamagedFileError,
    PlanishError,
    UnknownModelError,
    UserError,
    as_user_errors,
)
from planish.files import short_path
from planish.processes.interruption import Interrupted, StopRequest
from planish.renderers import Renderer, get_renderer, recommended_renderer_name
from planish.renderers.templates import chat_template_of
from planish.runlog.console import StepDisplay
from planish.runlog.retention import Retention, metric_values
from planish.runlog.run_directory import (
    CheckpointRecord,
    RunDirectory,
    checkpoint_of,
    checkpoint_records,
)
from planish.tokenizer import ModelTokenizer
from planish.types import LoraConfig

logger = logging.getLogger(__name__)

TRAINING_STAGE = "training"
"""The stage of a step in which its update is submitted and logged, in loops without asyncio."""
DATA_SIZE = "data_size"
"""The field of a checkpoint's row that holds the size of the dataset."""


@dataclass(frozen=True)
class RunStart:
    """A training client, and the checkpoint that it was resumed from; None for a new run."""

    training_client: TrainingClient
    record: CheckpointRecord | None = None
    data_size: int | None = None
    """The size of the dataset, which determines the order of a run's batches; None leaves it out
    of the checkpoints' rows.
    """

    @property
    def batch(self) -> int:
        """The index of the next batch to train on."""
        return self.record.batch if self.record else 0

    @property
    def was_finished(self) -> bool:
        """Whether the run had finished, and is now extended by more steps."""
        return self.record is not None and self.record.final is True


def start_training(
    service_client: ServiceClient,
    run: RunDirectory,
    *,
    model_name: str,
    lora_rank: int | None,
    seed: int,
    load_checkpoint_path: str | None,
    data_size: int,
    lora_switches: Mapping[str, bool] | None = None,
    user_metadata: Mapping[str, str] | None = None,
) -> RunStart:
    """Start or resume a run.

    If the run's directory records states, the client resumes from the newest state that can be
    loaded. Raises CheckpointError or DamagedFileError if no state can be loaded. In a new run,
    `load_checkpoint_path` gives the initial weights, with a new optimizer. Without that path, a new
    adapter is created.

    `lora_rank` is the rank of a new adapter, None for 32. Raises UserError if the weights at
    `load_checkpoint_path` have another rank than one that is given.

    `lora_switches` holds the explicitly given values of `train_mlp`, `train_attn` and
    `train_unembed`. Raises UserError if the weights at `load_checkpoint_path` have other values.
    Also raises UserError if the directory's run was trained on a dataset of another size.

    The metadata of every checkpoint contains `user_metadata` and the run's directory (`log_path`).
    """
    run_metadata = {"log_path": short_path(run.path.absolute()), **(user_metadata or {})}
    metadata: dict[str, Any] = {"user_metadata": run_metadata}
    records = run.resume_points()
    if records:
        if (recorded_size := records[0].extra.get(DATA_SIZE, data_size)) != data_size:
            raise UserError(
                f"log_path={run.path} has a run on a dataset of size {recorded_size}, but this "
                f"dataset has size {data_size}. Resuming would leave out examples or train on "
                "them again. Give the dataset of that run, or start a new run from its weights: "
                f"load_checkpoint_path={run.path} with another log_path"
            )
        return _resume(service_client, run, records, data_size, metadata)
    if load_checkpoint_path is None:
        client = service_client.create_lora_training_client(
            base_model=model_name,
            rank=LoraConfig().rank if lora_rank is None else lora_rank,
            seed=seed,
            **(lora_switches or {}),
            **metadata,
        )
        return RunStart(client, None, data_size)
    path = checkpoint_of(load_checkpoint_path)
    _check_switches(service_client, path, load_checkpoint_path, lora_switches or {})
    client = service_client.create_training_client_from_state(path, **metadata)
    info = client.get_info()
    adapter_model, adapter_rank = info.model_data.model_name, info.lora_rank
    if adapter_model != model_name or lora_rank not in (None, adapter_rank):
        raise UserError(
            f"load_checkpoint_path={load_checkpoint_path} has an adapter of rank {adapter_rank} on "
            f"{adapter_model}, but the options are lora_rank={lora_rank} and "
            f"model_name={model_name}; give model_name={adapter_model}, and leave lora_rank out"
        )
    return RunStart(client, None, data_size)


def _check_switches(
    service_client: ServiceClient, path: str, given_as: str, lora_switches: Mapping[str, bool]
) -> None:
    """Raise UserError if the checkpoint's adapter has other switches than `lora_switches`."""
    if not lora_switches:
        return
    info = service_client.create_rest_client().get_weights_info_by_tinker_path(path).result()
    for name, expected in lora_switches.items():
        if getattr(info, name) != expected:
            raise UserError(
                f"load_checkpoint_path={given_as} has an adapter with "
                f"{name}={getattr(info, name)}, but the options have {name}={expected}; leave "
                f"{name} out"
            )


def _resume(
    service_client: ServiceClient,
    run: RunDirectory,
    records: Sequence[CheckpointRecord],
    data_size: int,
    metadata: Mapping[str, Any],
) -> RunStart:
    """Resume from the first of `records` that can be loaded. If none can, raise the error of the
    first.
    """
    errors: list[CheckpointError | DamagedFileError] = []
    for record in records:
        assert record.state_path is not None, "resume points have a state"
        try:
            client = service_client.create_training_client_from_state_with_optimizer(
                record.state_path, **metadata
            )
        except (CheckpointError, DamagedFileError) as error:
            logger.warning(
                "%s: a checkpoint cannot be loaded (%s); trying the next older one", run.path, error
            )
            errors.append(error)
        else:
            return RunStart(client, record, data_size)
    errors[0].add_note(
        f"none of the {len(records)} states of {run.path} can be loaded; give another log_path to "
        "start a new run"
    )
    raise errors[0]


def choose_renderer(
    renderer_name: str | None, model_name: str, tokenizer: ModelTokenizer
) -> Renderer:
    """Return the named renderer. With None, choose it by the model's name. If that name is unknown,
    choose it by the name of the tokenizer, or use the tokenizer's chat template.
    """
    if renderer_name is not None:
        with as_user_errors("renderer_name"):
            return get_renderer(renderer_name, tokenizer)
    try:
        name = recommended_renderer_name(model_name)
    except UnknownModelError:
        try:
            name = recommended_renderer_name(tokenizer.name_or_path)
        except UnknownModelError:
            if chat_template_of(tokenizer) is None:
                raise
            name = "template"
    return get_renderer(name, tokenizer)


def recipe_metadata(recipe_name: str | None, renderer_name: str | None) -> dict[str, str]:
    """Return checkpoint metadata with the names of the run's recipe and renderer, if not None."""
    named = {"recipe_name": recipe_name, "renderer_name": renderer_name}
    return {name: value for name, value in named.items() if value is not None}


@dataclass
class RunCheckpoints:
    """Saves the checkpoints of one run, and records each in checkpoints.jsonl.

    `extra` holds fields of the training loop, such as counters. They are stored in the checkpoint's
    row, and a resumed run reads them from `RunStart.record`.
    """

    start: RunStart
    """Where the run begins or resumes."""
    run: RunDirectory
    ttl_seconds: int | None = None
    rolling_ttl_seconds: int | None = None
    service_client: ServiceClient | None = None
    """Needed for rolling checkpoints and `retention`, to delete checkpoints."""
    retention: Retention | None = None
    """Which periodic checkpoints are kept; None = all."""

    def __post_init__(self) -> None:
        record = self.start.record
        self.last_saved_batch = self.start.batch
        """The number of batches that the newest state was trained on."""
        self._rolling: str | None = None
        """The path of the current rolling state."""
        if record is not None and record.extra.get("rolling"):
            self._rolling = record.state_path

    def due_save(
        self, done: int, *, save_every: int, rolling_save_every: int
    ) -> Callable[[int, Mapping[str, Any]], CheckpointRecord] | None:
        """Return the method that saves the checkpoint due after `done` batches, or None. The two
        intervals are in batches; 0 means never.
        """
        if save_every and done % save_every == 0:
            return self.save_periodic
        return self.save_rolling if rolling_save_every and done % rolling_save_every == 0 else None

    def save_periodic(self, batch: int, extra: Mapping[str, Any] | None = None) -> CheckpointRecord:
        """Save a state from which the run resumes at `batch`, and weights for sampling."""
        return self._save(f"{batch:06d}", batch, self.ttl_seconds, extra, with_sampler=True)

    def save_state_only(
        self, batch: int, extra: Mapping[str, Any] | None = None
    ) -> CheckpointRecord:
        """Save a state from which the run resumes at `batch`."""
        return self._save(f"{batch:06d}", batch, self.ttl_seconds, extra, with_sampler=False)

    def save_rolling(self, batch: int, extra: Mapping[str, Any] | None = None) -> CheckpointRecord:
        """Save a short-lived state, from which the run resumes at `batch`."""
        name = f"rolling-{batch:06d}"
        extra_fields = {"rolling": True, **(extra or {})}
        record = self._save(name, batch, self.rolling_ttl_seconds, extra_fields, with_sampler=False)
        self._rolling = record.state_path
        return record

    def save_final(self, batch: int, extra: Mapping[str, Any] | None = None) -> CheckpointRecord:
        """Save the last state and weights, which do not expire, after `batch` trained batches."""
        return self._save(f"final-{batch:06d}", batch, None, extra, with_sampler=True, final=True)

    def _save(
        self,
        name: str,
        batch: int,
        ttl_seconds: int | None,
        extra: Mapping[str, Any] | None,
        *,
        with_sampler: bool,
        final: bool | None = None,
    ) -> CheckpointRecord:
        client = self.start.training_client
        state = client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True)
        weights = None
        if with_sampler:
            weights = client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)
        record = CheckpointRecord(
            "final" if final else name,
            batch,
            state_path=state.result().path,
            sampler_path=weights.result().path if weights else None,
            final=final,
            extra={DATA_SIZE: self.start.data_size, **(extra or {})},
        )
        self.run.log_checkpoint(record)
        self.last_saved_batch = batch
        rolling, self._rolling = self._rolling, None
        self._delete(rolling)
        self._delete_superseded()
        return record

    def describe_best(self) -> list[str]:
        """Return a line for each of the best periodic checkpoints by the metric of `retention`,
        with its value and path, the best one first.
        """
        if self.retention is None:
            return []
        records, values = self._periodic_records(), self._metric_values()
        return [
            f"{self.retention.metric} = {values[batch]:.4g} after {batch} steps: "
            f"{records[batch].sampler_path or records[batch].state_path}"
            for batch in self.retention.best(records, values)
        ]

    def _delete_superseded(self) -> None:
        """Delete the periodic checkpoints that `retention` does not keep. Their rows are removed
        first, so that no row names a checkpoint that is gone.
        """
        if self.retention is None:
            return
        records = self._periodic_records()
        kept = self.retention.kept(records, self._metric_values())
        superseded = [record for batch, record in records.items() if batch not in kept]
        self.run.remove_checkpoints(superseded)
        for record in superseded:
            self._delete(record.state_path)
            self._delete(record.sampler_path)

    def _periodic_records(self) -> dict[int, CheckpointRecord]:
        """Return the checkpoints other than rolling and final ones, by their number of batches."""
        return {
            record.batch: record
            for record in checkpoint_records(self.run.path)
            if not record.final and not record.extra.get("rolling")
        }

    def _metric_values(self) -> dict[int, float]:
        metric = self.retention.metric if self.retention is not None else None
        return metric_values(self.run.metrics(), metric) if metric is not None else {}

    def _delete(self, path: str | None) -> None:
        if path is None:
            return
        assert self.service_client is not None
        try:
            rest_client = self.service_client.create_rest_client()
            rest_client.delete_checkpoint_from_tinker_path(path).result()
        except PlanishError as error:  # harmless: the checkpoint has expired, or will
            logger.info("the checkpoint %s was not deleted: %s", path, error)


@contextmanager
def save_when_stopped(checkpoints: RunCheckpoints, display: StepDisplay) -> Iterator[StopRequest]:
    """Save the run if Ctrl-C, SIGTERM, `request_stop` or an error stops a loop that does not use
    asyncio.

    The command that started the process is recorded, for a resume. Within the block, the first
    signal or request ends the loop at its next check. The steps that `display` counts as done are
    saved. Then KeyboardInterrupt, Terminated or Stopped is raised, or the error.

    After an error in the stage TRAINING_STAGE nothing is saved, because the weights may contain
    more than the steps that are done.
    """
    checkpoints.run.record_command()
    with StopRequest(display.say, checkpoints.run.take_stop_request) as stop:
        try:
            yield stop
        except Interrupted:
            if display.num_done > checkpoints.last_saved_batch:
                checkpoints.save_state_only(display.num_done)
            display.say(
                f"stopped after {display.num_done} of {display.num_steps} steps; the same command "
                "resumes there"
            )
            raise stop.exit_exception from None
        except Exception as error:
            if display.current_stage_name != TRAINING_STAGE:
                _save_after_error(checkpoints, display, error)
            raise


def _save_after_error(checkpoints: RunCheckpoints, display: StepDisplay, error: Exception) -> None:
    """Save the steps that are done. If that fails too, report it as a note of `error`."""
    try:
        if display.num_done > checkpoints.last_saved_batch:
            checkpoints.save_state_only(display.num_done)
    except Exception as save_error:
        error.add_note(f"the steps since the last checkpoint could not be saved: {save_error!r}")
    else:
        display.say(
            f"failed after {display.num_done} of {display.num_steps} steps; once the cause is "
            "removed, the same command resumes there"
        )
