"""Compile src/kernels.cpp with the machine's C++ compiler into planish's cache.

Compilation takes only about twenty seconds, because the source includes no torch headers. The name
of the library contains a digest of everything that it depends on: sources, compiler and flags. The
compiled file is renamed into the cache atomically. Processes that start at the same time may
compile the same library twice, and then one copy is kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "src" / "kernels.cpp"
# Instruction sets are named one by one, rather than by -march=native: a cache may be shared by
# machines of several kinds.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-pthread",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-w",
    "-Wl,-z,nodelete",
)
INSTRUCTIONS = {
    "AVX512_BF16": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
SECONDS = 600
"""The time limit of the compiler."""


class BuildError(Exception):
    """The kernels cannot be compiled; the message gives the reason."""


def find_compiler() -> str | None:
    """Return the command of a C++ compiler: CXX, or the first that is installed."""
    installed = (shutil.which(name) for name in ("g++", "c++", "clang++"))
    return os.environ.get("CXX") or next(filter(None, installed), None)


def compiled_library(cache: Path, instructions: str) -> Path:
    """Return the path of the library for a key of INSTRUCTIONS, and compile it if necessary.

    Raises BuildError if there is no compiler, the compiler fails, or no directory is writable.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found; install g++, or name one in CXX")
    command = [*shlex.split(compiler), *FLAGS, *INSTRUCTIONS[instructions]]
    texts = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    digest = hashlib.sha256("\0".join([*command, *texts]).encode()).hexdigest()[:16]
    name = f"kernels-{digest}.so"
    if (cache / name).exists():
        return cache / name
    path = _writable(cache) / name
    if not path.exists():
        _log.info("compiling the kernels for this machine's CPU, once, into %s", path.parent)
        _compile(command, path)
    return path


def _writable(cache: Path) -> Path:
    """Return `cache`, or a private temporary directory of this user if `cache` is not writable.

    Raises BuildError if neither directory can be used.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError as error:
        refused = error
    own = Path(tempfile.gettempdir()) / f"planish-{os.getuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError as error:
        raise BuildError(f"{cache} and {own} cannot be written to ({refused}; {error})") from error
    # If other users can write to the directory, one of them could have planted a library there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BuildError(f"{cache} cannot be written to ({refused}), and others can change {own}")
    _log.warning(
        "%s cannot be written to (%s), so the kernels are compiled into %s; set PLANISH_HOME to a "
        "directory that can be written to",
        cache,
        refused,
        own,
    )
    return own


def _compile(command: list[str], path: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / path.name
            done = subprocess.run(
                [*command, str(SOURCE), "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            if done.returncode:
                raise BuildError(
                    f"{command[0]} could not compile {SOURCE.name}: {done.stderr.strip()[:500]}"
                )
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{SOURCE.name} could not be compiled: {error}") from error
