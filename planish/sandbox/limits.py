"""Resource limits of a program. The program cannot raise them."""

import math
from dataclasses import dataclass

from planish.errors import UserError

MIB = 1 << 20
MAX_THREADS = 32
"""Maximum number of threads of a program with `Limits.processes` = 1."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of one run. Raises UserError if a value is out of range."""

    cpu_seconds: int = 4
    """CPU time of each process, in whole seconds, because the kernel counts whole seconds."""
    wall_seconds: float = 12.0
    """Wall time of the run, including the start of the sandbox and all waiting."""
    memory_bytes: int = 512 * MIB
    """Address space of all processes together."""
    output_bytes: int = MIB
    """Maximum size of standard output and of standard error, each."""
    processes: int = 1
    """With 1, the program is a single process with up to 32 threads. With more, this limits the
    number of processes and threads together, and each process gets an equal share of the memory.
    """
    scratch_bytes: int = 0
    """Size of /tmp, which is deleted after the run. With 0, the program cannot write files."""

    def __post_init__(self) -> None:
        # setrlimit takes ints only, and 512e6 is a float in Python.
        for name in ("cpu_seconds", "memory_bytes", "output_bytes", "processes", "scratch_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"Limits.{name}={value!r}: give a whole number, as an int")
        for name, is_valid, remedy in (
            ("cpu_seconds", self.cpu_seconds >= 1, "a whole number of at least 1"),
            ("wall_seconds", 0 < self.wall_seconds < math.inf, "a number of seconds above 0"),
            ("processes", 1 <= self.processes <= 256, "a whole number from 1 to 256"),
            (
                "memory_bytes",
                self.process_bytes >= 64 * MIB,
                "at least 64 MiB per process: Python needs this much to start",
            ),
            ("output_bytes", self.output_bytes >= 1, "at least 1"),
            ("scratch_bytes", self.scratch_bytes >= 0, "a number of bytes, 0 for no files"),
        ):
            if not is_valid:
                raise UserError(f"Limits.{name}={getattr(self, name)}: give {remedy}")

    @property
    def process_bytes(self) -> int:
        """The address space of one process, in bytes."""
        return self.memory_bytes // max(1, self.processes)

    @property
    def max_tasks(self) -> int:
        """The maximum number of processes and threads together, as RLIMIT_NPROC counts them."""
        return MAX_THREADS if self.processes == 1 else self.processes
