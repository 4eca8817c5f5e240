r"""Whether an answer in \boxed{} equals the known one.

Two plain numbers are compared as numbers. Anything else goes to math-verify, in a process that can
be killed: an answer such as 9^{9^{9^{9}}} keeps a computer algebra system busy for ever, and
neither an alarm nor a thread can stop it there. An answer that cannot be judged (the library fails
on it, or takes too long) raises GradingError and is counted; it is for the caller to say what
reward that means, and to show how often it happened.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Self

from planish.errors import UnjudgedAnswerError
from planish.processes.worker_process import WorkerError, WorkerProcess, WorkerStartError

PLAIN_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?")
BOX = r"\boxed{"
BRACE = re.compile(r"(?<!\\)[{}]")


class GradingError(UnjudgedAnswerError):
    """An answer could not be judged."""


@dataclass(frozen=True)
class Grade:
    boxed: str | None
    """What is in the last box; None if there is no closed box."""
    correct: bool


def extract_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces close; it may hold braces itself."""
    last: tuple[int, int] | None = None
    is_open: list[int] = []
    """Where what stands in the braces begins, for each that is not closed yet."""
    for match in BRACE.finditer(text):
        if match[0] == "{":
            is_open.append(match.end())
        elif is_open:
            start = is_open.pop()
            if text.endswith(BOX, 0, start) and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[slice(*last)].strip()


class Grader:
    """Compares answers; holds one process, started at the first answer that is not a plain number."""

    def __init__(self, timeout_seconds: float = 5.0) -> None:
        self.timeout_seconds = timeout_seconds
        self.failures = 0
        """How many answers raised GradingError."""
        self._process = WorkerProcess(Path(__file__).with_name("grading_worker.py"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, response: str, expected: str) -> Grade:
        """Judge the last box of a response. GradingError if its content cannot be judged."""
        boxed = extract_boxed(response)
        return Grade(boxed, boxed is not None and self.equal(boxed, expected))

    def equal(self, answer: str, expected: str) -> bool:
        given, known = _normal(answer), _normal(expected)
        if given == known:
            return True
        if not given:
            return False
        numbers = _number(given), _number(known)
        if numbers[0] is not None and numbers[1] is not None:
            return numbers[0] == numbers[1]
        try:
            reply = self._process.ask({"answer": given, "expected": known}, self.timeout_seconds)
        except WorkerStartError as error:
            raise WorkerStartError(
                f"the grading process did not start: {error}; is math-verify installed?"
            ) from error
        except WorkerError as error:
            self.failures += 1
            message = (
                f"the answer {answer[:200]!r} could not be compared with {expected!r}: {error}"
            )
            raise GradingError(message) from error
        return bool(reply["equal"])

    def close(self) -> None:
        self._process.close()


def _normal(answer: str) -> str:
    text = answer.strip().strip("$").strip().removesuffix(".").strip()
    return text.removeprefix("\\$").strip()


def _number(text: str) -> Decimal | None:
    if not PLAIN_NUMBER.fullmatch(text) or not any(character.isdigit() for character in text):
        return None
    if not text.isascii():
        return None
    return Decimal(text.replace(",", ""))
