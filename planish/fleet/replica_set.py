"""The replicas of a fleet: start, choice, loss and replacement."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from planish.errors import EngineClosedError, UserError
from planish.fleet.link import Link, ReplicaLostError
from planish.fleet.remote_engine import RemoteEngine
from planish.fleet.replica import Replica, Watch, check_same
from planish.processes.background import BackgroundThread
from planish.processes.stall_watch import STALL_SECONDS
from planish.service import Operation

_log = logging.getLogger(__name__)

SILENT_SECONDS = 60.0
"""A replica that does not answer for so long is given up. Loading a large library can keep a
process from answering for seconds.
"""
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
        on_lost: Callable[[Replica], None],
        silent_seconds: float = SILENT_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Start all replicas. `start_link` starts one process. See `Watch` for the two limits.

        `describe_loss` returns the error message of an operation of a lost replica, and `on_lost`
        is called before such operations fail.
        """
        self._start_link = start_link
        self._describe_loss = describe_loss
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._num_starting = 0
        self._base_models: set[str] = set()
        self.is_closing = False
        with ThreadPoolExecutor(num_replicas) as threads:
            starts = [threads.submit(self._start, number) for number in range(num_replicas)]
        self.replicas: list[Replica] = []
        """All replicas by number. A lost replica is in the list until it is replaced."""
        try:
            self.replicas = [start.result() for start in starts]
            self._check_machines(self.replicas)
        except BaseException:
            for start in starts:
                if start.exception() is None:
                    start.result().link.kill()
            raise
        self._stop = threading.Event()
        self._watch = Watch(silent_seconds, stall_seconds)
        self._thread = BackgroundThread(self._run_watch, "planish-watch", stop=self._stop.set)

    def live(self) -> list[Replica]:
        """Return the replicas that run. Wait for a replacement if there are none."""
        with self._changed:
            while True:
                live = [replica for replica in self.replicas if not replica.is_lost]
                if live:
                    return live
                if not self._num_starting or self.is_closing:
                    raise EngineClosedError(
                        "no replica of the fleet is left; make a new ServiceClient, and load the "
                        "last checkpoint"
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
        check_same(
            f"the weights of base_model={name!r}",
            {replica.number: replica.fingerprints[name] for replica in live},
        )
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
        # The two callbacks need the replica, which needs the engine.
        created: list[Replica] = []
        engine = RemoteEngine(
            link,
            on_lost=lambda error: self._handle_loss(created, error),
            describe_loss=self._describe_loss,
        )
        created.append(Replica(number, link, engine))
        return created[0]

    def _check_machines(self, replicas: list[Replica]) -> None:
        machines = {replica.number: getattr(replica.link, "machine", None) for replica in replicas}
        known = {number: machine for number, machine in machines.items() if machine is not None}
        check_same("the versions of packages", {n: m.versions for n, m in known.items()})
        check_same("the devices", {n: m.device for n, m in known.items()})

    def _handle_loss(self, created: list[Replica], error: ReplicaLostError) -> None:
        if not created or self.is_closing:
            return
        replica = created[0]
        _log.warning("replica %d is lost: %s", replica.number, error)
        with self._changed:
            self._num_starting += 1
            self._changed.notify_all()
        self._on_lost(replica)
        threading.Thread(target=partial(self._replace, replica), daemon=True).start()

    def _replace(self, lost: Replica) -> None:
        """Start a new process for a lost replica."""
        try:
            if lost.is_draining:
                _log.warning("replica %d is drained", lost.number)
                return
            if not lost.has_worked and lost.num_idle_losses + 1 >= _MAX_IDLE_LOSSES:
                _log.error("replica %d is not replaced", lost.number)
                return
            replica = self._start(lost.number)
            lost.succeeded_by(replica)
            self._check_machines([*(r for r in self.replicas if r is not lost), replica])
            for name in list(self._base_models):
                replica.load_base_model(name)
            if self.is_closing:
                replica.link.kill()
                return
            self.replicas[lost.number] = replica
            _log.warning("replica %d is replaced", lost.number)
        except Exception as error:
            if not self.is_closing:
                _log.error("replica %d cannot be replaced: %s", lost.number, error)
        finally:
            with self._changed:
                self._num_starting -= 1
                self._changed.notify_all()

    def _run_watch(self) -> None:
        while not self._stop.wait(1.0):
            for replica in self._watch.tick([r for r in self.replicas if not r.is_lost]):
                _log.warning(
                    "replica %d does not answer, or its engine hangs: it is given up",
                    replica.number,
                )
                replica.link.kill()
