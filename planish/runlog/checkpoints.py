"""Where a run begins, and what it leaves behind: a training client made, resumed or started from
weights; checkpoints on the way.

Kinds of checkpoints, all recorded in checkpoints.jsonl by the number of batches that were trained
before them:
    periodic   state and weights for sampling, with a time to live
    rolling    state alone, short-lived; deleted when the next state of any kind is safe
    final      state and weights for sampling, which do not expire
A run resumes at the last row that has a state, also when `max_steps` ended it early; so the same
command with more steps goes on where the weights are. A state that has expired since, or whose
files are damaged, is passed over for the one before.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

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
from planish.runlog.console import StepDisplay
from planish.runlog.run_directory import CheckpointRecord, RunDirectory, checkpoint_of
from planish.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

DATA_SIZE = "data_size"
"""In the rows of checkpoints: how large the data set is."""


@dataclass(frozen=True)
class Start:
    """A training client and the checkpoint it was resumed from, if it was."""

    training_client: TrainingClient
    record: CheckpointRecord | None
    data_size: int
    """Of the data set, as its checkpoints say; the order of a run's batches is a function of it."""

    @property
    def batch(self) -> int:
        """The batch to go on with."""
        return self.record.batch if self.record else 0

    @property
    def was_finished(self) -> bool:
        """The run had ended; it now goes on with more steps."""
        return self.record is not None and self.record.final is True


def start_training(
    service_client: ServiceClient,
    run: RunDirectory,
    *,
    model_name: str,
    lora_rank: int,
    seed: int,
    load_checkpoint_path: str | None,
    data_size: int,
    lora_switches: Mapping[str, bool] | None = None,
    user_metadata: Mapping[str, str] | None = None,
) -> Start:
    """A client resumed from the run's newest state that is left, or from given weights with a fresh
    optimizer, or new.

    `lora_switches` holds those of `train_mlp`, `train_attn` and `train_unembed` that were asked
    for. Weights whose adapter has other parts are refused.

    Every checkpoint says in its metadata where the run's directory was (`log_path`), beside
    `user_metadata`. Raises UserError when the run in the directory was trained on a data set of
    another size.
    """
    origin = {"log_path": short_path(run.path.absolute()), **(user_metadata or {})}
    metadata: dict[str, Any] = {"user_metadata": origin}
    records = run.resume_points()
    if records:
        if (before := records[0].extra.get(DATA_SIZE, data_size)) != data_size:
            raise UserError(
                f"log_path={run.path} holds a run on a data set of size {before}, and this one has size {data_size}: going on would leave "
                f"data out or train on them again; give that data set, or begin with its weights (load_checkpoint_path={run.path}) in another log_path"
            )
        return _resumed(service_client, run, records, data_size, metadata)
    if load_checkpoint_path is None:
        client = service_client.create_lora_training_client(
            base_model=model_name, rank=lora_rank, seed=seed, **(lora_switches or {}), **metadata
        )
        return Start(client, None, data_size)
    path = checkpoint_of(load_checkpoint_path)
    _check_switches(service_client, path, load_checkpoint_path, lora_switches or {})
    client = service_client.create_training_client_from_state(path, **metadata)
    info = client.get_info()
    found = (info.model_data.model_name, info.lora_rank)
    if found != (model_name, lora_rank):
        raise UserError(
            f"load_checkpoint_path={load_checkpoint_path} holds an adapter of rank {found[1]} on {found[0]}, but "
            f"lora_rank={lora_rank} and model_name={model_name} were asked for; give the checkpoint's own"
        )
    return Start(client, None, data_size)


def _check_switches(
    service_client: ServiceClient, path: str, given_as: str, lora_switches: Mapping[str, bool]
) -> None:
    """UserError if the adapter of the checkpoint at `path` has other parts than were asked for."""
    if not lora_switches:
        return
    info = service_client.create_rest_client().get_weights_info_by_tinker_path(path).result()
    for name, asked in lora_switches.items():
        if getattr(info, name) != asked:
            raise UserError(
                f"load_checkpoint_path={given_as} holds an adapter with {name}={getattr(info, name)}, but "
                f"{name}={asked} was asked for; leave {name} out"
            )


def _resumed(
    service_client: ServiceClient,
    run: RunDirectory,
    records: Sequence[CheckpointRecord],
    data_size: int,
    metadata: Mapping[str, Any],
) -> Start:
    """A client of the first of `records` that can be loaded; the error of the first if none can."""
    errors: list[CheckpointError | DamagedFileError] = []
    for record in records:
        assert record.state_path is not None, "resume points have a state"
        try:
            client = service_client.create_training_client_from_state_with_optimizer(
                record.state_path, **metadata
            )
        except (CheckpointError, DamagedFileError) as error:
            logger.warning("%s: %s; going on from an older one if there is any", run.path, error)
            errors.append(error)
        else:
            return Start(client, record, data_size)
    errors[0].add_note(
        f"none of the {len(records)} states of {run.path} can be loaded; begin anew with another log_path"
    )
    raise errors[0]


