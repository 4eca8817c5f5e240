"""The files of a Python interpreter, and nothing else, at places that say nothing about this
machine.

A sandbox has the interpreter in /python/bin, its standard library without installed packages in
/python/lib, and the shared libraries that these load. What `ldd` names is all there is: no shell,
no other program, no configuration.
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

PREFIX = "/python"
LIBRARIES = f"{PREFIX}/libraries"
ASK = """
import json, os, sys, sysconfig
assert sys.version_info >= (3, 10)
paths = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix})
executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
print(json.dumps({"executable": executable, "library": os.path.realpath(paths["stdlib"]), "libdir": sys.platlibdir}))
"""
PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class PythonRuntime:
    """Where its parts are on this machine, and where in the sandbox."""

    binds: Sequence[tuple[str, str]]
    """(path here, path there), to be read only."""
    hidden: Sequence[str]
    """Directories there that are to be empty."""
    executable: str
    """Path there."""


@cache
def find_runtime(python: str | None, for_other_user: bool) -> PythonRuntime:
    """The files of `python`, or of the interpreter that runs this; if another user must read them
    and cannot, of the system's.
    """
    candidates = (
        [python] if python else [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    )
    closed: list[str] = []
    for candidate in candidates:
        if shutil.which(candidate) is None:
            continue
        runtime = runtime_of(candidate)
        unreadable = next(
            (path for path, _ in runtime.binds if for_other_user and not is_open_to_all(path)), None
        )
        if unreadable is None:
            return runtime
        closed.append(unreadable)
    if not closed:
        raise UserError(
            f"python={python}: there is no such interpreter; give the path of a Python of 3.10 or later"
        )
    raise SandboxUnavailableError(
        f"planish runs as root, its sandbox as an ordinary user, and that one cannot read {closed[0]}; run planish as an "
        "ordinary user, or install a Python that all users can read (Debian, Ubuntu: apt-get install python3)"
    )


def runtime_of(python: str) -> PythonRuntime:
    try:
        told = subprocess.run(
            [python, "-I", "-c", ASK], capture_output=True, check=True, text=True, timeout=60
        ).stdout
        parts = json.loads(told)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"python={python} is no Python that can be used; give the path of one of 3.10 or later"
        ) from error
    library = Path(parts["library"])
    there = f"{PREFIX}/{parts['libdir']}/{library.name}"
    executable = f"{PREFIX}/bin/{Path(parts['executable']).name}"
    extensions = sorted(str(path) for path in (library / "lib-dynload").glob("*.so"))
    binds = [(parts["executable"], executable), (str(library), there)]
    binds += shared_libraries([parts["executable"], *extensions])
    return PythonRuntime(
        binds, [f"{there}/{name}" for name in PACKAGES if (library / name).is_dir()], executable
    )


def shared_libraries(files: Sequence[str]) -> list[tuple[str, str]]:
    """What these files load: the dynamic linker at its own place, all else in one directory."""
    if shutil.which("ldd") is None:
        raise SandboxUnavailableError(
            "ldd is missing, which tells what an interpreter loads; install it (Debian: libc-bin)"
        )
    listed = subprocess.run(["ldd", *files], capture_output=True, text=True, timeout=60).stdout
    return sorted(set(_read_listing(listed)))


def _read_listing(listed: str) -> Iterator[tuple[str, str]]:
    """Lines are "NAME => PATH (ADDRESS)" or, for the linker, "PATH (ADDRESS)"; the kernel's own
    part has no path.
    """
    for words in map(str.split, listed.splitlines()):
        if len(words) >= 3 and words[1] == "=>" and words[2].startswith("/"):
            yield words[2], f"{LIBRARIES}/{Path(words[0]).name}"
        elif len(words) == 2 and words[0].startswith("/") and words[1].startswith("("):
            yield words[0], words[0]


def is_open_to_all(path: str) -> bool:
    """Whether a user who owns nothing here can read it."""
    real = Path(os.path.realpath(path))
    can_reach = all(parent.stat().st_mode & stat.S_IXOTH for parent in real.parents)
    return can_reach and bool(real.stat().st_mode & stat.S_IROTH)
