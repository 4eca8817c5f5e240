"""One replica of a fleet, and what the fleet knows of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planish.engine.replication import AdapterVersion, CreateVersionSampler
from planish.errors import UserError
from planish.fleet.link import Link
from planish.fleet.remote_engine import RemoteEngine
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


@dataclass(eq=False)
class Replica:
    """A replica, which keeps its number when its process is replaced by another one."""

    number: int
    link: Link
    engine: RemoteEngine
    """The engine of the present process. Only its results count: another process has an engine object
    and operations of its own.
    """
    load: int = 0
    """Unfinished sampling work in tokens."""
    num_models: int = 0
    """The number of training models whose home this replica is."""
    num_samples: int = 0
    """The number of sampling requests that this replica has answered."""
    num_micro_batches: int = 0
    """The number of micro-batches that this replica has computed for models of other replicas."""
    num_idle_losses: int = 0
    """How many processes of this number were lost in a row before they had done any work."""
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
        return bool(self.num_models or self.num_samples or self.num_micro_batches)

    def load_base_model(self, name: str) -> str:
        """Load a base model, and return the fingerprint of its weights."""
        if name not in self.fingerprints:
            self.fingerprints[name] = self.engine.call("load_base_model", name)
        return self.fingerprints[name]

    def add_version(self, shared: SharedVersion) -> None:
        """Fetch a version, unless it is here."""
        with self._lock:
            if shared.version.name not in self._versions:
                self.engine.request("add_version", shared.handle)
                self._versions.add(shared.version.name)

    def drop_version(self, name: str) -> None:
        """Forget a version."""
        with self._lock:
            if name in self._versions:
                self._versions.discard(name)
                self.engine.call("drop_version", name)

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
    """Finds replicas that do not answer, although their processes exist, such as stopped ones."""

    _MAX_TICK_SECONDS = 5.0

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A replica that has not answered for `limit_seconds` is lost."""
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._last_tick = clock()
        self._silent_seconds: dict[Replica, float] = {}
        self._waiting: set[Replica] = set()

    def tick(self, replicas: list[Replica]) -> list[Replica]:
        """Ask all replicas for a sign of life, and return those that are silent for too long. Call
        this every second.
        """
        now = self._clock()
        # If this process itself was stopped, the replicas had no chance to answer.
        elapsed, self._last_tick = min(now - self._last_tick, self._MAX_TICK_SECONDS), now
        silent = []
        for replica in replicas:
            if replica in self._waiting:
                self._silent_seconds[replica] = self._silent_seconds.get(replica, 0.0) + elapsed
                if self._silent_seconds[replica] >= self._limit_seconds:
                    silent.append(replica)
            else:
                self._silent_seconds.pop(replica, None)
                self._waiting.add(replica)
                threading.Thread(target=self._ping, args=(replica,), daemon=True).start()
        return silent

    def _ping(self, replica: Replica) -> None:
        try:
            replica.link.request("ping")
        except Exception:  # the replica is lost, which its engine finds out
            return
        self._waiting.discard(replica)


def check_same(what: str, found: dict[int, object]) -> None:
    """Raise UserError unless all replicas have the same value."""
    if len({repr(value) for value in found.values()}) > 1:
        values = "; ".join(f"replica {number}: {value}" for number, value in found.items())
        raise UserError(
            f"{what} differ between replicas, so their results would differ: {values}. Give all "
            "machines the same"
        )
