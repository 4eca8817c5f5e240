"""Memory that the C library keeps after tensors are freed.

Activations of many sizes come and go in a forward and backward pass; glibc keeps the freed blocks for reuse, and between those that are
still in use they cannot always be joined, so a process grows to several times what it needs at a time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


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


def give_back(keep_bytes: int) -> None:
    """Return freed memory to the system if the C library keeps more of it than `keep_bytes`; does nothing without glibc 2.33.

    Keeping some is worth it: what is returned must be mapped and zeroed again by the next pass.
    """
    libc = _libc()
    if libc is not None and libc.mallinfo2().fordblks > keep_bytes:
        libc.malloc_trim(0)


@cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo2
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError, TypeError):
        return None
    return libc
