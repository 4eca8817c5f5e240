"""A queue of operations that free models and samplers.

Finalizers of clients submit such operations. A finalizer may run in any thread, while any lock is
held, so it must neither wait nor take a lock.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from planish.fleet.futures import copy_outcome
from planish.processes.background import BackgroundThread
from planish.service import Operation

_Item = tuple[Operation[Any], Future[Any]] | None


class _Owner(Protocol):
    def run_release(self, operation: Operation[Any]) -> Future[Any]: ...


class ReleaseQueue:
    """Runs releases in a thread of its own."""

    def __init__(self, owner: _Owner) -> None:
        """`owner.run_release` submits a release. The queue keeps no reference to `owner`."""
        self._items: SimpleQueue[_Item] = SimpleQueue()
        BackgroundThread(
            partial(_run, self._items, weakref.ref(owner)), "planish-release", stop=self.stop
        )

    def put(self, operation: Operation[Any]) -> Future[Any]:
        """Queue a release, and return its future."""
        future: Future[Any] = Future()
        self._items.put((operation, future))
        return future

    def stop(self) -> None:
        """End the thread, without waiting."""
        self._items.put(None)


def _run(items: SimpleQueue[_Item], owner_ref: Callable[[], _Owner | None]) -> None:
    while (item := items.get()) is not None:
        owner = owner_ref()
        if owner is None:
            return
        operation, future = item
        try:
            source = owner.run_release(operation)
        except Exception as error:
            future.set_exception(error)
        else:
            source.add_done_callback(partial(copy_outcome, target=future))
        del owner, item
