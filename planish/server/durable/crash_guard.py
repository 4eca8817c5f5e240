"""The crash guard finds a request that crashes the server repeatedly, and abandons the request, so
that all other requests can continue.

A request that exhausts the memory or crashes the process gets no answer, and therefore runs again
at each start. As long as every shutdown is clean, the guard lets every request pass. After a crash,
the next process watches its requests for an hour:

    marked     Before the engine gets a request, the database marks it as running. The answer
               removes the mark.
    suspect    A request that was marked when the server crashed. The guard counts the crashes of
               each suspect. Suspects with equal counts form a group. Only suspects of one group run
               at the same time, and at most an eighth of the group. So after several crashes each
               suspect runs alone. The server loads all base models before the first suspect, so
               that a crash during the loading of a base model is not blamed on a request.
    abandoned  A suspect that was the only running request at `_MAX_SOLE_CRASHES` of its crashes. An
               abandoned request without an answer fails. An abandoned replay or load of an adapter
               is rejected from then on.

A request is abandoned after `_MAX_SOLE_CRASHES` + 2 crashes at the earliest. Before the first
crash, the guard marks no requests. The second crash makes the request a suspect. A later crash
counts only if no other request was running. A suspect that gets an answer is no longer a suspect.
So an innocent request is abandoned only if the server crashes each time before the request is
finished.

A clean shutdown clears all records except the abandoned keys. After a clean shutdown, an abandoned
key gets one more try, because the server may have more memory at its next start.

Each piece of work is identified by a key. The key of a journaled or replayed request is its id. The
key of loading a snapshot is the model's id, and the key of loading a sampler's weights is the
sampler's id. The key of a sample that is not journaled is a digest of its content.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from planish.errors import EngineClosedError, StorageError
from planish.fleet.link import ReplicaLostError
from planish.server.durable import journal
from planish.server.durable.records import ModelRow, update_row
from planish.server.durable.store import Store, Transaction
from planish.server.results import Abandoned, Failed

_MAX_SOLE_CRASHES = 3
"""A suspect is abandoned after this many crashes during which no other request was running."""
_GROUP_DIVISOR = 8
"""Of n suspects with the same number of crashes, at most n // _GROUP_DIVISOR run at once (at least
one).
"""
_WATCH_SECONDS = 3600.0
"""How long the guard marks running requests after a crash."""

_RUNNING_KEY = "running"
"""A key in the table `meta`. The key exists while a server runs, and stays there after a crash."""

_log = logging.getLogger(__name__)


@dataclass
class _EarlierRecords:
    """The records of the earlier process, read at a start."""

    was_clean: bool
    """Whether the earlier process shut down cleanly."""
    marked_keys: list[str] = field(default_factory=list[str])
    """Keys that were running when the earlier process ended."""
    crash_counts: dict[str, int] = field(default_factory=dict[str, int])
    """The number of crashes during which each suspect was running, by key."""
    abandoned_keys: set[str] = field(default_factory=set[str])
    """Abandoned keys of replays and loads of adapters. `enter` rejects these keys. The keys of
    unanswered requests are not in this set, because these requests fail (`failed_ids`).
    """
    failed_ids: list[str] = field(default_factory=list[str])
    """The ids of unanswered requests that were abandoned and failed at this start."""


class CrashGuard:
    """Finds the request that crashes the server, and abandons it."""

    def __init__(
        self, store: Store, load_base_models: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """`load_base_models` is awaited before the first suspect runs."""
        self._store = store
        self._load_base_models = load_base_models
        self.is_active = False
        """Whether the guard may mark, delay or reject a request. Callers need not report requests
        to an inactive guard, which stays inactive until the server crashes.
        """
        self._loading: asyncio.Task[None] | None = None
        self._watched_until = 0.0
        self._crash_counts: dict[str, int] = {}
        self._max_running: dict[int, int] = {}
        """The number of suspects that may run at once, for each group (number of crashes)."""
        self._abandoned_keys: set[str] = set()
        self._running_counts: Counter[str] = Counter()
        self._marked_keys: set[str] = set()
        self._running_group = 0
        """The group of the running suspects, which all have this number of crashes. It is 0 if the
        running keys are not suspects.
        """
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @property
    def _is_watching(self) -> bool:
        return time.monotonic() < self._watched_until

    async def begin(self) -> None:
        """Check how the last process ended, and fail abandoned requests. The server must await this
        before it reads or runs any request.
        """
        try:
            earlier = await self._store.write(_count_crashes)
        except StorageError:
            return  # requests cannot be marked on a full disk either
        self._crash_counts, self._abandoned_keys = earlier.crash_counts, earlier.abandoned_keys
        self._max_running = {
            ends: max(1, n // _GROUP_DIVISOR)
            for ends, n in Counter(earlier.crash_counts.values()).items()
        }
        if not earlier.was_clean:
            self._watched_until = time.monotonic() + _WATCH_SECONDS
        self._update_is_active()
        if earlier.was_clean:
            return
        _log.warning(
            "the previous server process did not shut down cleanly; %s",
            f"its running requests were {_join_keys(earlier.marked_keys)}"
            if earlier.marked_keys
            else "its running requests are unknown; this process records its running requests",
        )
        for request_id in earlier.failed_ids:
            _log.error(
                "request %s was abandoned: in %d crashes of the server, it was the only running "
                "request",
                request_id,
                _MAX_SOLE_CRASHES,
            )

    async def end(self) -> None:
        """Record a clean shutdown."""
        with suppress(StorageError):
            await self._store.write(_clear_records)

    async def enter(self, key: str) -> None:
        """Wait until the key may run together with the running keys. Mark the key if the guard
        watches, or if the key is a suspect. Raise Abandoned for an abandoned key.
        """
        self._update_is_active()
        if not self.is_active:
            return
        if key in self._abandoned_keys:
            raise Abandoned(
                f"{_crash_message(key)}, so the server does not run it again: the server lacks "
                "memory or another resource for it. Continue with a new client from a checkpoint, "
                "or ask the server's operator for more memory"
            )
        if key in self._crash_counts:
            self._loading = self._loading or asyncio.create_task(self._load_base_models())
            await asyncio.shield(self._loading)
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((key, admitted))
        self._admit_waiting()
        try:
            await admitted
            if self._is_watching or key in self._crash_counts:
                self._marked_keys.add(key)
                with suppress(
                    StorageError
                ):  # a full disk must not prevent the request from running
                    await self._store.write(_mark, key)
        except BaseException:
            if admitted.done() and not admitted.cancelled():
                self.pause(key)
            self._admit_waiting()
            raise

    def leave(self, key: str) -> None:
        """Note that the request of a key was answered. This does nothing if the key is not
        running.
        """
        if self._remove_running(key):
            self._crash_counts.pop(key, None)
            self._store.write_in_background(_forget, key)
            self._update_is_active()
        self._admit_waiting()

    def pause(self, key: str) -> None:
        """Note that a key is not running at the moment, but will run again."""
        if self._remove_running(key):
            self._store.write_in_background(_unmark, key)
        self._admit_waiting()

    @asynccontextmanager
    async def running(self, key: str) -> AsyncGenerator[None]:
        """Call `enter` before the block and `leave` after it. If the engine fails in the block, the
        key stays marked, because it may be the cause.
        """
        await self.enter(key)
        try:
            yield
        except ReplicaLostError:  # the caller runs it again
            self.pause(key)
            raise
        except EngineClosedError:
            raise
        except BaseException:
            self.leave(key)
            raise
        self.leave(key)

    @asynccontextmanager
    async def reading(self, key: str) -> AsyncGenerator[None]:
        """Call `enter` before the block and `pause` after it. Use this for a block that decodes a
        request but does not answer the request.
        """
        await self.enter(key)
        try:
            yield
        finally:
            self.pause(key)

    def _update_is_active(self) -> None:
        """Update `is_active`."""
        self.is_active = bool(self._crash_counts or self._abandoned_keys or self._is_watching)

    def _remove_running(self, key: str) -> bool:
        """Remove a key from the running keys. Return whether its mark must be removed."""
        if key not in self._running_counts:
            return False
        self._running_counts[key] -= 1
        if self._running_counts[key]:
            return False
        del self._running_counts[key]
        is_marked = key in self._marked_keys
        self._marked_keys.discard(key)
        return is_marked

    def _admit_waiting(self) -> None:
        """Admit keys in the order of their arrival, so that no key waits forever."""
        while self._waiting:
            key, admitted = self._waiting[0]
            if not admitted.done():
                if not self._may_run(key):
                    return
                self._running_group = self._crash_counts.get(key, 0)
                self._running_counts[key] += 1
                admitted.set_result(None)
            self._waiting.popleft()

    def _may_run(self, key: str) -> bool:
        group = self._crash_counts.get(key, 0)
        if not self._running_counts:
            return True
        return group == self._running_group and (
            not group or self._running_counts.total() < self._max_running[group]
        )


# Transactions.


def _count_crashes(transaction: Transaction) -> _EarlierRecords:
    was_running = transaction.execute("DELETE FROM meta WHERE key = ?", (_RUNNING_KEY,)).rowcount
    transaction.execute("INSERT INTO meta VALUES (?, x'')", (_RUNNING_KEY,))
    earlier = _EarlierRecords(was_clean=not was_running)
    earlier.marked_keys = [
        row[0] for row in transaction.execute("SELECT id FROM crash_guard WHERE is_marked")
    ]
    transaction.execute(
        "UPDATE crash_guard SET is_marked = 0, crashes = crashes + 1, "
        "sole_crashes = sole_crashes + (crashes > 0 AND ?) WHERE is_marked",
        (len(earlier.marked_keys) == 1,),
    )
    transaction.execute("DELETE FROM crash_guard WHERE crashes = 0")
    for key, crashes, sole_crashes in transaction.execute(
        "SELECT id, crashes, sole_crashes FROM crash_guard"
    ).fetchall():
        if sole_crashes < _MAX_SOLE_CRASHES:
            earlier.crash_counts[key] = crashes
        elif _fail_request(transaction, key):
            earlier.failed_ids.append(key)
            _forget(transaction, key)
        else:
            earlier.abandoned_keys.add(key)
    return earlier


def _fail_request(transaction: Transaction, request_id: str) -> bool:
    """Fail an abandoned request. Return False if the key is not the id of an unanswered request."""
    row = journal.request_row(transaction, request_id)
    if row is None or not row.is_unanswered:
        return False
    message = (
        f"{_crash_message(request_id)}, so the server does not run it again: the request needs "
        "more memory than the server has, or crashes it. Send less data in one request (fewer or "
        "shorter sequences), or ask the server's operator for more memory"
    )
    now = time.time()
    journal.write_answer(transaction, row.with_state("failed"), Failed(message, "server"), now)
    if row.kind in ("create_model", "load_weights") and row.seq == 0:
        update_row(
            transaction, ModelRow, row.owner, closed=f"the model could not be created ({message})"
        )
        journal.drop_bodies(transaction, "owner = ?", [row.owner])
    return True


def _mark(transaction: Transaction, key: str) -> None:
    transaction.execute(
        "INSERT INTO crash_guard VALUES (?, 1, 0, 0) ON CONFLICT (id) DO UPDATE SET is_marked = 1",
        (key,),
    )


def _unmark(transaction: Transaction, key: str) -> None:
    transaction.execute("UPDATE crash_guard SET is_marked = 0 WHERE id = ?", (key,))


def _forget(transaction: Transaction, key: str) -> None:
    transaction.execute("DELETE FROM crash_guard WHERE id = ?", (key,))


def _clear_records(transaction: Transaction) -> None:
    transaction.execute("DELETE FROM meta WHERE key = ?", (_RUNNING_KEY,))
    transaction.execute("DELETE FROM crash_guard WHERE sole_crashes < ?", (_MAX_SOLE_CRASHES,))
    transaction.execute(
        "UPDATE crash_guard SET is_marked = 0, sole_crashes = ?", (_MAX_SOLE_CRASHES - 1,)
    )


def _crash_message(key: str) -> str:
    return f"the server crashed {_MAX_SOLE_CRASHES} times while it ran {key} and nothing else"


def _join_keys(keys: list[str]) -> str:
    shown = ", ".join(keys[:20])
    return shown if len(keys) <= 20 else f"{shown} and {len(keys) - 20} more"
