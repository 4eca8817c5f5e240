"""Release of memory that is no longer used, but kept by the C library or by exceptions.

A forward and backward pass allocates and frees activations of many sizes. glibc keeps the freed
blocks for reuse. It cannot always join them, because blocks between them are still in use. So a
process may grow to several times the memory that it needs at a time.
"""

import ctypes
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

_CLEARED_MODULE_PREFIXES = ("planish.engine.", "planish.model.", "torch.", "triton.")
"""Prefixes of the modules whose frames `clear_frames` clears, because they may contain tensors."""


class _Mallinfo2(ctypes.Structure):
    """The struct mallinfo2 of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def trim_heap(keep_bytes: int) -> None:
    """Return freed memory to the system if the C library keeps more than `keep_bytes` of it.

    Some memory is worth keeping, because the next pass would have to map and zero it again. Without
    glibc 2.33 the function does nothing.
    """
    libc = _libc()
    if libc is not None and libc.mallinfo2().fordblks > keep_bytes:
        libc.malloc_trim(0)


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of the frames in the traceback of `error` and of its causes.

    Otherwise the tensors of these frames would stay in memory as long as the exception does. Only
    frames of modules with a prefix in `_CLEARED_MODULE_PREFIXES` are cleared. Frames that are still
    running are left unchanged.
    """
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in visited:
            visited.add(id(current))
            _clear_traceback(current.__traceback__)
            pending += [current.__cause__, current.__context__]


def _clear_traceback(traceback: TracebackType | None) -> None:
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_globals.get("__name__", "").startswith(_CLEARED_MODULE_PREFIXES):
            with suppress(RuntimeError):  # the frame is still running
                frame.clear()
        traceback = traceback.tb_next


@cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo2
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError, TypeError):
        return None
    return libc
