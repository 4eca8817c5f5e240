"""The program that `Sandbox.check` runs in the sandbox. It tries to escape, and prints a JSON list
of the attempts that succeeded. An attempt fails by raising OSError.

    python main.py PROCESSES HAS_SCRATCH
"""

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable

MAX_PROCESSES, HAS_SCRATCH = int(sys.argv[1]), sys.argv[2] == "True"


def start_second_process() -> None:
    """Start a second process, or fail if `Limits.processes` allows one."""
    if MAX_PROCESSES > 1:
        raise OSError
    if os.fork() == 0:
        os._exit(0)


def mount_file_system() -> None:
    """Mount a file system over the program's directory."""
    if ctypes.CDLL(None).mount(b"none", b"/program", b"tmpfs", 0, None) != 0:
        raise OSError


def create_file(path: str) -> None:
    """Create a file."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


def create_scratch_file() -> None:
    """Create a file in /tmp, or fail if `Limits.scratch_bytes` allows it."""
    if HAS_SCRATCH:
        raise OSError
    create_file("/tmp/file")


def find_host_variables() -> None:
    """Find environment variables that planish did not set."""
    set_by_planish = {"HOME", "LANG", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "PWD"}
    if not {name for name in os.environ if not name.startswith("PYTHON")} - set_by_planish:
        raise OSError


def find_open_files() -> None:
    """Find an open file other than standard input, output and error."""
    for descriptor in range(3, 1024):
        try:
            os.fstat(descriptor)
        except OSError:
            continue
        return
    raise OSError


ESCAPE_ATTEMPTS: dict[str, Callable[[], object]] = {
    "a socket": socket.socket,
    "a pair of sockets": socket.socketpair,
    "a second process": start_second_process,
    "a mount": mount_file_system,
    "a file in /": lambda: create_file("/file"),
    "a file in /program": lambda: create_file("/program/file"),
    "a file in /dev": lambda: create_file("/dev/file"),
    "a file in the runtime": lambda: create_file(os.path.join(sys.prefix, "file")),
    "a file in /tmp": create_scratch_file,
    "/etc": lambda: os.listdir("/etc"),
    "/home": lambda: os.listdir("/home"),
    "/proc": lambda: os.listdir("/proc"),
    "/sys": lambda: os.listdir("/sys"),
    "variables of the host": find_host_variables,
    "open files of the host": find_open_files,
    "another user's rights": lambda: os.setuid(0),
}


def successful_escapes() -> list[str]:
    """Return the names of the attempts that succeeded."""
    names = []
    for name, attempt in ESCAPE_ATTEMPTS.items():
        try:
            attempt()
        except OSError:
            continue
        names.append(name)
    return names


if __name__ == "__main__":
    print(json.dumps(successful_escapes()))
