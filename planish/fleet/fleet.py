"""`Fleet`: `Service` in front of several replicas, each with a whole engine.

Results have the same bits for every number of replicas of one kind of device. Random numbers depend
on seed, sample and position only. Micro-batches depend on the call only, and their gradients are
added in a fixed order (engine/training/gradient_tree.py).
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from planish.engine.replication import AdapterVersion
from planish.errors import CheckpointError, EngineClosedError
from planish.fleet.futures import done_future
from planish.fleet.link import Link, ReplicaLostError
from planish.fleet.releases import ReleaseQueue
from planish.fleet.replica import Replica, SharedVersion
from planish.fleet.replica_set import ReplicaSet
from planish.fleet.samplers import FleetSampler, FleetSamplers
from planish.fleet.training import FleetModels
from planish.fleet.versions import SharedVersions
from planish.processes.stall_watch import SILENT_SECONDS, STALL_SECONDS
from planish.service import (
    CheckpointInfo,
    CreateModel,
    CreateSampler,
    Operation,
    PublishSampler,
    ReleaseSampler,
    Sample,
    SamplerInfo,
    UnloadModel,
)
from planish.types import Checkpoint, GetServerCapabilitiesResponse

R = TypeVar("R")
_NUM_THREADS = 16


class Fleet:
    """Several replicas that act as one engine."""

    def __init__(
        self,
        start_link: Callable[[], Link],
        num_replicas: int,
        put: Callable[[AdapterVersion], Any] = lambda version: version,
        on_close: Callable[[], None] = lambda: None,
        cluster_fault: Callable[[], str | None] = lambda: None,
        check_free: Callable[[], None] = lambda: None,
        drained: Collection[int] = (),
        silent_seconds: float = SILENT_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Start the replicas.

        `start_link` starts a process. `put` stores a version of an adapter, and returns what the
        replicas get in its place. `cluster_fault` returns why the whole cluster is lost, or None.
        `check_free` raises UserError if there is no device for one more replica. The replicas with
        the numbers in `drained` are not started. A replica that does not answer for
        `silent_seconds`, or whose engine makes no progress for `stall_seconds`, is replaced.
        """
        self._check_free = check_free
        self._on_close = on_close
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="planish-fleet")
        self.replicas = ReplicaSet(
            start_link,
            num_replicas,
            self._describe_loss,
            cluster_fault,
            drained,
            silent_seconds,
            stall_seconds,
        )
        self._versions = SharedVersions(put, self.replicas, self._threads)
        self._models = FleetModels(self.replicas, self._versions)
        self._samplers = FleetSamplers(self.replicas, self._threads, self._versions.drop)
        # A replica that was lost before had neither models nor samplers.
        self.replicas.on_lost = self._handle_loss
        self._releases = ReleaseQueue(self)

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Queue an operation. See `Service.submit`."""
        self._check_open()
        future: Future[Any]
        match operation:
            case CreateModel():
                future = self._create_model(operation)
            case PublishSampler():
                future = self._publish(operation)
            case CreateSampler():
                future = self._create_sampler(operation)
            case Sample():
                future = self._samplers.sample(operation)
            case UnloadModel():
                self._models.get(operation.model_id)  # raises UserError for an unknown model
                future = self._releases.put(operation)
            case ReleaseSampler():
                future = self._releases.put(_Release(self._samplers.remove(operation.sampler_id)))
            case _:
                future = self._models.get(operation.model_id).submit(operation)  # pyright: ignore[reportAttributeAccessIssue]
        return future

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the available base models."""
        return self._call("capabilities")

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        """Return a sampler's base model and checkpoint."""
        return self._samplers.info(sampler_id)

    def tokenizer_directory(self, base_model: str) -> Path:
        """Return the directory with the base model's tokenizer files."""
        return self._call("tokenizer_directory", base_model)

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return saved checkpoints, newest first. Raises CheckpointError if the run is unknown."""
        try:
            return self._call("checkpoints", run_id)
        except CheckpointError:
            # Only the home replica knows a model without checkpoints.
            if run_id in self._models.created_ids:
                return []
            raise

    def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Return the base model and adapter shape of the checkpoint at a tinker:// path."""
        return self._call("checkpoint_info", path)

    def delete_checkpoint(self, path: str) -> None:
        """Delete the checkpoint at a tinker:// path."""
        self._call("delete_checkpoint", path)

    def add_replica(self) -> Replica:
        """Begin to start one more replica, also while operations run. It takes work when it has all
        base models. Raise UserError if there is no free device.
        """
        self._check_open()
        self._check_free()
        return self.replicas.add()

    def close(self, finish: bool = True) -> None:
        """Close all engines, and end their processes. See `Service.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self.replicas.is_closing = True
        try:
            if finish:
                self._models.wait_until_idle()
            self.replicas.close(finish)
        finally:
            self._releases.stop()
            self._threads.shutdown(wait=False)
            self._on_close()

    def run_release(self, operation: Operation[Any]) -> Future[Any]:
        """Free a model or sampler. The thread of the releases calls this."""
        if isinstance(operation, _Release):
            self._samplers.release(operation.sampler)
            return done_future()
        assert isinstance(operation, UnloadModel)
        return self._models.unload(operation)

    def _create_model(self, operation: CreateModel) -> Future[Any]:
        self._models.check_is_new(operation.model_id)
        if operation.base_model is not None:
            base_model = operation.base_model
        else:
            assert operation.from_path is not None
            base_model = self.checkpoint_info(operation.from_path).base_model
        self.replicas.load_base_model(base_model)
        return self._models.create(operation, base_model)

    def _publish(self, operation: PublishSampler) -> Future[str]:
        model = self._models.get(operation.model_id)
        sampler = self._samplers.add(SamplerInfo(operation.sampler_id, model.base_model, None))
        future: Future[str] = Future()
        try:
            exported = model.export()
        except BaseException:
            self._samplers.remove(operation.sampler_id)
            raise
        exported.add_done_callback(partial(self._finish_publish, sampler, future))
        return future

    def _finish_publish(
        self, sampler: FleetSampler, future: Future[str], exported: Future[SharedVersion]
    ) -> None:
        shared, error = None, exported.exception()
        if error is None:
            try:
                # The model may drop its own use of the version at its next step.
                shared = self._versions.share(exported.result().version)
            except Exception as failure:
                error = failure
        self._threads.submit(self._set_source, sampler, future, shared, error)

    def _set_source(
        self,
        sampler: FleetSampler,
        future: Future[str],
        shared: SharedVersion | None,
        error: BaseException | None,
    ) -> None:
        self._samplers.set_source(sampler, shared, error)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(sampler.info.sampler_id)

    def _create_sampler(self, operation: CreateSampler) -> Future[str]:
        shared, base_model = None, operation.base_model
        if operation.model_path is not None:
            version = self._call("preparation.read_checkpoint", operation.model_path, base_model)
            base_model, shared = version.base_model, self._versions.share(version)
        assert base_model is not None
        self.replicas.load_base_model(base_model)
        sampler = self._samplers.add(
            SamplerInfo(operation.sampler_id, base_model, operation.model_path)
        )
        self._samplers.set_source(sampler, shared, None)
        return done_future(operation.sampler_id)

    def _describe_loss(self, operation: Operation[Any], error: ReplicaLostError) -> str:
        model = self._models.by_id.get(getattr(operation, "model_id", None) or "")
        return str(error) if model is None or model.loss is None else model.loss

    def _handle_loss(self, replica: Replica) -> None:
        for model in self._models.on(replica):
            model.lose(self.replicas.fault)
        self._samplers.forget_replica(replica)

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method of any engine."""
        self._check_open()
        return self.replicas.call(name, *args)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new ServiceClient")


class _Release(Operation[None]):
    """The release of a sampler that is no longer among the samplers in use."""

    def __init__(self, sampler: FleetSampler) -> None:
        self.sampler = sampler
