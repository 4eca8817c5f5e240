"""The data directory: an SQLite database, and a file for each large body beside it.

One thread writes. It makes all waiting changes in one transaction and syncs once, so many requests
that arrive together cost one sync. A change is a function that gets the transaction. The store
makes a change completely or not at all. If a change raises, the other changes are still made.

A body of 256 KiB or more is stored in its own file, because SQLite would write such a large row
twice: to its log and then to the database. The file is synced before the transaction that names
the file. The next start removes files that no row names.

If the disk or the memory is full, `write` raises StorageError, and `write_with_retries` retries
until it succeeds. If a read or a write meets a damaged part of the database, `read` and `write`
raise StorageError and `write_with_retries` retries. The store never repairs or replaces a damaged
part.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from planish.errors import DamagedFileError, StorageError
from planish.files import sync
from planish.server.durable.crash_points import crash_point
from planish.server.durable.database import BODIES, DATABASE, Database, is_disk_or_memory_error
from planish.server.durable.schema import VERSION
from planish.server.metrics import DiskUsage
from planish.server.results import OUT_OF_MEMORY

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)

_MIN_FILE_BYTES = 1 << 18
_MAX_GROUPED_CHANGES = 512
_RETRY_SECONDS = 0.5
_NUM_READERS = 2


@dataclass(frozen=True)
class StoredBody:
    """The place of a body: in its row (`inline`), or in a file with the name `file`."""

    inline: bytes | None
    file: str | None = None


class Transaction:
    """One database transaction, with files for large bodies. Only the writing thread uses it."""

    def __init__(self, connection: sqlite3.Connection, bodies: Path) -> None:
        """`bodies` is the directory for the files of large bodies."""
        self._connection = connection
        self._bodies = bodies
        self.written_files: list[str] = []
        """Names of the files that were written in this transaction."""
        self.dropped_files: list[str] = []
        """Names of the files to be deleted after the commit."""

    def execute(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        """Run one SQL statement."""
        return self._connection.execute(sql, values)

    def store_body(self, body: bytes) -> StoredBody:
        """Store a body, and return its place. A large body is written to a file and synced."""
        if len(body) < _MIN_FILE_BYTES:
            return StoredBody(body)
        name = secrets.token_hex(16)
        self.written_files.append(name)
        with open(self._bodies / name, "xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        return StoredBody(None, name)

    def drop_file(self, file: str | None) -> None:
        """Delete a body's file after the transaction is committed. Do nothing if `file` is None."""
        if file is not None:
            self.dropped_files.append(file)

    def free_pages(self, pages: int) -> None:
        """Return up to `pages` free pages of the database to the file system."""
        free = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
        for _ in range(min(pages, free)):
            # Each step of the statement frees one page.
            self._connection.execute("PRAGMA incremental_vacuum(1)")

    def remove_files(self, names: list[str]) -> None:
        """Delete the files of bodies that have these names."""
        for name in names:
            (self._bodies / name).unlink(missing_ok=True)


@dataclass
class _Change(Generic[R]):
    apply: Callable[[Transaction], R]
    future: Future[R]
    retries: bool
    result: R | None = None
    error: Exception | None = None


