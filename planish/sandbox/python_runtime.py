"""The files of a Python interpreter, at paths in the sandbox that reveal nothing about this
machine.

A sandbox has the interpreter in /python/bin, its standard library without installed packages in
/python/lib, and the shared libraries that `ldd` lists for them. It has no other files: no shell, no
other program, no configuration.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planish.errors import UserError
from planish.sandbox.errors import SandboxUnavailableError

RUNTIME_DIRECTORY = "/python"
LIBRARY_DIRECTORY = f"{RUNTIME_DIRECTORY}/libraries"
RUNTIME_QUERY = """
import json, os, sys, sysconfig
assert sys.version_info >= (3, 10)
paths = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix})
executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
print(json.dumps({"executable": executable, "library": os.path.realpath(paths["stdlib"]), "libdir": sys.platlibdir}))
"""
PACKAGE_DIRECTORIES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class PythonRuntime:
    """The locations of an interpreter's parts, on this machine and in the sandbox."""

    bind_mounts: Sequence[tuple[str, str]]
    """(path on this machine, path in the sandbox) of each read-only bind mount."""
    hidden_directories: Sequence[str]
    """Paths in the sandbox of directories with installed packages. An empty directory is mounted
    over each of them.
    """
    executable: str
    """Path of the interpreter in the sandbox."""


@cache
def find_runtime(python: str | None, for_other_user: bool) -> PythonRuntime:
    """Return the runtime of `python`, by default of the interpreter that runs planish.

    With `for_other_user`, all users must be able to read the interpreter's files. If that is not
    true of the default interpreter, the system's interpreter is used. Raises UserError if `python`
    cannot be run, and SandboxUnavailableError if there is no interpreter that all users can read.
    """
    candidates = (
        [python] if python else [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    )
    unreadable_paths: list[str] = []
    for candidate in candidates:
        if shutil.which(candidate) is None:
            continue
        runtime = query_runtime(candidate)
        unreadable = next(
            (
                path
                for path, _ in runtime.bind_mounts
                if for_other_user and not is_world_readable(path)
            ),
            None,
        )
        if unreadable is None:
            return runtime
        unreadable_paths.append(unreadable)
    if not unreadable_paths:
        raise UserError(
            f"python={python}: there is no such interpreter; give the path of Python 3.10 or later"
        )
    raise SandboxUnavailableError(
        "planish runs as root and its sandbox as an ordinary user, who cannot read "
        f"{unreadable_paths[0]}; run planish as an ordinary user, or install a Python that all "
        "users can read (Debian, Ubuntu: apt-get install python3)"
    )


def query_runtime(python: str) -> PythonRuntime:
    """Ask the interpreter `python` where its files are. Raises UserError if it cannot be run."""
    try:
        output = subprocess.run(
            [python, "-I", "-c", RUNTIME_QUERY],
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout
        paths = json.loads(output)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"python={python} is no Python that can be used; give the path of Python 3.10 or later"
        ) from error
    library = Path(paths["library"])
    sandbox_library = f"{RUNTIME_DIRECTORY}/{paths['libdir']}/{library.name}"
    executable = f"{RUNTIME_DIRECTORY}/bin/{Path(paths['executable']).name}"
    extension_modules = sorted(str(path) for path in (library / "lib-dynload").glob("*.so"))
    bind_mounts = [(paths["executable"], executable), (str(library), sandbox_library)]
    bind_mounts += shared_libraries([paths["executable"], *extension_modules])
    return PythonRuntime(
        bind_mounts,
        [f"{sandbox_library}/{name}" for name in PACKAGE_DIRECTORIES if (library / name).is_dir()],
        executable,
    )


def shared_libraries(files: Sequence[str]) -> list[tuple[str, str]]:
    """Return the bind mounts of the shared libraries that `files` load.

    The dynamic linker has the same path in the sandbox as outside, because executables contain that
    path. All other libraries are mounted in one directory.
    """
    if shutil.which("ldd") is None:
        raise SandboxUnavailableError(
            "ldd, which lists an interpreter's shared libraries, is missing; install it (Debian: "
            "libc-bin)"
        )
    ldd_output = subprocess.run(["ldd", *files], capture_output=True, text=True, timeout=60).stdout
    return sorted(set(_parse_ldd_output(ldd_output)))


def _parse_ldd_output(ldd_output: str) -> Iterator[tuple[str, str]]:
    """Yield the bind mounts of the libraries in the output of ldd.

    A line is "NAME => PATH (ADDRESS)", or "PATH (ADDRESS)" for the dynamic linker. The kernel's
    vDSO has no path and needs no mount.
    """
    for words in map(str.split, ldd_output.splitlines()):
        if len(words) >= 3 and words[1] == "=>" and words[2].startswith("/"):
            yield words[2], f"{LIBRARY_DIRECTORY}/{Path(words[0]).name}"
        elif len(words) == 2 and words[0].startswith("/") and words[1].startswith("("):
            yield words[0], words[0]


def is_world_readable(path: str) -> bool:
    """Return whether every user of this machine can read the file."""
    real_path = Path(os.path.realpath(path))
    can_reach = all(parent.stat().st_mode & stat.S_IXOTH for parent in real_path.parents)
    return can_reach and bool(real_path.stat().st_mode & stat.S_IROTH)
