"""The command line that starts one sandbox: bubblewrap's options, and the resource limits that
/start.py sets.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from planish.sandbox.limits import MIB, Limits
from planish.sandbox.python_runtime import LIBRARY_DIRECTORY, PythonRuntime

PROGRAM_DIRECTORY = "/program"
START_PATH = "/start.py"
SCRATCH_DIRECTORY = "/tmp"
START_SOURCE = Path(__file__).with_name("start.py").read_bytes()
MAX_OPEN_FILES = 64
MAX_PENDING_SIGNALS = 64
STACK_BYTES = 8 * MIB
USER_ID = "1000"
ISOLATION_OPTIONS = (
    *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL", "--uid", USER_ID, "--gid", USER_ID),
    *("--hostname", "sandbox", "--clearenv"),
)
"""The options of bubblewrap that every sandbox has, in addition to those for its file system and
its seccomp filter.
"""
ENVIRONMENT = {
    "HOME": SCRATCH_DIRECTORY,
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": LIBRARY_DIRECTORY,
    # glibc reserves address space for a malloc arena per thread, which would exceed RLIMIT_AS.
    "MALLOC_ARENA_MAX": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # A fixed hash seed gives sets the same order in every run, so the reward is reproducible.
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
}
"""All environment variables of a program, except PWD, which bubblewrap sets."""


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
    """Return the command: bubblewrap runs /start.py, which runs /program/main.py.

    `file_descriptors` maps paths in the sandbox to open descriptors of their contents.
    """
    options = list(ISOLATION_OPTIONS)
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    for host_path, sandbox_path in runtime.bind_mounts:
        options += ["--ro-bind", host_path, sandbox_path]
    for directory in runtime.hidden_directories:
        options += ["--tmpfs", directory, "--remount-ro", directory]
    options += ["--dev-bind", "/dev/null", "/dev/null"]
    for sandbox_path, descriptor in file_descriptors.items():
        options += ["--ro-bind-data", str(descriptor), sandbox_path]
    if limits.scratch_bytes:
        options += ["--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH_DIRECTORY]
    working_directory = SCRATCH_DIRECTORY if limits.scratch_bytes else PROGRAM_DIRECTORY
    options += ["--remount-ro", "/", "--chdir", working_directory]
    options += ["--seccomp", str(filter_descriptor), "--json-status-fd", str(status_descriptor)]
    python = runtime.executable
    start_command = [python, "-I", "-S", START_PATH, json.dumps(resource_limits(limits))]
    program_command = [python, f"{PROGRAM_DIRECTORY}/main.py", *arguments]
    return [bwrap, *options, "--", *start_command, *program_command]


def resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """Return (soft, hard) limits, by their names in the standard module `resource`."""
    return {
        "RLIMIT_AS": (limits.process_bytes, limits.process_bytes),
        # At the soft limit the kernel sends SIGXCPU, which names the cause; at the hard limit it
        # sends SIGKILL.
        "RLIMIT_CPU": (limits.cpu_seconds, limits.cpu_seconds + 1),
        "RLIMIT_FSIZE": (limits.scratch_bytes, limits.scratch_bytes),
        # The kernel counts bubblewrap's own process too.
        "RLIMIT_NPROC": (limits.max_tasks + 1, limits.max_tasks + 1),
        "RLIMIT_NOFILE": (MAX_OPEN_FILES, MAX_OPEN_FILES),
        "RLIMIT_STACK": (STACK_BYTES, limits.process_bytes),
        "RLIMIT_SIGPENDING": (MAX_PENDING_SIGNALS, MAX_PENDING_SIGNALS),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_MSGQUEUE": (0, 0),
    }
