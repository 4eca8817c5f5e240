"""The command line of one sandbox: what bubblewrap is asked for, and the limits that the program's
first process sets.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from planish.sandbox.limits import MIB, Limits
from planish.sandbox.python_runtime import LIBRARIES, PythonRuntime

PROGRAM = "/program"
START = "/start.py"
SCRATCH = "/tmp"
START_SOURCE = Path(__file__).with_name("start.py").read_bytes()
OPEN_FILES = 64
PENDING_SIGNALS = 64
STACK_BYTES = 8 * MIB
USER = "1000"
ENVIRONMENT = {
    "HOME": SCRATCH,
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": LIBRARIES,
    # Arenas of threads would reserve address space by the gigabyte.
    "MALLOC_ARENA_MAX": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The order of a set is the same in every run, and so is the reward.
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
}
"""All variables that a program has, beside PWD."""


def sandbox_command(
    bwrap: str,
    runtime: PythonRuntime,
    limits: Limits,
    *,
    filter_descriptor: int,
    status_descriptor: int,
    file_descriptors: Mapping[str, int],
    arguments: Sequence[str],
) -> list[str]:
    """bubblewrap, /start.py, the interpreter and /program/main.py. `file_descriptors`: the files to
    be there, by their paths.
    """
    options = [
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    options += ["--uid", USER, "--gid", USER, "--hostname", "sandbox", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    for here, there in runtime.binds:
        options += ["--ro-bind", here, there]
    for directory in runtime.hidden:
        options += ["--tmpfs", directory, "--remount-ro", directory]
    options += ["--dev-bind", "/dev/null", "/dev/null"]
    for there, descriptor in file_descriptors.items():
        options += ["--ro-bind-data", str(descriptor), there]
    if limits.scratch_bytes:
        options += ["--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH]
    options += ["--remount-ro", "/", "--chdir", SCRATCH if limits.scratch_bytes else PROGRAM]
    options += ["--seccomp", str(filter_descriptor), "--json-status-fd", str(status_descriptor)]
    python = runtime.executable
    start = [python, "-I", "-S", START, json.dumps(resource_limits(limits))]
    return [bwrap, *options, "--", *start, python, f"{PROGRAM}/main.py", *arguments]


def resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """(soft, hard) by the names of the module `resource`."""
    return {
        "RLIMIT_AS": (limits.process_bytes, limits.process_bytes),
        # At the first a signal that names the cause, at the second the end.
        "RLIMIT_CPU": (limits.cpu_seconds, limits.cpu_seconds + 1),
        "RLIMIT_FSIZE": (limits.scratch_bytes, limits.scratch_bytes),
        # bubblewrap's own process counts too.
        "RLIMIT_NPROC": (limits.tasks + 1, limits.tasks + 1),
        "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES),
        "RLIMIT_STACK": (STACK_BYTES, limits.process_bytes),
        "RLIMIT_SIGPENDING": (PENDING_SIGNALS, PENDING_SIGNALS),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_MSGQUEUE": (0, 0),
    }
