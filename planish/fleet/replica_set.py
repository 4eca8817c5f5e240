"""The replicas of a fleet: start, choice, loss and replacement."""

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from planish.errors import EngineClosedError, UserError
from planish.fleet.link import Link, ReplicaLostError
from planish.fleet.remote_engine import RemoteEngine
from planish.fleet.replica import EndedLink, Replica, Watch, check_machines, check_weights
from planish.processes.background import BackgroundThread
from planish.processes.stall_watch import SILENT_SECONDS, STALL_SECONDS
from planish.service import Operation

_log = logging.getLogger(__name__)

_LOSS_SECONDS = 5.0
"""The longest time until the loss of a replica is known everywhere."""
_MAX_IDLE_LOSSES = 5
"""How often in a row a replica may be lost before it has done any work. Then it is not replaced, so
that a replica that cannot run, such as one on a machine without memory, does not start forever.
"""


class ReplicaSet:
    """The replicas, each of which is replaced when it is lost."""

    def __init__(
        self,
        start_link: Callable[[], Link],
        num_replicas: int,
        describe_loss: Callable[[Operation[Any], ReplicaLostError], str],
        cluster_fault: Callable[[], str | None] = lambda: None,
        drained: Collection[int] = (),
        silent_seconds: float = SILENT_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Start all replicas. `start_link` starts one process. See `Watch` for the two limits.

        `describe_loss` returns the error message of an operation of a lost replica. `cluster_fault`
        returns why the whole cluster is lost, or None. The replicas with the numbers in `drained`
        are not started.
        """
        self._start_link = start_link
        self._describe_loss = describe_loss
        self.on_lost: Callable[[Replica], None] = lambda replica: None
        """Called with a lost replica before its operations fail."""
        self._cluster_fault = cluster_fault
        self.fault: str | None = None
        """Why all replicas are lost for good, if they are."""
        self._changed = threading.Condition()
        self._preparing: set[Replica] = set()
        """New replicas that load the base models."""
        self._is_started = threading.Event()
        self._base_models: set[str] = set()
        self.is_closing = False
        with ThreadPoolExecutor(num_replicas) as threads:
            starts = [
                threads.submit(_without_process if number in drained else self._start, number)
                for number in range(num_replicas)
            ]
        self.replicas: list[Replica] = []
        """All replicas by number. A lost replica is in the list until it is replaced."""
        try:
            self.replicas = [start.result() for start in starts]
            check_machines(self.replicas)
        except BaseException:
            for start in starts:
                if start.exception() is None:
                    start.result().link.kill()
            raise
        self._is_started.set()
        self._stop = threading.Event()
        self._watch = Watch(silent_seconds, stall_seconds)
        self._thread = BackgroundThread(self._run_watch, "planish-watch", stop=self._stop.set)

    @property
    def is_starting(self) -> bool:
        """Whether a lost or added replica is going to run. This follows from the states alone: a
        replica is lost before this class is told, and must not seem to be given up meanwhile.
        """
        return any(replica.state in ("lost", "starting") for replica in self.replicas)

    def live(self) -> list[Replica]:
        """Return the replicas that run. Wait for a replacement if there are none."""
        with self._changed:
            while True:
                live = [replica for replica in self.replicas if not replica.is_lost]
                if live:
                    return live
                if not self.is_starting or self.is_closing or self.fault:
                    raise EngineClosedError(
                        f"{self.fault or 'no replica of the fleet is left'}; make a new "
                        "ServiceClient, and load the last checkpoint"
                    )
                self._changed.wait(1.0)

    def open(self) -> list[Replica]:
        """Return the replicas that take new samples and models."""
        live = self.live()
        return [replica for replica in live if not replica.is_draining] or live

    def drain(self, number: int) -> Replica:
        """Give a replica no new samples and models, and return it. Raise UserError if there is no
        such replica, or no other one that takes work.
        """
        with self._changed:
            if not 0 <= number < len(self.replicas):
                raise UserError(
                    f"replica {number}: there is no such replica; give a number from 0 to "
                    f"{len(self.replicas) - 1}"
                )
            replica = self.replicas[number]
            others = [r for r in self.replicas if r is not replica and r.state == "running"]
            if not others:
                raise UserError(
                    f"replica {number} is the only one that takes work, so it cannot be drained; "
                    "stop the server instead"
                )
            replica.is_draining = True
            return replica

    def add(self) -> Replica:
        """Begin to start one more replica, and return it. It takes the number of a drained or
        failed one, if there is one.
        """
        with self._changed:
            idle = [r for r in self.replicas if r.state in ("drained", "failed")]
            number = idle[0].number if idle else len(self.replicas)
            added = _without_process(number)
            if idle:
                idle[0].succeeded_by(added)
            added.is_draining, added.is_added, added.num_lost_idle = False, True, 0
            self.replicas[number : number + 1] = [added]
        threading.Thread(target=partial(self._replace, added), daemon=True).start()
        return added

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of any engine. If its replica is lost meanwhile, call that of another."""
        while True:
            replica = self.live()[0]
            try:
                return replica.engine.call(name, *args)
            except ReplicaLostError:
                self.wait_until_lost(replica)

    def wait_until_lost(self, replica: Replica) -> None:
        """Wait until the loss of a replica is known here. A caller may have met it earlier."""
        with self._changed:
            self._changed.wait_for(lambda: replica.is_lost, _LOSS_SECONDS)

    def choose_home(self) -> Replica:
        """Return the replica for a new training model: the one with the fewest."""
        return min(self.open(), key=lambda replica: (replica.num_models, replica.number))

    def load_base_model(self, name: str) -> None:
        """Load a base model on all replicas, at the same time. Raise UserError if its weights
        differ between replicas.
        """
        live = self.live()
        while any(name not in replica.fingerprints for replica in live):
            with ThreadPoolExecutor(len(live)) as threads:
                loads = [threads.submit(replica.load_base_model, name) for replica in live]
            for replica, load in zip(live, loads, strict=True):
                if isinstance(load.exception(), ReplicaLostError):
                    self.wait_until_lost(replica)
                else:
                    load.result()
            live = self.live()
        check_weights(name, live)
        self._base_models.add(name)

    def close(self, finish: bool) -> None:
        """Close all engines, and end their processes."""
        self.is_closing = True
        # The watch kills a replica that does not answer meanwhile.
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            for replica in self.replicas:
                threads.submit(replica.engine.close, finish)
        self._stop.set()

    def _start(self, number: int) -> Replica:
        link = self._start_link()
        # The callback needs the replica, which needs the engine.
        created: Future[Replica] = Future()
        engine = RemoteEngine(
            link,
            on_lost=lambda error: self._handle_loss(created.result(), error),
            describe_loss=self._describe_loss,
        )
        replica = Replica(number, link, engine)
        created.set_result(replica)
        return replica

    def _prepare(self, replica: Replica) -> None:
        """Load all base models on a new replica. Raise UserError if its versions, its device or its
        weights are not those of the others.
        """
        others = [r for r in self.replicas if not r.is_lost and r.number != replica.number]
        check_machines([*others, replica])
        for name in list(self._base_models):
            replica.load_base_model(name)
            check_weights(name, [*others, replica])

    def _handle_loss(self, replica: Replica, error: ReplicaLostError) -> None:
        if self.is_closing:
            return
        _log.warning("replica %d is lost: %s", replica.number, error)
        with self._changed:
            replica.num_lost_processes += not replica.is_draining
            self._changed.notify_all()
        self.on_lost(replica)
        threading.Thread(target=partial(self._replace, replica), daemon=True).start()

    def _replace(self, lost: Replica) -> None:
        """Start a new process for a lost replica."""
        self._is_started.wait()
        try:
            if self._is_replaceable(lost):
                replica = self._start_again(lost.number)
                lost.succeeded_by(replica)
                self._insert(replica)
        except Exception as error:
            if not self.is_closing:
                self._give_up(lost, str(error))
        finally:
            with self._changed:
                self._changed.notify_all()

    def _give_up(self, lost: Replica, reason: str) -> None:
        # The replica of this number that others see: `lost` may have been lost while it loaded the
        # base models, before it took the place.
        replica = self.replicas[lost.number]
        # A rejected replica is then ended, and that loss is not the reason.
        replica.failure = replica.failure or reason
        _log.error("replica %d is not started again: %s", lost.number, reason)

    def _is_replaceable(self, lost: Replica) -> bool:
        if self.is_closing or self.fault is not None:
            return False
        if lost.is_draining:
            _log.warning("replica %d is drained", lost.number)
            return False
        if not lost.has_worked and lost.num_lost_idle + 1 >= _MAX_IDLE_LOSSES:
            self._give_up(lost, f"it was lost {_MAX_IDLE_LOSSES} times before it had done any work")
            return False
        return True

    def _start_again(self, number: int) -> Replica:
        """Start a replica, several times if its process ends at its start."""
        for _ in range(_MAX_IDLE_LOSSES - 1):
            try:
                return self._start(number)
            except ReplicaLostError as error:
                _log.warning("replica %d was lost at its start: %s", number, error)
        return self._start(number)

    def _insert(self, replica: Replica) -> None:
        """Put a new replica in the place of the lost one, once it has all base models."""
        self._preparing.add(replica)
        try:
            self._prepare(replica)
        except ReplicaLostError:
            return  # Its own loss replaces it.
        except BaseException:
            replica.num_lost_idle = _MAX_IDLE_LOSSES  # it would be rejected again
            replica.link.kill()
            raise
        finally:
            self._preparing.discard(replica)
        if self.is_closing:
            replica.link.kill()
            return
        self.replicas[replica.number] = replica
        _log.warning("replica %d is started again", replica.number)

    def _run_watch(self) -> None:
        while not self._stop.wait(1.0):
            replicas = [*self.replicas, *self._preparing]
            live = [replica for replica in replicas if not replica.is_lost]
            self.fault = self.fault or self._cluster_fault()
            if self.fault is not None:
                _log.error("all replicas are given up: %s", self.fault)
                for replica in live:
                    replica.link.kill()
                return
            for replica in self._watch.tick(live):
                _log.warning(
                    "replica %d does not answer, or its engine hangs: it is given up",
                    replica.number,
                )
                replica.link.kill()


def _without_process(number: int) -> Replica:
    """Return a drained replica, which has no process."""
    link = EndedLink()
    return Replica(number, link, RemoteEngine(link), is_draining=True)