def choose_renderer(
    renderer_name: str | None, model_name: str, tokenizer: ModelTokenizer
) -> Renderer:
    """The named renderer, or the one for the model's name, or the one that the model's own files
    ask for.
    """
    if renderer_name is not None:
        with as_user_errors("renderer_name"):
            return get_renderer(renderer_name, tokenizer)
    try:
        name = recommended_renderer_name(model_name)
    except UnknownModelError:
        name = recommended_renderer_name(tokenizer.name_or_path)
    return get_renderer(name, tokenizer)


def origin_metadata(recipe_name: str | None, renderer_name: str | None) -> dict[str, str]:
    """What every checkpoint of a run says of where it comes from."""
    named = {"recipe_name": recipe_name, "renderer_name": renderer_name}
    return {name: value for name, value in named.items() if value is not None}


@dataclass
class RunCheckpoints:
    """Saves the states of one run. `extra` of a row is the loop's own, such as counters, and comes
    back at a resume.
    """

    training_client: TrainingClient
    run: RunDirectory
    ttl_seconds: int | None = None
    rolling_ttl_seconds: int | None = None
    service_client: ServiceClient | None = None
    """Needed for rolling checkpoints, to delete them."""
    data_size: int | None = None
    """Of the data set; None says nothing of it."""
    saved: int = 0
    """Batches that the newest state has seen."""
    _rolling: str | None = None
    """The rolling state that is there."""

    @classmethod
    def after(
        cls,
        start: Start,
        run: RunDirectory,
        ttl_seconds: int | None,
        rolling_ttl_seconds: int | None = None,
        service_client: ServiceClient | None = None,
    ) -> Self:
        """Of a run that begins, or goes on, at `start`."""
        checkpoints = cls(
            start.training_client,
            run,
            ttl_seconds,
            rolling_ttl_seconds,
            service_client,
            start.data_size,
            start.batch,
        )
        if start.record is not None and start.record.extra.get("rolling"):
            checkpoints._rolling = start.record.state_path
        return checkpoints

    def due(
        self, done: int, *, save_every: int, rolling_save_every: int
    ) -> Callable[[int, Mapping[str, Any]], CheckpointRecord] | None:
        """How to save after `done` batches, one of the methods below; None if nothing is due then.
        0 = never.
        """
        if save_every and done % save_every == 0:
            return self.periodic
        if rolling_save_every and done % rolling_save_every == 0:
            return self.rolling
        return None

    def periodic(self, batch: int, extra: Mapping[str, Any] | None = None) -> CheckpointRecord:
        """A checkpoint from which the run resumes at `batch`, and weights that can be sampled from."""
        return self._save(
            f"{batch:06d}", f"{batch:06d}", batch, self.ttl_seconds, extra or {}, with_sampler=True
        )

    def state_only(self, batch: int, extra: Mapping[str, Any] | None = None) -> CheckpointRecord:
        """A checkpoint from which the run resumes at `batch`."""
        return self._save(
            f"{batch:06d}", f"{batch:06d}", batch, self.ttl_seconds, extra or {}, with_sampler=False
        )

    def rolling(self, batch: int, extra: Mapping[str, Any] | None = None) -> CheckpointRecord:
        """A short-lived state, from which the run resumes at `batch`."""
        name = f"rolling-{batch:06d}"
        marked = {"rolling": True, **(extra or {})}
        record = self._save(name, name, batch, self.rolling_ttl_seconds, marked, with_sampler=False)
        self._rolling = record.state_path
        return record

    def final(self, batch: int, extra: Mapping[str, Any] | None = None) -> CheckpointRecord:
        """The last state and weights, which do not expire."""
        return self._save(
            "final", f"final-{batch:06d}", batch, None, extra or {}, with_sampler=True, final=True
        )

    def _save(
        self,
        row_name: str,
        name: str,
        batch: int,
        ttl_seconds: int | None,
        extra: Mapping[str, Any],
        *,
        with_sampler: bool,
        final: bool | None = None,
    ) -> CheckpointRecord:
        state = self.training_client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True)
        weights = (
            self.training_client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)
            if with_sampler
            else None
        )
        record = CheckpointRecord(
            row_name,
            batch,
            state_path=state.result().path,
            sampler_path=weights.result().path if weights else None,
            final=final,
            extra={DATA_SIZE: self.data_size, **extra},
        )
        self.run.log_checkpoint(record)
        self.saved = batch
        self._delete_rolling()
        return record

    def _delete_rolling(self) -> None:
        path, self._rolling = self._rolling, None
        if path is not None:
            assert self.service_client is not None
            try:
                self.service_client.create_rest_client().delete_checkpoint_from_tinker_path(
                    path
                ).result()
            except PlanishError as error:  # it has expired, or will
                logger.info("%s was not deleted: %s", path, error)


@contextmanager
def save_when_stopped(checkpoints: RunCheckpoints, display: StepDisplay) -> Iterator[StopRequest]:
    """For a loop without asyncio. Within the block the first Ctrl-C or SIGTERM ends the loop at its
    next check. The steps that `display` counts as done are saved, and the exception that ends the
    program is raised.
    """
    with StopRequest(display.say) as stop:
        try:
            yield stop
        except Interrupted:
            if display.done > checkpoints.saved:
                checkpoints.state_only(display.done)
            display.say(
                f"stopped after {display.done} of {display.steps} steps; the same command goes on from there"
            )
            raise stop.ending from None
