"""Atomic and durable file writes.

`write_atomically` replaces a file atomically. `RowFile` appends rows to a JSONL file; if a crash
leaves an incomplete last row, the next process that opens the file removes it.
"""

import errno
import io
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from filelock import FileLock, Timeout

from planish.errors import DamagedFileError, StorageError, UserError

Row = dict[str, Any]


def cache_home() -> Path:
    """Return the cache directory: $PLANISH_HOME, by default ~/.cache/planish."""
    return Path(os.environ.get("PLANISH_HOME") or "~/.cache/planish").expanduser().absolute()


def short_path(path: Path) -> str:
    """Return the path for display, with ~ for the home directory."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # not in the home directory, or the user has none
        return str(path)


def lock_directory(path: Path, option: str, what: str) -> FileLock:
    """Create a directory if it is missing, lock it, and return the lock.

    `option` (the name of the option that gave the path) and `what` (what is written there) appear
    in error messages. Raises UserError if another process has the lock. Raises StorageError if the
    directory cannot be created.
    """
    lock = FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{option}={path}: another process is writing {what}; wait for it or give another "
            f"{option}"
        ) from error
    except OSError as error:
        raise StorageError(f"{option}={path}: {error}; give a writable directory") from error
    return lock


def read_rows(path: str | Path) -> list[Row]:
    """Return the objects of a JSONL file; [] if the file is missing.

    An incomplete last line, which a crash may leave, is skipped. Raises DamagedFileError if any
    other line is not an object.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and number < len(lines):
            raise DamagedFileError(
                f"{path}, line {number} is not a JSON object; repair or remove that line"
            )
    return rows


def set_default_mode(path: Path) -> None:
    """Set the file mode to the default for new files (0o666 without the umask).

    Some libraries, such as safetensors, write through temporary files that only the owner can read.
    """
    # The umask can only be read by changing it, which would affect other threads. The mode of a new
    # file shows it.
    probe = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.mode")
    handle = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        path.chmod(os.fstat(handle).st_mode & 0o777)
    finally:
        os.close(handle)
        probe.unlink()


def write_remedy(error: OSError, otherwise: str) -> str:
    """Return the remedy for a failed write: `otherwise`, unless too many files are open or there is
    too little memory, because then free space does not help.
    """
    match error.errno:
        case errno.EMFILE:
            return "this process may not open more files; raise its limit (ulimit -n, LimitNOFILE)"
        case errno.ENFILE:
            return "this machine may not open more files; raise its limit (sysctl fs.file-max)"
        case errno.ENOMEM:
            return "this machine lacks memory; try again later, or give the process more memory"
    return otherwise


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Write `data` to `path` atomically and durably: readers see the old or the complete new file,
    even after a power failure. Raises StorageError if that fails.
    """
    path = Path(path)
    payload = data.encode() if isinstance(data, str) else data
    temporary_path: str | None = None
    try:
        handle, temporary_path = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        set_default_mode(Path(temporary_path))  # mkstemp creates files that only the owner can read
        os.replace(temporary_path, path)
        sync(path.parent)
    except OSError as error:
        remedy = write_remedy(error, "check free space and permissions there")
        raise StorageError(f"cannot write {path} ({error}); {remedy}") from error
    finally:
        if temporary_path is not None:
            with suppress(FileNotFoundError):
                os.unlink(temporary_path)


class RowFile:
    """A JSONL file that is open for appending. Opening it repairs an incomplete last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _repair(path)
        self._file = self._open()

    def append(self, *rows: Row) -> None:
        """Append all rows in one write. Raises StorageError if it fails; then none of them is in
        the file.
        """
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        size_before = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size_before)  # else the next row would continue a partial line
            raise StorageError(
                f"cannot append to {self.path} ({error}); free space and start again"
            ) from error

    def sync(self) -> None:
        """Flush the file to disk (fsync). Raises StorageError if that fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path} to disk ({error}); free space and start again"
            ) from error

    def keep(self, is_kept: Callable[[Row], bool]) -> None:
        """Remove the rows for which `is_kept` is false. Raises DamagedFileError if it fails on a
        row.
        """
        rows = read_rows(self.path)
        kept_rows = []
        for row in rows:
            try:
                if is_kept(row):
                    kept_rows.append(row)
            except (KeyError, TypeError) as error:
                raise DamagedFileError(
                    f"{self.path}: the row {json.dumps(row)[:200]} has unexpected fields "
                    f"({error}); repair or remove that line"
                ) from error
        if len(kept_rows) < len(rows):
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept_rows))
            self._file.close()
            self._file = self._open()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> io.FileIO:
        try:
            return open(self.path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path} ({error}); give another log_path"
            ) from error


def _repair(path: Path) -> None:
    """Make the file end with a complete line: add a missing newline, or remove an incomplete
    row.
    """
    if not path.exists() or _ends_with_newline(path):
        return
    content = path.read_bytes()
    complete_lines, _, tail = content.rpartition(b"\n")
    if _parse(tail) is not None:
        write_atomically(path, content + b"\n")
    else:
        write_atomically(path, complete_lines + b"\n" if complete_lines else b"")


def _ends_with_newline(path: Path) -> bool:
    """Return whether a file is empty or ends with a newline. Reads one byte."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # includes UnicodeDecodeError of a truncated character
        return None
    return row if isinstance(row, dict) else None


def read_object(path: Path) -> Row:
    """Read a file that contains one JSON object. Raises DamagedFileError if it does not."""
    content = _parse(path.read_bytes())
    if content is None:
        raise DamagedFileError(f"{path} is not a JSON object; repair it or give another log_path")
    return content


def differences(recorded: Row, requested: Row) -> str:
    """Return how `requested` options differ from those `recorded` in a file, as "seed was 1, is 2,
    ..." by name; "" if they are equal. Long values are cut.
    """
    return ", ".join(
        f"{name} was {recorded.get(name)!r:.200}, is {requested.get(name)!r:.200}"
        for name in sorted(recorded.keys() | requested.keys())
        if recorded.get(name) != requested.get(name)
    )


def plain_values(values: Mapping[str, Any]) -> Row:
    """Convert values to JSON types: numpy and torch numbers to Python numbers, paths to strings,
    functions and other objects to their qualified names.

    Names contain no memory addresses, so equal options give equal JSON in every process.
    """
    return json.loads(json.dumps(dict(values), default=_to_json))


def _to_json(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, partial):
        return {"function": _to_json(value.func), "arguments": [*value.args], **value.keywords}
    named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory with its missing parents, and flush the new entries to disk (fsync).

    `mode`, without the umask, is the mode of the directory, not of its parents.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.is_dir()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for created in missing:
        sync(created.parent)


def sync(path: Path) -> None:
    """Flush a file to disk (fsync), or a directory, so that renames in it are durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
