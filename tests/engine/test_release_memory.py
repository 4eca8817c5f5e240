"""malloc_trim returns freed memory to the system when the C library keeps too much of it."""

from pathlib import Path

import pytest

from planish.engine.release_memory import _libc, trim_heap


def anonymous_kilobytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


@pytest.mark.skipif(_libc() is None, reason="not glibc 2.33 or newer")
def test_freed_heap_blocks_are_returned_to_the_system():
    blocks = [bytearray(b"x") * 60_000 for _ in range(3000)]
    in_use = blocks.pop()
    blocks.clear()
    kept = anonymous_kilobytes()
    trim_heap(1 << 40)
    assert anonymous_kilobytes() > kept - 20_000
    trim_heap(0)
    assert anonymous_kilobytes() < kept - 100_000
    assert len(in_use) == 60_000
