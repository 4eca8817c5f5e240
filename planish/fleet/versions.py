"""The versions of adapters that the replicas of a fleet share."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from planish.engine.replication import AdapterVersion
from planish.fleet.replica import SharedVersion
from planish.fleet.replica_set import ReplicaSet


class SharedVersions:
    """The versions that models and samplers of a fleet use. Each is stored until its last use."""

    def __init__(
        self, put: Callable[[AdapterVersion], Any], replicas: ReplicaSet, threads: Executor
    ) -> None:
        """`put` stores a version, and returns what the replicas get in its place. `threads` tell
        the replicas to drop a version.
        """
        self._put, self._replicas, self._threads = put, replicas, threads
        self._stored: dict[str, SharedVersion] = {}
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()

    def share(self, version: AdapterVersion) -> SharedVersion:
        """Store a version for all replicas, unless it is stored, and count one more use."""
        with self._lock:
            shared = self._stored.get(version.name)
            if shared is None:
                shared = SharedVersion(version, self._put(version))
                self._stored[version.name] = shared
            self._uses[version.name] += 1
            return shared

    def drop(self, shared: SharedVersion) -> None:
        """Count one use less, and forget the version after the last one."""
        name = shared.version.name
        with self._lock:
            self._uses[name] -= 1
            if self._uses[name]:
                return
            del self._uses[name], self._stored[name]
        for replica in self._replicas.replicas:
            if not replica.is_lost and not self._replicas.is_closing:
                self._threads.submit(replica.drop_version, name, self._stored)


class CurrentVersion:
    """The present weights of a model, which are exported once while they do not change."""

    def __init__(self, versions: SharedVersions) -> None:
        self._versions = versions
        self._exported: Future[SharedVersion] | None = None

    def get(self, export: Callable[[], Future[AdapterVersion]]) -> Future[SharedVersion]:
        """Return the weights. `export` is called unless they were exported."""
        exported = self._exported
        if exported is None or (exported.done() and exported.exception() is not None):
            self._exported = exported = Future()

            def finish(source: Future[AdapterVersion]) -> None:
                try:
                    exported.set_result(self._versions.share(source.result()))
                except BaseException as error:
                    exported.set_exception(error)

            export().add_done_callback(finish)
        return exported

    def forget(self) -> None:
        """Drop the use of the exported weights, because the model changes or is lost."""
        exported, self._exported = self._exported, None
        if exported is not None:
            exported.add_done_callback(self._drop)

    def _drop(self, exported: Future[SharedVersion]) -> None:
        if exported.exception() is None:
            self._versions.drop(exported.result())
