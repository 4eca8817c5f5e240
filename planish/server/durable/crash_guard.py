"""What was under way when the server ended: how a request that ends it is found, and given up, so
that all others go on.

A request that takes all memory, or crashes the process, was answered by nobody, and so is done
again at each start. Nothing is asked of a server that ends in order. One that comes up after
another end watches for a while:

    mark      before the engine gets a request, that it is under way is written down; its answer
              takes that back
    suspect   was marked when the server ended. Suspects are done apart from all else, an eighth of
              those that ended together at a time,
              at last one by one, and after all base models are in memory, so that loading them is no request's fault
    given up  was a suspect, and the only one under way, at `_ENDS_ALONE` ends. A request that was
              not answered fails. What can only be
              done again, a model that comes back or an adapter that is loaded, is refused from then on

So a request is given up after two ends more than those: the first, at which nothing was marked, and
the one that made it a suspect. An end at random hits the same request each time only if the server
lives shorter than that request takes. A request that is answered is no suspect any more, and a stop
in order forgets everything but what was given up, which has one try then: there may be more memory.

Beside journaled requests, these are under way by a key: a request that is done again by its own, a
model's snapshot by the model's id, a sampler's weights by the sampler's, a draw that is not
journaled by what is drawn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from planish.errors import EngineClosedError, StorageError
from planish.server.durable import journal
from planish.server.durable.records import ModelRow, change
from planish.server.durable.store import Store, Transaction
from planish.server.results import Abandoned, Failed

_ENDS_ALONE = 3
_GROUPS = 8
_WATCH_SECONDS = 3600.0
"""Of the life of a server that came up after another one did not stop in order."""

_RUNNING = "running"
"""The key in `meta` that is there while a server runs."""

_log = logging.getLogger(__name__)


@dataclass
class _LookBack:
    """What an earlier process left."""

    was_stopped: bool
    marked: list[str] = field(default_factory=list)
    """Under way at its end."""
    suspects: dict[str, int] = field(default_factory=dict)
    """With the number of ends that each was under way at."""
    given_up: set[str] = field(default_factory=set)
    """Those that can still be asked for."""
    failed: list[str] = field(default_factory=list)
    """RequestLog that were given up now."""


class CrashGuard:
    def __init__(self, store: Store, prepare: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`prepare` is awaited before the first suspect is done: what every request needs."""
        self._store = store
        self._prepare = prepare
        self._preparing: asyncio.Task[None] | None = None
        self._watched_until = 0.0
        self._suspects: dict[str, int] = {}
        self._widths: dict[int, int] = {}
        """How many suspects of so many ends are done at once."""
        self._given_up: set[str] = set()
        self._running: Counter[str] = Counter()
        self._marked: set[str] = set()
        self._level = 0
        """Of those that run: their number of ends, which is the same for all."""
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @property
    def is_calm(self) -> bool:
        """Whether no key means anything."""
        return not (self._suspects or self._given_up or self._is_watching)

    @property
    def _is_watching(self) -> bool:
        return time.monotonic() < self._watched_until

    async def begin(self) -> None:
        """Before anything is read or done: look at how the last process ended, and fail the request
        that ended it.
        """
        try:
            found = await self._store.write(_look_back)
        except StorageError:
            return  # nothing can be marked either while the disk is full
        self._suspects, self._given_up = found.suspects, found.given_up
        self._widths = {
            ends: max(1, n // _GROUPS) for ends, n in Counter(found.suspects.values()).items()
        }
        if found.was_stopped:
            return
        self._watched_until = time.monotonic() + _WATCH_SECONDS
        _log.warning(
            "the server before this one did not stop in order; %s",
            f"under way were {_listed(found.marked)}"
            if found.marked
            else "what was under way is not known, and is written down from now on",
        )
        for request_id in found.failed:
            _log.error(
                "%s was given up: it was alone under way when the server ended, %d times",
                request_id,
                _ENDS_ALONE,
            )

    async def end(self) -> None:
        """The server stops in order."""
        with suppress(StorageError):
            await self._store.write(_stopped)

    async def enter(self, key: str) -> None:
        """Wait until it may be under way beside what is, and write down that it is. Abandoned if it
        was given up.
        """
        if key in self._given_up:
            raise Abandoned(
                f"{_ended(key)}, and is not tried again: the server's memory, or what else it needs, does not suffice. Go on with a new client "
                "from a checkpoint, or ask whoever runs the server to start it with more"
            )
        if key in self._suspects:
            self._preparing = self._preparing or asyncio.create_task(self._prepare())
            await asyncio.shield(self._preparing)
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((key, admitted))
        self._admit()
        try:
            await admitted
            if self._is_watching or key in self._suspects:
                self._marked.add(key)
                with suppress(StorageError):  # a full disk keeps nothing from being done
                    await self._store.write(lambda transaction: _mark(transaction, key))
        except BaseException:
            if admitted.done() and not admitted.cancelled():
                self.pause(key)
            self._admit()
            raise

    def leave(self, key: str) -> None:
        """It was answered. Nothing, if it is not under way."""
        if self._left(key):
            self._suspects.pop(key, None)
            self._written(self._store.keep(lambda transaction: _forget(transaction, key)))
        self._admit()

    def pause(self, key: str) -> None:
        """It is not under way now, and will be again."""
        if self._left(key):
            self._written(self._store.keep(lambda transaction: _unmark(transaction, key)))
        self._admit()

    @asynccontextmanager
    async def doing(self, key: str) -> AsyncIterator[None]:
        """`enter`, and `leave` unless the engine ended, which may be its doing."""
        await self.enter(key)
        try:
            yield
        except EngineClosedError:
            raise
        except BaseException:
            self.leave(key)
            raise
        self.leave(key)

    @asynccontextmanager
    async def reading(self, key: str) -> AsyncIterator[None]:
        """A part of doing it, after which it is not answered."""
        await self.enter(key)
        try:
            yield
        finally:
            self.pause(key)

    def _left(self, key: str) -> bool:
        """Take it from those that run; whether its mark is to go."""
        if key not in self._running:
            return False
        self._running[key] -= 1
        if self._running[key]:
            return False
        del self._running[key]
        is_marked = key in self._marked
        self._marked.discard(key)
        return is_marked

    def _admit(self) -> None:
        """In the order in which they came, so that nobody waits for ever."""
        while self._waiting:
            key, admitted = self._waiting[0]
            if not admitted.done():
                if not self._has_room(key):
                    return
                self._level = self._suspects.get(key, 0)
                self._running[key] += 1
                admitted.set_result(None)
            self._waiting.popleft()

    def _has_room(self, key: str) -> bool:
        level = self._suspects.get(key, 0)
        if not self._running:
            return True
        return level == self._level and (not level or self._running.total() < self._widths[level])

    def _written(self, change: asyncio.Future[None]) -> None:
        # the end of the process
        change.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


# Changes of the table.


def _look_back(transaction: Transaction) -> _LookBack:
    left = transaction.execute("DELETE FROM meta WHERE key = ?", (_RUNNING,)).rowcount
    transaction.execute("INSERT INTO meta VALUES (?, x'')", (_RUNNING,))
    found = _LookBack(was_stopped=not left)
    found.marked = [
        row[0] for row in transaction.execute("SELECT id FROM under_way WHERE is_marked")
    ]
    transaction.execute(
        "UPDATE under_way SET is_marked = 0, ends = ends + 1, ends_alone = ends_alone + (ends > 0 AND ?) WHERE is_marked",
        (len(found.marked) == 1,),
    )
    transaction.execute("DELETE FROM under_way WHERE ends = 0")
    for key, ends, ends_alone in transaction.execute(
        "SELECT id, ends, ends_alone FROM under_way"
    ).fetchall():
        if ends_alone < _ENDS_ALONE:
            found.suspects[key] = ends
        elif _fail(transaction, key):
            found.failed.append(key)
            _forget(transaction, key)
        else:
            found.given_up.add(key)
    return found


def _fail(transaction: Transaction, request_id: str) -> bool:
    """Answer a request that was given up; False if it was answered before, or is none."""
    row = journal.row(transaction, request_id)
    if row is None or not row.is_to_do:
        return False
    message = (
        f"{_ended(request_id)}: it took all of the server's memory, or crashed it. It was not done. Send less data in one request (fewer or "
        "shorter sequences), or ask whoever runs the server for more memory"
    )
    now = time.time()
    journal.finish(transaction, row.with_state("failed"), Failed(message, "server"), now)
    if row.kind in ("create_model", "load_weights") and row.seq == 0:
        change(transaction, ModelRow, row.owner, closed=f"it could not be created ({message})")
        journal.drop_bodies(transaction, "owner = ?", [row.owner])
    return True


def _mark(transaction: Transaction, key: str) -> None:
    transaction.execute(
        "INSERT INTO under_way VALUES (?, 1, 0, 0) ON CONFLICT (id) DO UPDATE SET is_marked = 1",
        (key,),
    )


def _unmark(transaction: Transaction, key: str) -> None:
    transaction.execute("UPDATE under_way SET is_marked = 0 WHERE id = ?", (key,))


def _forget(transaction: Transaction, key: str) -> None:
    transaction.execute("DELETE FROM under_way WHERE id = ?", (key,))


def _stopped(transaction: Transaction) -> None:
    transaction.execute("DELETE FROM meta WHERE key = ?", (_RUNNING,))
    transaction.execute("DELETE FROM under_way WHERE ends_alone < ?", (_ENDS_ALONE,))
    transaction.execute("UPDATE under_way SET is_marked = 0, ends_alone = ?", (_ENDS_ALONE - 1,))


def _ended(key: str) -> str:
    return f"the server ended {_ENDS_ALONE} times while it did {key} and nothing else"


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:20])
    return shown if len(keys) <= 20 else f"{shown} and {len(keys) - 20} more"
