"""One replica of a fleet, and what the fleet knows of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from planish.engine.replication import AdapterVersion, CreateVersionSampler
from planish.errors import UserError
from planish.fleet.link import EngineStatus, Event, Link, ReplicaLostError
from planish.fleet.remote_engine import RemoteEngine
from planish.processes.stall_watch import StallWatch
from planish.service import CreateSampler


@dataclass(frozen=True, eq=False)
class SharedVersion:
    """A version of an adapter that all replicas can fetch."""

    version: AdapterVersion
    handle: Any
    """The version itself, or a reference to it in an object store. Each replica fetches it once."""


@dataclass(frozen=True)
class SamplerSource:
    """What a sampler is created from: a base model, or a version of an adapter."""

    sampler_id: str
    base_model: str
    shared: SharedVersion | None = None


class EndedLink:
    """The link of a replica that has no process."""

    def request(self, name: str, *args: Any) -> Any:
        """Raise ReplicaLostError."""
        raise ReplicaLostError("the replica has no process")

    send = request

    def poll(self) -> Sequence[Event]:
        """Raise ReplicaLostError."""
        raise ReplicaLostError("the replica has no process")

    def end(self) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""


@dataclass(eq=False)
class Replica:
    """A replica, which keeps its number when its process is replaced by another one."""

    number: int
    link: Link
    engine: RemoteEngine
    """The engine of the present process. Only its results count: another process has an engine
    object and operations of its own.
    """
    status: EngineStatus = field(default_factory=EngineStatus)
    """The last sign of life."""
    num_signs: int = 0
    """The number of signs of life."""
    is_draining: bool = False
    """Whether the replica gets no new samples and no new training models."""
    is_added: bool = False
    """Whether the replica was added later, and its process is being started."""
    failure: str | None = None
    """Why the replica is lost and not started again."""
    load: int = 0
    """Unfinished sampling work in tokens."""
    num_models: int = 0
    """The number of training models whose home this replica is."""
    num_samples: int = 0
    """The number of sampling requests that this replica has answered."""
    num_micro_batches: int = 0
    """The number of micro-batches that this replica has computed for models of other replicas."""
    num_lost_processes: int = 0
    """How many processes of this number were lost. The end of a drained one is no loss."""
    num_lost_idle: int = 0
    """How many of them were lost in a row before they had done any work."""
    work_before: int = 0
    """The work of the earlier processes: samples and micro-batches."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """The fingerprints of the loaded base models."""
    _versions: set[str] = field(default_factory=set)
    _samplers: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended or was given up."""
        return self.engine.is_lost

    @property
    def has_worked(self) -> bool:
        """Whether the process has done any work."""
        return bool(self.num_models) or self._work > self.work_before

    @property
    def state(self) -> str:
        """What the replica does: "running"; "lost" until it is replaced, or "failed" if it is not;
        "draining", or "drained" when its process has ended; "starting" if it was added.
        """
        if not self.is_lost:
            return "draining" if self.is_draining else "running"
        if self.is_draining:
            return "drained"
        if self.failure is not None:
            return "failed"
        return "starting" if self.is_added else "lost"

    @property
    def _work(self) -> int:
        return self.num_samples + self.num_micro_batches

    def succeeded_by(self, successor: Replica) -> None:
        """Pass the counts of this lost replica on to the one that replaces it."""
        successor.num_samples = self.num_samples
        successor.num_micro_batches = self.num_micro_batches
        successor.num_lost_processes = self.num_lost_processes
        successor.num_lost_idle = 0 if self.has_worked else self.num_lost_idle + 1
        successor.work_before = self._work

    def load_base_model(self, name: str) -> str:
        """Load a base model, and return the fingerprint of its weights."""
        if name not in self.fingerprints:
            self.fingerprints[name] = self.engine.call("load_base_model", name)
        return self.fingerprints[name]

    def add_version(self, shared: SharedVersion) -> None:
        """Fetch a version, unless it is here."""
        with self._lock:
            if shared.version.name not in self._versions:
                self.engine.call("preparation.add_version", shared.handle)
                self._versions.add(shared.version.name)

    def drop_version(self, name: str, used: Container[str]) -> None:
        """Forget a version, unless it is among those in use again."""
        with self._lock:
            if name in self._versions and name not in used:
                self._versions.discard(name)
                self.engine.call("preparation.drop_version", name)

    def add_sampler(self, source: SamplerSource) -> None:
        """Create a sampler, unless it is here."""
        if source.shared is not None:
            self.add_version(source.shared)
        with self._lock:
            if source.sampler_id in self._samplers:
                return
            self.engine.submit(
                CreateSampler(source.sampler_id, source.base_model)
                if source.shared is None
                else CreateVersionSampler(source.sampler_id, source.shared.version.name)
            )
            self._samplers.add(source.sampler_id)

    def remove_sampler(self, sampler_id: str) -> bool:
        """Forget a sampler, and return whether it was here."""
        with self._lock:
            if sampler_id not in self._samplers:
                return False
            self._samplers.discard(sampler_id)
            return True


