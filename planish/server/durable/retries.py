"""Repeats work that a fault of the disk interrupted, so that a short fault fails no request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

R = TypeVar("R")

_log = logging.getLogger(__name__)

_PAUSES = (0.2, 0.5, 1.0, 2.0)
"""The pauses between the attempts, in seconds."""


async def retried(work: Callable[[], Awaitable[R]], name: str) -> R:
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


def is_disk_fault(error: BaseException) -> bool:
    """Return whether a failed file call caused an error. A missing file is not a fault of the disk,
    because another attempt would not find the file either.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FileNotFoundError):
            return False
        if isinstance(cause, OSError):
            return True
        cause = cause.__cause__
    return False
