"""Files that survive a kill or a power cut.

A file is whole or absent (`write_whole`). A row that is appended to a JSONL file (`RowFile`) is
whole, or is removed when the file is opened again.
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
    """PLANISH_HOME, or ~/.cache/planish."""
    return Path(os.environ.get("PLANISH_HOME") or "~/.cache/planish").expanduser().absolute()


def short_path(path: Path) -> str:
    """The path as people write it: with ~ for the home directory."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # elsewhere, or a user without a home directory
        return str(path)


def hold_directory(path: Path, option: str, what: str) -> FileLock:
    """The lock of a directory, made if it is not there. `option` named it, `what` is written there;
    both are for the errors' words.
    """
    lock = FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{option}={path}: another process is writing {what}; wait for it or give another {option}"
        ) from error
    except OSError as error:
        raise StorageError(
            f"{option}={path}: {error}; give a directory that can be written to"
        ) from error
    return lock


def read_rows(path: str | Path) -> list[Row]:
    """The objects of a JSONL file; [] if there is no file. A torn last line, as a kill leaves it,
    is left out.

    Raises DamagedFileError when any other line is not an object.
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


def give_usual_mode(path: Path) -> None:
    """Give a file the mode that the umask allows to new files. Libraries that write a file aside,
    safetensors among them, leave it readable to its owner alone.
    """
    # The umask can only be read by setting it, which another thread may notice; a new file shows it.
    probe = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.mode")
    handle = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        path.chmod(os.fstat(handle).st_mode & 0o777)
    finally:
        os.close(handle)
        probe.unlink()


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Put `data` at `path` such that a reader, now or after a power cut, sees the old file or the
    whole new one.
    """
    path = Path(path)
    payload = data.encode() if isinstance(data, str) else data
    aside: str | None = None
    try:
        handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        give_usual_mode(Path(aside))  # mkstemp makes it private
        os.replace(aside, path)
        sync_directory(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path} ({error}); free space or rights there") from error
    finally:
        if aside is not None:
            with suppress(FileNotFoundError):
                os.unlink(aside)


class RowFile:
    """A JSONL file that is open for appending; the torn last line of an earlier process is repaired
    at the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _repair(path)
        self._file = self._open()

    def append(self, *rows: Row) -> None:
        """All of the rows by one write."""
        line = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        whole = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(whole)  # or the next row would begin in the middle of a line
            raise StorageError(
                f"cannot append to {self.path} ({error}); free space and start again"
            ) from error

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path} to disk ({error}); free space and start again"
            ) from error

    def keep(self, is_kept: Callable[[Row], bool]) -> None:
        """Drop all rows but those. DamagedFileError: a row has not what `is_kept` looks at."""
        rows = read_rows(self.path)
        kept = []
        for row in rows:
            try:
                kept += [row] if is_kept(row) else []
            except (KeyError, TypeError) as error:
                raise DamagedFileError(
                    f"{self.path}: the row {json.dumps(row)[:200]} is none of a run's ({error}); repair or remove that line"
                ) from error
        if len(kept) < len(rows):
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file.close()
            self._file = self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> io.FileIO:
        try:
            return open(self.path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path} ({error}); give another log_path"
            ) from error


def _repair(path: Path) -> None:
    """End the file with a whole line: the newline that a kill cut off is put back, half a row is
    removed.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    whole, _, tail = content.rpartition(b"\n")
    if not tail:
        return
    if _parse(tail) is not None:
        write_whole(path, content + b"\n")
    else:
        write_whole(path, whole + b"\n" if whole else b"")


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # also when the cut fell inside a character
        return None
    return row if isinstance(row, dict) else None


def read_object(path: Path) -> Row:
    found = _parse(path.read_bytes())
    if found is None:
        raise DamagedFileError(f"{path} is not a JSON object; repair it or give another log_path")
    return found


def plain_values(values: Mapping[str, Any]) -> Row:
    """What JSON can hold: numbers of other libraries become Python's, paths their text, functions
    and other objects their name.

    No name holds an address, so the same options give the same text in every process.
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


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
