"""The training models of a fleet: their homes, and the order of their operations.

The home replica of a model has its gradient and optimizer state. It runs all operations of the
model, except that the micro-batches of a `ForwardBackward` are spread over all replicas.
"""

import threading
from collections import deque
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from planish.engine.replication import ExportWeights, RejectNextStep
from planish.errors import EngineClosedError, UserError
from planish.fleet.futures import RemoteFuture, copy_outcome, done_future
from planish.fleet.link import ReplicaLostError
from planish.fleet.remote_engine import SAVES, unknown_id
from planish.fleet.replica import Replica, SharedVersion
from planish.fleet.replica_set import ReplicaSet
from planish.fleet.spread_call import Plan, SpreadCall
from planish.fleet.versions import CurrentVersion, SharedVersions
from planish.processes.background import BackgroundThread, wait_for_saves
from planish.service import (
    CreateModel,
    DeferredForwardBackward,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    SaveWeights,
    UnloadModel,
)

_CLOSE_CHECK_SECONDS = 0.5


class Step:
    """An operation of a training model that waits for its turn."""

    def __init__(self, operation: Operation[Any], plan: Plan | None) -> None:
        """`plan`: the micro-batches of a `ForwardBackward`, if known."""
        self.operation = operation
        self.plan = plan
        self.future: RemoteFuture[Any] = RemoteFuture(self._cancel)
        self._attempt: Future[Any] | None = None
        self._has_begun = False

    def begin(self) -> bool:
        """Begin, and return False if the operation was cancelled."""
        self._has_begun = True
        return not self.future.cancelled()

    def follow(self, attempt: Future[Any]) -> None:
        """Take the outcome of a submitted operation."""
        self._attempt = attempt
        attempt.add_done_callback(partial(copy_outcome, target=self.future))

    def fail(self, error: BaseException) -> None:
        """Fail the operation, unless it is done."""
        if not self.future.done():
            self.future.set_exception(error)

    def _cancel(self) -> bool:
        return self._attempt.cancel() if self._attempt is not None else not self._has_begun


