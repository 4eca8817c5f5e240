"""Incremental reading of JSONL files that other processes append to and rewrite.

A `RowTail` reads only what was added since its last read. It never locks or writes the file, so it
cannot disturb a run. It detects three cases in which the rows that it returned before are no longer
those of the file: another file has taken its place, the file is shorter, or the last bytes that
were read have changed. A resumed run causes the first case. Then the next read starts over and its
`generation` increases.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

Row = dict[str, Any]

_GUARD_BYTES = 64
_BLOCK_LINES = 4096
_MAX_REPORTED = 20


@dataclass(frozen=True)
class DamagedLine:
    """A line that is not a JSON object. It is left out, and the rows around it are used."""

    file: str
    line: int
    """Number of the line, from 1."""
    beginning: str

    def __str__(self) -> str:
        return (
            f"{self.file}, line {self.line} is not a JSON object ({self.beginning!r}); the line is "
            "left out and the others are shown"
        )


@dataclass
class RowTail:
    """A JSONL file and how far it has been read."""

    path: Path
    max_read_bytes: int | None = None
    """How much one call of `read` reads; None: all. So a page has the beginning of a large file at
    once, and the rest with its next requests.
    """
    unread_bytes: int = 0
    """How much of the file the next calls of `read` will read, when it was last read."""
    generation: int = 0
    """How often the file was started over."""
    damaged: list[DamagedLine] = field(default_factory=list)
    """The first damaged lines of the file."""
    num_damaged: int = 0
    error: str | None = None
    """Why the file could not be read, e.g. for lack of permission; None if it could, or if there is
    no file.
    """
    _offset: int = 0
    _lines: int = 0
    _identity: tuple[int, int] | None = None
    _guard: bytes = b""

    def read(self) -> list[Row]:
        """Return the rows that were added since the last call, or all rows after a change of
        `generation`. A last line without a newline is left for the next call.
        """
        self.error = None
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if not self._continues(file, status):
                    self._start_over()
                self._identity = (status.st_dev, status.st_ino)
                self.unread_bytes = 0
                if status.st_size <= self._offset:
                    return []
                file.seek(self._offset)
                num_added = status.st_size - self._offset
                added = file.read(min(num_added, self.max_read_bytes or num_added))
                if b"\n" not in added:  # one line is longer than max_read_bytes
                    added += file.read(num_added - len(added))
                self.unread_bytes = num_added - len(added)
        except FileNotFoundError:
            if self._identity is not None:
                self._start_over()
                self._identity = None
            return []
        except OSError as error:
            self.error = f"{self.path.name} cannot be read ({error.strerror})"
            return []
        end = added.rfind(b"\n") + 1
        complete = added[:end]
        self._guard = (self._guard + complete)[-_GUARD_BYTES:]
        self._offset += end
        return self._parse(complete)

    def _continues(self, file: Any, status: os.stat_result) -> bool:
        """Return whether the file still begins with the bytes that were read."""
        if self._identity not in (None, (status.st_dev, status.st_ino)):
            return False
        if status.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._guard))
        return file.read(len(self._guard)) == self._guard

    def _start_over(self) -> None:
        self.generation += 1
        self.damaged, self.num_damaged = [], 0
        self._offset = self._lines = 0
        self._guard = b""

    def _parse(self, complete: bytes) -> list[Row]:
        lines = complete.split(b"\n")[:-1]
        rows: list[Row] = []
        for start in range(0, len(lines), _BLOCK_LINES):
            block = lines[start : start + _BLOCK_LINES]
            found = _parse_block(block)
            if found is None:
                rows += self._parse_lines(block)
            else:
                rows += found
                self._lines += len(block)
        return rows

    def _parse_lines(self, lines: list[bytes]) -> list[Row]:
        rows: list[Row] = []
        for line in lines:
            self._lines += 1
            if not line.strip():
                continue
            row = parse_object(line)
            if row is None:
                self._report(line)
            else:
                rows.append(row)
        return rows

    def _report(self, line: bytes) -> None:
        self.num_damaged += 1
        if len(self.damaged) < _MAX_REPORTED:
            beginning = line[:60].decode(errors="replace")
            self.damaged.append(DamagedLine(self.path.name, self._lines, beginning))

    def problems(self) -> list[str]:
        """Return messages about what could not be read, or is not read yet."""
        messages = [str(damage) for damage in self.damaged[:3]]
        if self.unread_bytes:
            percent = 100 * self._offset // (self._offset + self.unread_bytes)
            messages.append(f"{self.path.name} is being read: {percent}% so far")
        if self.num_damaged > 3:
            messages.append(f"{self.path.name} has {self.num_damaged} damaged lines in all")
        return [*messages, self.error] if self.error else messages


def _parse_block(lines: list[bytes]) -> list[Row] | None:
    """Return the objects of undamaged lines, which are parsed all at once; None for other lines."""
    if not all(line[:2] == b'{"' and line[-1:] == b"}" for line in lines):
        return None
    try:
        # A zero between two lines shows whether each line is one object by itself.
        found = orjson.loads(b"[" + b",0,".join(lines) + b"]")
    except orjson.JSONDecodeError:
        return None
    rows, zeros = found[::2], found[1::2]
    is_one_each = len(rows) == len(lines) and set(map(type, rows)) == {dict}
    return rows if is_one_each and not any(zeros) else None


def parse_object(line: bytes) -> Row | None:
    """Return the JSON object of a line; None if it is none. NaN and Infinity are accepted, because
    Python's json module writes them.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None
