"""`ServedFleet`: a fleet behind a server, which needs more of an engine than `Service`."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from planish.engine.administration import Administration
from planish.engine.base_models import BaseModels
from planish.engine.checkpoints.store import CheckpointStore, data_directory
from planish.engine.memory import DeviceMemory
from planish.engine.replication import AdapterVersion, CompileConstraint
from planish.engine.settings import EngineSettings
from planish.fleet.drained import write_drained
from planish.fleet.fleet import Fleet
from planish.fleet.futures import RemoteFuture
from planish.fleet.link import EngineMemory, EngineOptions, Link, ReplicaLostError
from planish.fleet.replica import Replica
from planish.fleet.replica_set import ReplicaSet
from planish.service import (
    AdapterBytes,
    DeferredForwardBackward,
    ForwardBackward,
    Operation,
    Sample,
)
from planish.types import LoraConfig

R = TypeVar("R")


class FleetAdministration(Administration):
    """The checkpoints and base models of a fleet: files, which this process reads and writes."""

    def __init__(self, options: EngineOptions, replicas: ReplicaSet) -> None:
        """Use the files of the engines with these options."""
        settings = EngineSettings(**dict(options.settings))
        # This process loads no base model, so it needs no GPU.
        memory = DeviceMemory(settings, device=torch.device("cpu"))
        base_models = BaseModels(dict(options.models or {}), settings, memory, only_these=True)
        super().__init__(base_models, CheckpointStore(data_directory(options.data_dir)), settings)
        self._replicas = replicas
        self._adapter_bytes: dict[tuple[str, LoraConfig], AdapterBytes] = {}

    def adapter_bytes(self, base_model: str, lora: LoraConfig) -> AdapterBytes:
        """Return the memory of an adapter on the device of the replicas. See `Administration`."""
        key = base_model, replace(lora, seed=None)
        if key not in self._adapter_bytes:
            self._adapter_bytes[key] = self._replicas.call("administration.adapter_bytes", *key)
        return self._adapter_bytes[key]

    def preemptions(self) -> tuple[int, int]:
        """Return the numbers of `Administration.preemptions`, summed over the replicas, as of
        their last signs of life.
        """
        statuses = [replica.status for replica in self._replicas.replicas]
        return (
            sum(status.num_preemptions for status in statuses),
            sum(status.num_preempted_samples for status in statuses),
        )


class ServedFleet(Fleet):
    """A fleet with what a server needs besides operations."""

    checks_inline = False
    """A check of a sample asks another process."""

    def __init__(
        self,
        start_link: Callable[[], Link],
        num_replicas: int,
        options: EngineOptions,
        put: Callable[[AdapterVersion], Any] = lambda version: version,
        on_close: Callable[[], None] = lambda: None,
        **arguments: Any,
    ) -> None:
        """Start the replicas. `options` are those of their engines. See `Fleet`."""
        super().__init__(start_link, num_replicas, put, on_close, **arguments)
        self.administration = FleetAdministration(options, self.replicas)
        self._data_dir = data_directory(options.data_dir)
        self._substitutes = dict(options.settings.get("substitute_losses") or {})
        self.substitutions: Counter[tuple[str, str]] = Counter()
        """Number of operations with a substituted loss, by (requested loss, substitute)."""

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Queue an operation. See `Service.submit`."""
        future = super().submit(operation)
        if isinstance(operation, ForwardBackward | DeferredForwardBackward):
            substitute = self._substitutes.get(operation.loss_fn)
            if substitute is not None:
                self.substitutions[operation.loss_fn, substitute] += 1
        return future

    def check_sample(self, base_model: str, operation: Sample) -> None:
        """Raise UserError if the base model would reject this request. Load the base model on all
        replicas if needed.
        """
        self.replicas.load_base_model(base_model)
        self.replicas.call("check_sample", base_model, replace(operation, on_token=None))

    def prepare_constraint(self, operation: Sample, base_model: str | None = None) -> Future[Any]:
        """Compile the constraint of a request on all replicas, because any may get the request.
        See `Engine.prepare_constraint`.
        """
        base_model = base_model or self.sampler_info(operation.sampler_id).base_model
        compilation = CompileConstraint(replace(operation, on_token=None), base_model)
        attempts: list[Future[Any]] = []
        for replica in self.replicas.live():
            with suppress(ReplicaLostError):
                attempts.append(replica.engine.submit(compilation))
        return _all_of(attempts)

    def drain(self, number: int) -> Replica:
        """Give a replica no new samples and models, now and after a restart. See
        `ReplicaSet.drain`.
        """
        replica = self.replicas.drain(number)
        self._record_drained()
        return replica

    def add_replica(self) -> Replica:
        """Begin to start one more replica. See `Fleet.add_replica`."""
        replica = super().add_replica()
        self._record_drained()
        return replica

    def _record_drained(self) -> None:
        write_drained(self._data_dir, {r.number for r in self.replicas.replicas if r.is_draining})

    def memory(self) -> dict[int, EngineMemory]:
        """Return the memory that each replica has planned, by number."""
        found: dict[int, EngineMemory] = {}
        for replica in self.replicas.live():
            with suppress(ReplicaLostError):
                found[replica.number] = replica.link.request("memory")
        return found

    def status(self) -> list[dict[str, Any]]:
        """Return what each replica is and does, as plain values for JSON."""
        return [_status_of(replica) for replica in self.replicas.replicas]

    def models_on(self, replica: Replica) -> list[str]:
        """Return the ids of the training models whose home is this replica."""
        return [model.model_id for model in self._models.on(replica)]

    def end_if_idle(self, replica: Replica) -> bool:
        """End a drained replica if nothing runs on it. Return whether it has ended."""
        if not replica.load and not replica.num_models and not replica.is_lost:
            replica.link.kill()
        return replica.is_lost

    def progress(self) -> int | None:
        """Return None: a replica whose engine hangs is replaced."""
        return None

    def thread_stack(self) -> str:
        """Return where the engine threads are."""
        return "in other processes"


def _status_of(replica: Replica) -> dict[str, Any]:
    machine = getattr(replica.link, "machine", None)
    return {
        "replica": replica.number,
        "state": replica.state,
        "failure": replica.failure,
        "host": machine and machine.host,
        "pid": machine and machine.pid,
        "device": machine and machine.device,
        "models": replica.num_models,
        "unfinished_tokens": replica.load,
        "samples": replica.num_samples,
        "micro_batches": replica.num_micro_batches,
        "losses": replica.num_lost_processes,
        "resident_bytes": replica.status.resident_bytes,
    }


def _cancel(attempts: list[Future[Any]]) -> bool:
    """Cancel all attempts, and return whether that was possible."""
    outcomes = [attempt.cancel() for attempt in attempts]
    return all(outcomes)


def _all_of(attempts: list[Future[Any]]) -> Future[Any]:
    """Return a future that is done when all attempts are, or one has failed. The loss of a replica
    is no failure. Cancelling the future cancels all attempts.
    """
    combined: RemoteFuture[Any] = RemoteFuture(partial(_cancel, attempts))

    def note(attempt: Future[Any]) -> None:
        error = None if attempt.cancelled() else attempt.exception()
        with suppress(InvalidStateError):  # another attempt has completed it
            if error is not None and not isinstance(error, ReplicaLostError):
                combined.set_exception(error)
            elif all(other.done() for other in attempts):
                combined.set_result(None)

    for attempt in attempts:
        attempt.add_done_callback(note)
    if not attempts:
        combined.set_result(None)
    return combined