class FleetModel:
    """One training model."""

    def __init__(
        self,
        model_id: str,
        base_model: str,
        home: Replica,
        replicas: ReplicaSet,
        versions: SharedVersions,
    ) -> None:
        self.model_id = model_id
        self.base_model = base_model
        self.home = home
        self.last_checkpoint: str | None = None
        """The path of the newest saved training checkpoint."""
        self.loss: str | None = None
        """Why the model is gone, if its home is lost."""
        self._replicas = replicas
        self._lock = threading.Lock()
        self._steps: deque[Step] = deque()
        """The operations that wait. A thread runs them, as long as there are any."""
        self._exported = CurrentVersion(versions)
        self._idle = threading.Condition(self._lock)

    def submit(self, operation: Operation[Any]) -> Future[Any]:
        """Queue an operation. Raise UserError for invalid input."""
        self._check()
        try:
            return self._submit_in_order(operation)
        except ReplicaLostError:
            raise self._lost_error() from None

    def _submit_in_order(self, operation: Operation[Any]) -> Future[Any]:
        can_spread = len(self._replicas.live()) > 1
        plan: Plan | None = None
        if isinstance(operation, ForwardBackward):
            if can_spread or self._steps:
                plan = self._plan(operation)
        elif self._steps and not isinstance(
            operation, OptimStep | UnloadModel | DeferredForwardBackward
        ):
            # The home checks the operation only when its turn comes. The check of an unload would
            # already unload the model.
            self.home.engine.call("check", operation)
        waits = can_spread and (
            isinstance(operation, DeferredForwardBackward) or len(plan or ()) > 1
        )
        with self._lock:
            if not waits and not self._steps:
                return self._submit_home(operation)
            step = Step(operation, plan)
            self._steps.append(step)
            if len(self._steps) == 1:
                BackgroundThread(
                    self._run, "planish-model", stop=self._stop_at_exit, exit_seconds=0.0
                )
        return step.future

    def export(self) -> Future[SharedVersion]:
        """Return the version of the weights after all submitted operations. The model drops its use
        of the version when its weights change.
        """
        return self.submit(ExportWeights(self.model_id))

    def wait_until_idle(self) -> None:
        """Wait until every operation was submitted to the home replica."""
        with self._lock:
            self._idle.wait_for(lambda: not self._steps)

    def lose(self, cluster_fault: str | None) -> None:
        """Record that the home replica is lost, by itself or with the whole cluster."""
        remedy = (
            f"load the last checkpoint, {self.last_checkpoint}"
            if self.last_checkpoint
            else "there is no checkpoint, so create it again"
        )
        reason = (
            cluster_fault or f"the replica that trained it has ended (replica {self.home.number})"
        )
        self.loss = (
            f"model_id={self.model_id!r}: its weights and its optimizer state are lost, because "
            f"{reason}; {remedy}"
        )

    def drop_export(self) -> None:
        """Forget the exported weights of a model that is lost."""
        with self._lock:
            self._exported.forget()

    def _lost_error(self) -> ReplicaLostError:
        """Return the error of operations after the loss of the home replica, which may be noticed
        here first.
        """
        if self.loss is None:
            self.lose(self._replicas.fault)
        return ReplicaLostError(str(self.loss))

    def _check(self) -> None:
        if self.loss is not None:
            raise ReplicaLostError(self.loss)

    def _plan(self, operation: ForwardBackward) -> Plan:
        """Return the micro-batches of an operation. Raise UserError for invalid data."""
        return self.home.engine.call("preparation.micro_batches", operation)

    def _submit_home(self, operation: Operation[Any]) -> Future[Any]:
        """Submit an operation to the home replica. The caller has the lock."""
        if isinstance(operation, OptimStep | LoadWeights | UnloadModel):
            self._exported.forget()
        self._check()
        if isinstance(operation, ExportWeights):

            def export() -> Future[Any]:  # The host returns an `AdapterVersion`.
                return self.home.engine.submit(operation)

            return self._exported.get(export)
        future = self.home.engine.submit(operation)
        if isinstance(operation, SaveWeights):
            future.add_done_callback(self._note_checkpoint)
        return future

    def _note_checkpoint(self, future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.last_checkpoint = future.result().path

    def _stop_at_exit(self) -> None:
        wait_for_saves(
            [step.future for step in list(self._steps) if isinstance(step.operation, SAVES)]
        )

    def _run(self) -> None:
        """Run the queued operations, until there are none."""
        is_done = False
        while not is_done:
            step = self._steps[0]
            try:
                self._run_step(step)
            except BaseException as error:
                step.fail(error)
            with self._lock:
                self._steps.popleft()
                is_done = not self._steps
                self._idle.notify_all()

    def _run_step(self, step: Step) -> None:
        operation, plan = step.operation, step.plan
        adds_gradient = isinstance(operation, DeferredForwardBackward) or (
            isinstance(operation, ForwardBackward) and not operation.forward_only
        )
        if not step.begin():
            if adds_gradient:
                self._reject_next_step(UserError("the forward_backward was cancelled"))
            return
        try:
            if isinstance(operation, DeferredForwardBackward):
                operation = self._with_data(operation)
                plan = self._plan(operation)
            if isinstance(operation, ForwardBackward) and plan is not None and len(plan) > 1:
                step.follow(self._spread(operation, plan))
                return
            with self._lock:
                attempt = self._submit_home(operation)
        except ReplicaLostError:
            # The losses of other replicas are handled where they occur.
            raise self._lost_error() from None
        except Exception as error:
            if adds_gradient:
                self._reject_next_step(error)
            raise
        step.follow(attempt)

    def _with_data(self, operation: DeferredForwardBackward) -> ForwardBackward:
        """Wait for the data of an operation."""
        data = operation.data
        while not data.done():
            wait([data], _CLOSE_CHECK_SECONDS)
            if self._replicas.is_closing and not data.running() and not data.done():
                raise EngineClosedError(
                    "the engine was closed before this operation was done; make a new ServiceClient"
                )
        return ForwardBackward(
            operation.model_id, data.result(), operation.loss_fn, operation.loss_fn_config
        )

    def _reject_next_step(self, error: BaseException) -> None:
        with self._lock:
            self._submit_home(RejectNextStep(self.model_id, error))

    def _spread(self, operation: ForwardBackward, plan: Plan) -> Future[Any]:
        """Compute the micro-batches on all replicas, and add the gradients on the home replica."""
        others = [replica for replica in self._replicas.open() if replica is not self.home]
        shared = self._current_version() if others else None
        finish = SpreadCall(self.model_id, operation, self.home, shared, plan).compute(others)
        with self._lock:
            return self._submit_home(finish)

    def _current_version(self) -> SharedVersion:
        """Return the present weights of the home replica. No other operation is in progress."""
        with self._lock:
            exported = self._submit_home(ExportWeights(self.model_id))
        return exported.result()


class FleetModels:
    """All training models of a fleet."""

    def __init__(self, replicas: ReplicaSet, versions: SharedVersions) -> None:
        self._replicas = replicas
        self._versions = versions
        self.by_id: dict[str, FleetModel] = {}
        """The models that are not unloaded."""
        self.created_ids: set[str] = set()
        """The ids of all models that were ever created."""
        self._lock = threading.Lock()

    def get(self, model_id: str) -> FleetModel:
        """Return a model. Raise UserError if there is none of this id."""
        model = self.by_id.get(model_id)
        if model is None:
            raise unknown_id("model", model_id)
        return model

    def check_is_new(self, model_id: str) -> None:
        """Raise UserError if a model has this id."""
        if model_id in self.by_id:
            raise UserError(f"model_id={model_id!r} is already in use; choose another id")

    def create(self, operation: CreateModel, base_model: str) -> Future[Any]:
        """Create a model on the replica with the fewest. All replicas have the base model."""
        home, future = self._create_at_home(operation)
        self.by_id[operation.model_id] = FleetModel(
            operation.model_id, base_model, home, self._replicas, self._versions
        )
        self.created_ids.add(operation.model_id)
        return future

    def _create_at_home(self, operation: CreateModel) -> tuple[Replica, Future[Any]]:
        while True:
            home = self._replicas.choose_home()
            with self._lock:
                home.num_models += 1
            try:
                return home, home.engine.submit(operation)
            except BaseException as error:
                with self._lock:
                    home.num_models -= 1
                if not isinstance(error, ReplicaLostError):
                    raise
                self._replicas.wait_until_lost(home)

    def unload(self, operation: UnloadModel) -> Future[Any]:
        """Free a model."""
        model = self.by_id.pop(operation.model_id)
        try:
            return model.submit(operation)
        except ReplicaLostError:  # the model is gone already
            model.drop_export()
            return done_future()
        finally:
            with self._lock:
                model.home.num_models -= 1

    def on(self, replica: Replica) -> list[FleetModel]:
        """Return the models whose home is this replica."""
        return [model for model in list(self.by_id.values()) if model.home is replica]

    def wait_until_idle(self) -> None:
        """Wait until every operation was submitted to a replica."""
        for model in list(self.by_id.values()):
            model.wait_until_idle()