class Store:
    """One data directory, locked by this process until `close`."""

    def __init__(self, directory: Path) -> None:
        """Open and lock the directory.

        Raise UserError if another process uses it, or if its database has another version. Raise
        DamagedFileError if the database is damaged, or missing while other files of a server exist.
        Raise StorageError if the disk refuses access.
        """
        self._database = Database(directory)
        self.directory = directory
        self._connection = self._database.connection
        self._local = threading.local()
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="planish-store-read")
        try:
            self._connect_readers()
            self._remove_orphans()
            sync(directory)
        except (OSError, sqlite3.DatabaseError) as error:
            self._release()
            raise self._database.error_for_operator(error) from error
        except BaseException:
            self._release()
            raise
        self._queue: SimpleQueue[_Change[Any] | None] = SimpleQueue()
        self.is_failing = False
        """Whether the last transaction failed because of the disk or memory. While True, every
        transaction writes at least the database version, to test whether writes work again.
        """
        self.lacks_memory = False
        """Whether the last transaction failed because memory ran out."""
        self._doubtful: list[str] = []
        """Files of bodies whose transaction failed in COMMIT. SQLite's log may contain the whole
        transaction, and after a crash SQLite would complete it. The next transaction replaces it
        in the log, and only then the files may be removed.
        """
        self._thread = threading.Thread(target=self._run, name="planish-store", daemon=True)
        self._thread.start()

    def write(
        self, change: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[R]:
        """Call `change` with a transaction and the arguments. Return its result when the change is
        on disk. Raise StorageError if the disk refused the write; then nothing has changed.
        """
        return asyncio.wrap_future(self._enqueue(change, False, args, kwargs))

    def write_with_retries(
        self, change: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[R]:
        """Do the same as `write`, but retry until the disk accepts the change. Changes of several
        calls are made in the order of the calls.
        """
        return asyncio.wrap_future(self._enqueue(change, True, args, kwargs))

    def write_in_background(
        self, change: Callable[Concatenate[Transaction, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Do the same as `write_with_retries`, but return at once, even if the disk is full. A
        crash can lose the change, so use this only for changes that the next start can make again.
        """
        future = self.write_with_retries(change, *args, **kwargs)
        # asyncio would log an exception that is never read. So read it here.
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def read(
        self,
        query: Callable[Concatenate[sqlite3.Connection, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call `query` in a thread, with a read-only connection and the arguments. Raise
        StorageError if the disk refuses the read or the database is damaged.
        """

        def run_query() -> R:
            try:
                return query(self._reader(), *args, **kwargs)
            except FileNotFoundError:
                raise
            except (OSError, MemoryError, sqlite3.DatabaseError) as error:
                if not is_disk_or_memory_error(error):
                    raise
                refusal = self._database.error_for_operator(error)
                _log.error("a read failed: %s", refusal)
                raise _error_for_client(refusal) from error

        return await asyncio.get_running_loop().run_in_executor(self._readers, run_query)

    def read_body(self, stored: StoredBody) -> bytes:
        """Return the content of a stored body. This reads the disk, so call it in `read` or in a
        thread. Raise FileNotFoundError if the file is missing.
        """
        if stored.file is None:
            assert stored.inline is not None
            return stored.inline
        return (self.directory / BODIES / stored.file).read_bytes()

    def disk_usage(self) -> DiskUsage:
        """Return the disk space of the directory. This reads the disk, so call it in a thread."""
        database = sum(path.stat().st_size for path in self.directory.glob(DATABASE + "*"))
        sizes: list[int] = []
        with suppress(FileNotFoundError):  # the directory was moved away
            for entry in os.scandir(self.directory / BODIES):
                with suppress(FileNotFoundError):  # the file was removed meanwhile
                    sizes.append(entry.stat().st_size)
        return DiskUsage(database, sum(sizes), len(sizes), self.free_bytes())

    def free_bytes(self) -> int:
        """Return the free space of the disk in bytes; 0 if the directory was moved away."""
        try:
            return shutil.disk_usage(self.directory).free
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Write all waiting changes, close the database, and unlock the directory."""
        self._queue.put(None)
        self._thread.join()
        self._release()

    def _release(self) -> None:
        self._readers.shutdown()
        self._database.close()

    def _connect_readers(self) -> None:
        """Open the connection of every reading thread now. An open connection still works if the
        directory is moved away later.
        """
        # At the barrier, each call waits for the other calls, so no thread can run two calls.
        all_waiting = threading.Barrier(_NUM_READERS)

        def connect() -> None:
            all_waiting.wait(timeout=60)
            self._reader()

        for connected in [self._readers.submit(connect) for _ in range(_NUM_READERS)]:
            connected.result()

    def _reader(self) -> sqlite3.Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = self._database.connect()
            self._local.connection.execute("PRAGMA query_only = 1")
        return self._local.connection

    def _remove_orphans(self) -> None:
        rows = self._connection.execute(
            "SELECT body_file FROM requests WHERE body_file IS NOT NULL "
            "UNION SELECT result_file FROM requests WHERE result_file IS NOT NULL"
        )
        referenced = {row[0] for row in rows}
        for path in (self.directory / BODIES).iterdir():
            if path.name not in referenced:
                path.unlink()

    def _enqueue(
        self, change: Callable[..., R], retries: bool, args: Any, kwargs: Mapping[str, Any]
    ) -> Future[R]:
        future: Future[R] = Future()
        self._queue.put(_Change(lambda opened: change(opened, *args, **kwargs), future, retries))
        return future

    # The writing thread.

    def _run(self) -> None:
        waiting: list[_Change[Any]] = []
        closing = False
        while not closing or waiting:
            closing = self._receive(waiting) or closing
            error = self._commit(waiting)
            self._log_failure_or_recovery(error)
            self.lacks_memory = str(error) == OUT_OF_MEMORY
            self.is_failing = error is not None
            if error is None:
                done, waiting = waiting, []
                _resolve_futures(done)
            else:
                refused = [change for change in waiting if closing or not change.retries]
                waiting = [] if closing else [change for change in waiting if change.retries]
                for change in refused:
                    change.error = _error_for_client(error)
                _resolve_futures(refused)

    def _log_failure_or_recovery(self, error: Exception | None) -> None:
        """Log once that writes fail, and log once that writes work again."""
        if error is not None and not self.is_failing:
            _log.error("no new work is accepted until this is fixed: %s", error)
        elif error is None and self.is_failing:
            _log.warning("%s can be written to again", self.directory)

    def _receive(self, waiting: list[_Change[Any]]) -> bool:
        """Add the queued changes to `waiting`. Return whether the store is being closed."""
        try:
            # After a failed write, wake up soon to test whether the disk works again.
            item = self._queue.get(timeout=_RETRY_SECONDS if waiting or self.is_failing else None)
            while item is not None:
                waiting.append(item)
                if len(waiting) >= _MAX_GROUPED_CHANGES:
                    return False
                item = self._queue.get_nowait()
        except Empty:
            return False
        return True

    def _commit(self, changes: list[_Change[Any]]) -> Exception | None:
        """Make the changes in one transaction. If the disk refuses the transaction, make no change
        and return the error.
        """
        # Do not write bodies again and again while no transaction can be committed.
        if self._doubtful and changes and (refusal := self._commit([])) is not None:
            return refusal
        transaction = Transaction(self._connection, self.directory / BODIES)
        is_committing = False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for change in changes:
                self._apply(change, transaction)
            if self.is_failing:  # a transaction without a write would always succeed
                transaction.execute(f"PRAGMA user_version = {VERSION}")
            if transaction.written_files:
                sync(self.directory / BODIES)
                crash_point("bodies written")
            crash_point("before commit")
            is_committing = True
            self._connection.execute("COMMIT")
        except Exception as error:
            # Catch every error, because the thread must survive and the callers must get an answer.
            with suppress(sqlite3.Error):
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            if is_committing:
                self._doubtful += transaction.written_files
            else:
                with suppress(OSError):
                    transaction.remove_files(transaction.written_files)
            return self._database.error_for_operator(error)
        crash_point("after commit")
        dropped, self._doubtful = [*transaction.dropped_files, *self._doubtful], []
        with suppress(OSError):  # the next start removes a file that stays
            transaction.remove_files(dropped)
        return None

    def _apply(self, change: _Change[Any], transaction: Transaction) -> None:
        self._connection.execute("SAVEPOINT change")
        num_written, num_dropped = len(transaction.written_files), len(transaction.dropped_files)
        change.result, change.error = None, None
        try:
            change.result = change.apply(transaction)
        except Exception as error:
            # Fail the whole transaction if the disk or the memory did not suffice. `_run` then
            # repeats the changes of `write_with_retries` in their order.
            if is_disk_or_memory_error(error):
                raise
            change.error = error
            self._connection.execute("ROLLBACK TO change")
            transaction.remove_files(transaction.written_files[num_written:])
            del transaction.written_files[num_written:], transaction.dropped_files[num_dropped:]
        self._connection.execute("RELEASE change")


def _error_for_client(refusal: Exception) -> StorageError:
    """Return the error to send to clients. It does not name the server's directories; the log has
    the details.
    """
    if isinstance(refusal, DamagedFileError):
        return StorageError(
            "the server's database is damaged; its log tells the operator what to do"
        )
    if str(refusal) == OUT_OF_MEMORY:
        return StorageError(OUT_OF_MEMORY)
    return StorageError(
        "the server's disk is full or cannot be used; its log tells the operator what to do"
    )


def _resolve_futures(changes: list[_Change[Any]]) -> None:
    for change in changes:
        if not change.future.set_running_or_notify_cancel():
            continue
        if change.error is not None:
            change.future.set_exception(change.error)
        else:
            change.future.set_result(change.result)
