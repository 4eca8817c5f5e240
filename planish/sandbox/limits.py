"""What a program may use, all of it set by the kernel and none of it for the program to raise."""

import math
from dataclasses import dataclass

from planish.errors import UserError

MIB = 1 << 20
THREADS = 32
"""Of a program that is one process."""


@dataclass(frozen=True)
class Limits:
    """Of one run."""

    cpu_seconds: int = 4
    """Of each process; whole seconds, as the kernel counts them."""
    wall_seconds: float = 12.0
    """From before the start to the end, whatever the program waits for."""
    memory_bytes: int = 512 * MIB
    """Of all processes together, as address space."""
    output_bytes: int = MIB
    """Of standard output, and of standard error."""
    processes: int = 1
    """1: the program itself, with up to 32 threads. More: so many processes and threads in all,
    each of which has an equal share of the memory.
    """
    scratch_bytes: int = 0
    """Of files under /tmp, which are gone with the run; 0: there is no place to write to."""

    def __post_init__(self) -> None:
        # The kernel counts in whole numbers; 512e6 is none to Python.
        for name in ("cpu_seconds", "memory_bytes", "output_bytes", "processes", "scratch_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"Limits.{name}={value!r}: give a whole number, as an int")
        for name, holds, remedy in (
            ("cpu_seconds", self.cpu_seconds >= 1, "a whole number of at least 1"),
            ("wall_seconds", 0 < self.wall_seconds < math.inf, "a number of seconds above 0"),
            ("processes", 1 <= self.processes <= 256, "a whole number from 1 to 256"),
            (
                "memory_bytes",
                self.process_bytes >= 64 * MIB,
                "at least 64 MiB a process: Python needs as much to begin",
            ),
            ("output_bytes", self.output_bytes >= 1, "at least 1"),
            ("scratch_bytes", self.scratch_bytes >= 0, "a number of bytes, 0 for no files"),
        ):
            if not holds:
                raise UserError(f"Limits.{name}={getattr(self, name)}: give {remedy}")

    @property
    def process_bytes(self) -> int:
        """The address space of one process."""
        return self.memory_bytes // max(1, self.processes)

    @property
    def tasks(self) -> int:
        """Processes and threads, as the kernel counts them together."""
        return THREADS if self.processes == 1 else self.processes
