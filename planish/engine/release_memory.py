"""Memory that is kept after its use: by the C library after tensors are freed, and by errors.

Activations of many sizes come and go in a forward and backward pass; glibc keeps the freed blocks
for reuse, and between those that are still in use they cannot always be joined, so a process grows
to several times what it needs at a time.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

_COMPUTING = ("planish.engine.", "planish.model.", "torch.", "triton.")
"""Modules whose functions hold tensors of a pass, and are over when an error has left them."""


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

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
    """Return freed memory to the system if the C library keeps more of it than `keep_bytes`; does
    nothing without glibc 2.33.

    Keeping some is worth it: what is returned must be mapped and zeroed again by the next pass.
    """
    libc = _libc()
    if libc is not None and libc.mallinfo2().fordblks > keep_bytes:
        libc.malloc_trim(0)


def clear_frames(error: BaseException) -> None:
    """Free what the frames that `error` came through hold: whoever keeps it would keep their
    tensors too, and the next pass not find the memory.

    Frames of other code than that which computes stay as they are, as do those that still run.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            _clear(found.__traceback__)
            left += [found.__cause__, found.__context__]


def _clear(traceback: TracebackType | None) -> None:
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_globals.get("__name__", "").startswith(_COMPUTING):
            with suppress(RuntimeError):  # it still runs
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