class Watch:
    """Finds replicas whose processes exist and do not work: those that do not answer, such as
    stopped ones, and those whose engines hang.
    """

    def __init__(
        self,
        silent_seconds: float,
        stall_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A replica is given up if it has not answered for `silent_seconds`, in which it is asked
        twelve times or once a second, or if its engine has work and has made no progress for
        `stall_seconds`.
        """
        self._new_watches = lambda: (
            StallWatch(silent_seconds, clock),
            StallWatch(stall_seconds, clock),
        )
        self._watches: WeakKeyDictionary[Replica, tuple[StallWatch, StallWatch]] = (
            WeakKeyDictionary()
        )
        self._waiting: set[Replica] = set()
        self._num_ticks = 0
        self._ticks_per_ping = max(1, int(silent_seconds // 12))

    def tick(self, replicas: list[Replica]) -> list[Replica]:
        """Ask replicas for a sign of life, and return those to give up. Call this every second."""
        self._num_ticks += 1
        return [replica for replica in replicas if self._is_given_up(replica)]

    def _is_given_up(self, replica: Replica) -> bool:
        silence, stall = self._watches.setdefault(replica, self._new_watches())
        is_given_up = silence.is_stalled(replica.num_signs)
        is_given_up |= stall.is_stalled(replica.status.progress)
        # The replicas have their turns in different seconds.
        turn = (self._num_ticks + replica.number) % self._ticks_per_ping
        if not turn and replica not in self._waiting:
            self._waiting.add(replica)
            threading.Thread(target=self._ping, args=(replica,), daemon=True).start()
        return is_given_up

    def _ping(self, replica: Replica) -> None:
        try:
            replica.status = replica.link.request("ping")
        except Exception:  # the replica is lost, which its engine finds out
            return
        replica.num_signs += 1
        self._waiting.discard(replica)


def check_weights(name: str, replicas: Sequence[Replica]) -> None:
    """Raise UserError unless the loaded base models of this name have the same weights."""
    found = {r.number: r.fingerprints[name] for r in replicas if name in r.fingerprints}
    check_same(f"the weights of base_model={name!r}", found)


def check_machines(replicas: Sequence[Replica]) -> None:
    """Raise UserError unless the known machines have the same packages and devices."""
    machines = {replica.number: getattr(replica.link, "machine", None) for replica in replicas}
    known = {number: machine for number, machine in machines.items() if machine is not None}
    check_same("the versions of packages", {n: m.versions for n, m in known.items()})
    check_same("the devices", {n: m.device for n, m in known.items()})


def check_same(what: str, found: Mapping[int, object]) -> None:
    """Raise UserError unless all replicas have the same value."""
    if len({repr(value) for value in found.values()}) > 1:
        values = "; ".join(f"replica {number}: {value}" for number, value in found.items())
        raise UserError(
            f"{what} differ between replicas, so their results would differ: {values}. Give all "
            "machines the same"
        )
