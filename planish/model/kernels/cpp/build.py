"""The library of src/kernels.cpp in planish's cache: copied from the wheel, or compiled.

A wheel has a library for each instruction set, which tools/release.py compiles. Without one, as in
a checkout, the machine's C++ compiler makes the library. That takes about twenty seconds, because
the source includes no torch headers. So a library works with every version of torch.

The name of a library contains a digest of everything that it depends on: sources and flags, and the
compiler of this machine or the content of the wheel's file. The file is renamed into the cache
atomically. Processes that start at the same time may make the same library twice, and then one copy
is kept.
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
from collections.abc import Callable, Iterable
from pathlib import Path

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "src" / "kernels.cpp"
PREBUILT = Path(__file__).parent / "prebuilt"
"""The libraries of a wheel: INSTRUCTIONS-SOURCES-CONTENT.so, with digests of sources and content."""
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
PREBUILT_FLAGS = ("-static-libstdc++", "-static-libgcc")
"""Flags for a library that runs on other systems, whose C++ runtime may be older."""
SECONDS = 600
"""The time limit of the compiler."""


class BuildError(Exception):
    """The kernels cannot be compiled; the message gives the reason."""


def find_compiler() -> str | None:
    """Return the command of a C++ compiler: CXX, or the first that is installed."""
    installed = (shutil.which(name) for name in ("g++", "c++", "clang++"))
    return os.environ.get("CXX") or next(filter(None, installed), None)


def compiled_library(cache: Path, instructions: str, *, may_be_prebuilt: bool = True) -> Path:
    """Return the path of the library for a key of INSTRUCTIONS. If the cache does not have it, copy
    it from the wheel, or compile it.

    With `may_be_prebuilt=False`, or if CXX names a compiler, it is always compiled. Raises
    BuildError if there is no compiler, the compiler fails, or no directory is writable.
    """
    prebuilt = _prebuilt_library(instructions) if may_be_prebuilt else None
    if prebuilt is not None and "CXX" not in os.environ:
        return _made(cache, prebuilt.name, lambda made: shutil.copyfile(prebuilt, made))
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found; install g++, or name one in CXX")
    command = [*shlex.split(compiler), *FLAGS, *INSTRUCTIONS[instructions]]

    def compile_to(made: Path) -> None:
        _log.info("compiling the kernels for this machine's CPU, once, into %s", cache)
        _compile(command, made)

    return _made(cache, f"kernels-{_digest(command)}.so", compile_to)


def build_prebuilt(directory: Path) -> list[Path]:
    """Compile the libraries of a wheel into `directory`, and return their paths.

    Raises BuildError if there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found; install g++, or name one in CXX")
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for instructions, flags in INSTRUCTIONS.items():
        made = directory / f"{instructions}.so"
        _compile([*shlex.split(compiler), *FLAGS, *PREBUILT_FLAGS, *flags], made)
        content = hashlib.sha256(made.read_bytes()).hexdigest()[:16]
        paths.append(made.rename(directory / f"{_prebuilt_name(instructions)}-{content}.so"))
    return paths


def _prebuilt_library(instructions: str) -> Path | None:
    """Return the wheel's library for these sources; None if there is none, or it is damaged."""
    for path in PREBUILT.glob(f"{_prebuilt_name(instructions)}-*.so"):
        content = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        if path.stem.endswith(f"-{content}"):
            return path
        _log.warning("%s is damaged, so the kernels are compiled; install planish again", path)
    return None


def _prebuilt_name(instructions: str) -> str:
    return f"{instructions}-{_digest([*FLAGS, *PREBUILT_FLAGS, *INSTRUCTIONS[instructions]])}"


def _digest(command: Iterable[str]) -> str:
    """Return a digest of the sources and of the command that compiles them."""
    texts = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return hashlib.sha256("\0".join([*command, *texts]).encode()).hexdigest()[:16]


def _made(cache: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Return the file of this name in the cache. If it is missing, `make` writes it to a path."""
    if (cache / name).exists():
        return cache / name
    path = _writable(cache) / name
    if not path.exists():
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as directory:
                made = Path(directory) / name
                make(made)
                with made.open("rb") as file:
                    os.fsync(file.fileno())
                made.replace(path)
        except OSError as error:
            raise BuildError(f"{path} could not be written: {error}") from error
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
        "%s cannot be written to (%s), so the kernels are kept in %s; set PLANISH_HOME to a "
        "directory that can be written to",
        cache,
        refused,
        own,
    )
    return own


def _compile(command: list[str], made: Path) -> None:
    try:
        done = subprocess.run(
            [*command, str(SOURCE), "-o", str(made)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{SOURCE.name} could not be compiled: {error}") from error
    if done.returncode:
        raise BuildError(
            f"{command[0]} could not compile {SOURCE.name}: {done.stderr.strip()[:500]}"
        )
