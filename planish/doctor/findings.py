"""Findings of `planish doctor`, and their form as JSON."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.errors import PlanishError
from planish.files import short_path

SCHEMA_VERSION = 1
"""Version of the JSON form. It increases when a field is renamed or removed, not when one is added.
"""


@dataclass(frozen=True)
class Finding:
    """One fact about this machine."""

    name: str
    """The name of the finding, unique within its section."""
    text: str
    """The fact in words, without a full stop."""
    value: Any = None
    """The fact for programs: any JSON value. None stands for `text`."""
    remedy: str = ""
    """What the user should do, as a sentence without its full stop; "" if there is no problem."""

    @property
    def needs_attention(self) -> bool:
        return bool(self.remedy)

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "value": self.text if self.value is None else self.value,
            "needs_attention": self.needs_attention,
            "remedy": self.remedy or None,
        }


@dataclass(frozen=True)
class Section:
    """Findings about one subject."""

    name: str
    findings: tuple[Finding, ...]

    @classmethod
    def gather(cls, name: str, probe: Callable[[], Iterable[Finding]]) -> Section:
        """Return the section with the findings of `probe`; an error of `probe` becomes a
        finding.
        """
        findings: list[Finding] = []
        try:
            findings.extend(probe())
        except PlanishError as error:
            findings.append(
                Finding("error", str(error), remedy="correct the setting that this message names")
            )
        except Exception as error:
            text = f"not known: {type(error).__name__}: {first_line(str(error))}"
            remedy = "please report it with the output of `planish doctor --json`"
            findings.append(Finding("error", text, remedy=remedy))
        return cls(name, tuple(findings))


@dataclass(frozen=True)
class Report:
    """The result of `planish doctor`: all sections, and the seconds that it took."""

    sections: tuple[Section, ...]
    seconds: float

    @property
    def problems(self) -> list[tuple[str, Finding]]:
        """(section, finding) of all findings that need attention."""
        return [
            (section.name, finding)
            for section in self.sections
            for finding in section.findings
            if finding.needs_attention
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "needs_attention": bool(self.problems),
            "seconds": round(self.seconds, 1),
            "sections": {
                section.name: {finding.name: finding.as_json() for finding in section.findings}
                for section in self.sections
            },
        }


def first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""


def write_problem(directory: Path) -> str | None:
    """Return why no file can be created in this directory, or None if a file can be created.

    If the directory does not exist, its nearest existing parent is tested instead.
    """
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"{short_path(directory)} cannot be written ({error.strerror or error})"


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the warnings that planish logs within this block, instead of printing them."""
    logger, collector = logging.getLogger("planish"), _Collector()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield collector.messages
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate
