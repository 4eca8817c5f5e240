"""The file of `planish doctor --gpu-report`: its format, and what may not be in it.

The file is one JSON object:

    {"schema": 1, "software": {...},
     "parts": {NAME: {"status": ..., "reason": ..., "seconds": ..., "lines": [...], "details": ...}}}

A part is "done", "failed", "not run here", or "unfinished" if its time was over. The next call does
unfinished and missing parts only. A line has "what", "expected", "got" and "unit"; `expected` is
null where nothing is known. Texts contain no paths, no names of users or hosts, and no serial
numbers (`scrubbed`).
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch

from planish.errors import UserError
from planish.files import write_atomically
from planish.model.kernels.triton.self_test import source_digest

SCHEMA_VERSION = 1
DONE, FAILED, NOT_RUN, UNFINISHED = "done", "failed", "not run here", "unfinished"
STATUSES = (DONE, FAILED, NOT_RUN, UNFINISHED)
_PATH = re.compile(r"(?<![\w.~<])(?:~|/)(?:[^\s/'\"<>:,;()]+/)+([^\s/'\"<>:,;()]*)")
_SERIAL = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}")
_MIN_NAME_LENGTH = 3
"""Shorter names of users and hosts are not replaced, because words contain them."""


@dataclass(frozen=True)
class Line:
    """One result: what was expected, and what was found."""

    what: str
    got: float | str | None
    unit: str = ""
    expected: float | str | None = None
    """None: nothing is known about it."""

    @property
    def text(self) -> str:
        """The line for people."""
        unit = f" {self.unit}" if self.unit else ""
        expected = "" if self.expected is None else f"expected {_shown(self.expected)}{unit}, "
        return f"{self.what}: {expected}got {_shown(self.got)}{unit}"


def _shown(value: float | str | None) -> str:
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class PartResult:
    """The result of one part of the report."""

    status: str
    """A value of STATUSES."""
    reason: str = ""
    """Why the part is not done; empty if it is."""
    seconds: float = 0.0
    lines: tuple[Line, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Return the result in a file. Raises TypeError or KeyError for another form."""
        return cls(**{**fields, "lines": tuple(Line(**line) for line in fields["lines"])})


class ReportFile:
    """The report in its file, which contains the finished parts even if this process is killed."""

    def __init__(self, path: Path) -> None:
        """Continue the report in `path`, or begin one.

        Raises UserError if the file is something else, or a report of other software.
        """
        self.path = path
        self.parts: dict[str, PartResult] = {}
        self._header = {"schema": SCHEMA_VERSION, "software": software()}
        if not path.exists():
            return
        remedy = "give --gpu-report another file, or remove this one"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            header = {name: found[name] for name in self._header}
            self.parts = {name: PartResult.read(part) for name, part in found["parts"].items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no report of planish doctor; {remedy}") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error}); {remedy}") from error
        if header != self._header:
            raise UserError(
                f"{path} is a report of another version of planish, torch or Triton; {remedy}"
            )

    def is_finished(self, name: str) -> bool:
        """Return whether the part need not be run again."""
        return name in self.parts and self.parts[name].status != UNFINISHED

    def add(self, name: str, result: PartResult) -> None:
        """Record the result of a part. Raises UserError if the file cannot be written."""
        self.parts[name] = result
        report = {**self._header, "parts": {n: asdict(part) for n, part in self.parts.items()}}
        text = json.dumps(scrub_all(report), indent=1) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error}); give --gpu-report another file"
            ) from error


def software() -> dict[str, str]:
    """Return the versions on which the results depend."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed"
    return {
        "planish": metadata.version("planish"),
        "torch": torch.__version__,
        "triton": triton,
        "kernel_sources": source_digest()[:16],
    }


def scrub_all(value: Any) -> Any:
    """Return a JSON value whose texts are scrubbed."""
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, Mapping):
        return {scrubbed(str(name)): scrub_all(inner) for name, inner in value.items()}
    return [scrub_all(inner) for inner in value] if isinstance(value, list | tuple) else value


def scrubbed(text: str) -> str:
    """Return the text without personal facts.

    A path keeps its last part only. Names of the user and the host, and the serial numbers of GPUs,
    are replaced.
    """
    text = _SERIAL.sub("<serial>", text)
    text = _PATH.sub(r"<path>/\1", text)
    for name, replacement in _personal_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", replacement, text)
    return text


@cache
def _personal_names() -> tuple[tuple[str, str], ...]:
    names = {socket.gethostname(): "<host>", socket.gethostname().partition(".")[0]: "<host>"}
    with suppress(KeyError, OSError, ImportError):  # a user without an entry in the password file
        names[getpass.getuser()] = "<user>"
    names[Path(os.path.expanduser("~")).name] = "<user>"
    # Some words are names of users too, and appear in texts of their own right.
    common = ("root", "localhost", "user", "planish", "ubuntu")
    return tuple(
        (name, shown)
        for name, shown in names.items()
        if len(name) >= _MIN_NAME_LENGTH and name not in common
    )
