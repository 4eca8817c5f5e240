"""Tests of programs: what goes in and what must come out.

What must come out stays on this side. A program gets its input, or the arguments of one call, and
what it prints or returns is compared here; so it cannot read the answer, and ending early,
tampering with the caller or printing a verdict only makes another answer. Each test is a run of its
own, in a sandbox of its own: nothing is left from one to the next.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from planish.errors import UserError
from planish.sandbox.call import plain
from planish.sandbox.process import Ending
from planish.sandbox.sandbox import Execution, Sandbox

CALL = Path(__file__).with_name("call.py").read_text(encoding="utf-8")
TOLERANCE = 1e-6
"""Relative, or absolute below 1."""
DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Outcome(StrEnum):
    """Of one test."""

    PASSED = "passed"
    WRONG = "wrong"
    """It ended well with another answer."""
    FAILED = "failed"
    """It ended with an error."""
    TIME = "time"
    OUTPUT = "output"
    """It printed more than it may."""


@dataclass(frozen=True)
class TestResult:
    __test__ = False  # for pytest: a class of ours, not one with tests

    outcome: Outcome
    execution: Execution
    answer: str
    """What the program printed, or, as JSON, what the function returned."""


@dataclass(frozen=True)
class StdinTest:
    """A program reads `stdin` and must print `stdout`.

    Lines are compared word by word, whatever blanks there are; empty lines at the end do not count.
    A number that is expected with a decimal point may differ by 1e-6.
    """

    stdin: str
    stdout: str

    async def run(self, sandbox: Sandbox, source: str) -> TestResult:
        done = await sandbox.run(source, stdin=self.stdin)
        printed = done.stdout.decode(errors="replace")
        return TestResult(outcome_of(done, lambda: same_text(printed, self.stdout)), done, printed)


@dataclass(frozen=True)
class FunctionTest:
    """A function, or a method of the class `Solution`, is called with `arguments` and must return
    `returned`.

    Both are made of None, booleans, numbers, texts, lists, tuples, sets and mappings. A tuple may
    be returned for a list; a float may differ by 1e-6; True is not 1.
    """

    function: str
    arguments: Sequence[Any]
    returned: Any

    def __post_init__(self) -> None:
        if not self.function.isidentifier():
            raise UserError(f"FunctionTest.function={self.function!r}: give the name of a function")
        for name in ("arguments", "returned"):
            if not is_literal(getattr(self, name)):
                raise UserError(
                    f"FunctionTest.{name} of {self.function} holds a value that has no literal form; give None, booleans, "
                    "finite numbers, texts, lists, tuples, sets and mappings"
                )

    async def run(self, sandbox: Sandbox, source: str) -> TestResult:
        call = json.dumps({"function": self.function, "arguments": repr(tuple(self.arguments))})
        done = await sandbox.run(CALL, files={"solution.py": source, "call.json": call})
        try:
            returned = json.loads(done.stdout)["returned"]
            answer = json.dumps(returned, ensure_ascii=False)
        except (ValueError, RecursionError, KeyError, TypeError):
            # The driver writes nothing else: the program did, or ended before.
            return TestResult(outcome_of(done, lambda: False), done, "")
        return TestResult(
            outcome_of(done, lambda: same_value(returned, plain(self.returned))), done, answer
        )


ProgramTest = StdinTest | FunctionTest


def outcome_of(done: Execution, is_right: Any) -> Outcome:
    if done.ending in (Ending.CPU_TIME, Ending.WALL_TIME):
        return Outcome.TIME
    if done.ending is Ending.OUTPUT:
        return Outcome.OUTPUT
    if done.exit_code != 0:
        return Outcome.FAILED
    return Outcome.PASSED if is_right() else Outcome.WRONG


def same_text(printed: str, expected: str) -> bool:
    ours, theirs = lines_of(printed), lines_of(expected)
    return len(ours) == len(theirs) and all(map(same_line, ours, theirs))


def lines_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().split("\n")]


def same_line(printed: Sequence[str], expected: Sequence[str]) -> bool:
    return len(printed) == len(expected) and all(map(same_word, printed, expected))


def same_word(printed: str, expected: str) -> bool:
    if DECIMAL.fullmatch(expected) and NUMBER.fullmatch(printed):
        return close(float(printed), float(expected))
    return printed == expected


def same_value(returned: Any, expected: Any) -> bool:
    """Of values as `plain` makes them."""
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, float | int) and isinstance(expected, float | int):
        if isinstance(returned, int) and isinstance(expected, int):
            return returned == expected
        return close(returned, expected)
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(
            same_value(returned[key], expected[key]) for key in expected
        )
    return type(returned) is type(expected) and returned == expected


def close(ours: float, theirs: float) -> bool:
    try:
        return math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # a whole number beyond all floats
        return False


def is_literal(value: Any) -> bool:
    """Whether `ast.literal_eval(repr(value))` is the value."""
    if value is None or type(value) in (bool, int, str):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            is_literal(part) for pair in value.items() for part in pair
        )
    if type(value) is set and not value:
        return False
    return type(value) in (list, tuple, set) and all(map(is_literal, value))
