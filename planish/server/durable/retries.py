"""Repeats work that a disk fault interrupted, so that it does not fail any accepted request.

`retry_briefly` covers short faults: it repeats a single read or load for about 4 seconds. Beyond
that, `DiskFaults.retry_until_fixed` repeats the work of one model or sampler until the disk works
again. Only errors that another disk, more space or more open files would prevent are repeated for
that long.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from typing import TypeVar

from planish.errors import EngineClosedError, is_out_of_memory

R = TypeVar("R")

_log = logging.getLogger(__name__)

_PAUSES = (0.2, 0.5, 1.0, 2.0)
"""The pauses between the attempts, in seconds."""
_LONG_PAUSES = (5.0, 10.0, 20.0, 40.0, 60.0)
"""The pauses while a fault lasts, in seconds. The last one repeats."""
_LASTING_ERRNOS = {
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV, errno.ENXIO),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE),
}
_LASTING_SQLITE_CODES = {
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
}


async def retry_briefly(work: Callable[[], Awaitable[R]], name: str) -> R:
    """Return the result of `work()`. If a fault of the disk interrupts `work`, call it again after
    a pause, at most four times. The log names the interrupted work `name`.
    """
    for pause in _PAUSES:
        try:
            return await work()
        except Exception as error:
            if not is_disk_fault(error):
                raise
            _log.warning("%s: a fault of the disk, next attempt in %g s: %s", name, pause, error)
        await asyncio.sleep(pause)
    return await work()


async def retry_until_memory_suffices(work: Callable[[], Awaitable[R]], name: str) -> R:
    """Return the result of `work()`. While there is too little memory for it, call it again after
    pauses. Use this for work after the engine has applied the request `name`: a failure of the
    request would contradict the state of the engine.
    """
    for pause in chain(_PAUSES, repeat(_PAUSES[-1])):
        try:
            return await work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _log.error(
                "%s was applied, but the server lacks memory for its answer. Next attempt in %g s: "
                "%r. Start the server with more memory if this continues; a restart loses nothing",
                name,
                pause,
                error,
            )
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")


class DiskFaults:
    """The models and samplers whose work waits until the disk works again."""

    def __init__(self) -> None:
        self._waiting_owners: Counter[str] = Counter()
        self._stopping = asyncio.Event()
        self.are_widespread = False
        """Whether several models or samplers wait. If only one waits, a single file may be
        unreadable, and all other work can continue.
        """

    def stop(self) -> None:
        """Let `retry_until_fixed` wait no longer, because the server stops."""
        self._stopping.set()

    async def retry_until_fixed(self, work: Callable[[], Awaitable[R]], owner: str) -> R:
        """Return the result of `work()`. While a lasting fault of the disk interrupts it, call it
        again after growing pauses. `owner` is the model or the sampler that needs the result. Raise
        EngineClosedError if the server stops meanwhile; the next start runs the work again.
        """
        attempts = 0
        try:
            while True:
                try:
                    return await work()
                except Exception as error:
                    if not is_lasting_fault(error):
                        raise
                    if not attempts:
                        self._count_waiting(owner, 1)
                    pause = _LONG_PAUSES[min(attempts, len(_LONG_PAUSES) - 1)]
                    attempts += 1
                    _log.error(
                        "%s waits for the disk, and its requests stay in the journal. Next attempt "
                        "in %g s: %s",
                        owner,
                        pause,
                        error,
                    )
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
                    raise EngineClosedError("the server is stopping")
        finally:
            if attempts:
                self._count_waiting(owner, -1)

    def _count_waiting(self, owner: str, change: int) -> None:
        self._waiting_owners[owner] += change
        self._waiting_owners += Counter()  # drops the zeros
        self.are_widespread = len(self._waiting_owners) > 1


def is_lasting_fault(error: BaseException) -> bool:
    """Return whether a broken or full disk, or a lack of open files, caused an error."""
    for cause in _cause_chain(error):
        if isinstance(cause, OSError) and cause.errno in _LASTING_ERRNOS:
            return True
        if isinstance(cause, sqlite3.OperationalError):
            # The low byte of an extended code is the primary code.
            return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _LASTING_SQLITE_CODES
    return False


def is_disk_fault(error: BaseException) -> bool:
    """Return whether a failed file call caused an error. A missing file is not a fault of the disk,
    because another attempt would not find the file either.
    """
    for cause in _cause_chain(error):
        if isinstance(cause, FileNotFoundError):
            return False
        if isinstance(cause, OSError):
            return True
    return False


def _cause_chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
