"""Tests of model-written programs: an input, and the expected output.

The expected output never enters the sandbox. The program gets only its input, or the arguments of
one call, and its output is compared outside. So a program cannot read the answer. A program that
exits early, tampers with the driver or prints a verdict only produces a wrong answer. Each test
runs in a fresh sandbox, so no test can influence the next one.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from planish.errors import UserError
from planish.sandbox.call import to_json_value
from planish.sandbox.process import Ending
from planish.sandbox.sandbox import Execution, Sandbox

DRIVER_SOURCE = Path(__file__).with_name("call.py").read_text(encoding="utf-8")
TOLERANCE = 1e-6
"""The tolerance for floats: relative, or absolute for numbers below 1."""
DECIMAL_NUMBER = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
ANY_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


class Outcome(StrEnum):
    """How one test ended."""

    PASSED = "passed"
    WRONG = "wrong"
    """The program exited normally with a wrong answer."""
    FAILED = "failed"
    """The program exited with an error."""
    TIME = "time"
    """The program exceeded its CPU time or wall time."""
    OUTPUT = "output"
    """The program printed more than `Limits.output_bytes`."""


@dataclass(frozen=True)
class TestResult:
    """The outcome of one test, and what the program did."""

    # pytest would otherwise collect this class because of its name.
    __test__ = False

    outcome: Outcome
    execution: Execution
    answer: str
    """The program's standard output, or the function's return value as JSON."""


@dataclass(frozen=True)
class StdinTest:
    """A test of a program that reads `stdin` and must print `stdout`.

    Lines are compared word by word; the amount of white space between words and empty lines at the
    end do not matter. If the expected word is a number with a decimal point, the printed number may
    differ by 1e-6.
    """

    stdin: str
    stdout: str

    async def run(self, sandbox: Sandbox, source: str) -> TestResult:
        """Run the program `source` and compare its output. Raises SandboxError if it could not
        run.
        """
        execution = await sandbox.run(source, stdin=self.stdin)
        output = execution.stdout.decode(errors="replace")
        return TestResult(
            outcome_of(execution, lambda: texts_match(output, self.stdout)), execution, output
        )


@dataclass(frozen=True)
class FunctionTest:
    """A test of a function, or of a method of the class `Solution`. A call with `arguments` must
    return `returned`.

    `arguments` and `returned` consist of None, booleans, numbers, strings, lists, tuples, sets and
    mappings. Lists and tuples compare equal, floats may differ by 1e-6, and True is not equal to 1.
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
                    f"FunctionTest.{name} of {self.function} holds a value that has no literal "
                    "form; give None, booleans, finite numbers, strings, lists, tuples, sets and "
                    "mappings"
                )

    async def run(self, sandbox: Sandbox, source: str) -> TestResult:
        """Call the function in `source` and compare its return value. Raises SandboxError if it
        could not run.
        """
        call = json.dumps({"function": self.function, "arguments": repr(tuple(self.arguments))})
        execution = await sandbox.run(
            DRIVER_SOURCE, files={"solution.py": source, "call.json": call}
        )
        try:
            returned = json.loads(execution.stdout)["returned"]
            answer = json.dumps(returned, ensure_ascii=False)
        except (ValueError, RecursionError, KeyError, TypeError):
            # The driver prints one valid JSON object, so the program printed something itself or
            # ended before the driver could print.
            return TestResult(outcome_of(execution, lambda: False), execution, "")
        return TestResult(
            outcome_of(execution, lambda: values_match(returned, to_json_value(self.returned))),
            execution,
            answer,
        )


ProgramTest = StdinTest | FunctionTest


def outcome_of(execution: Execution, is_correct: Callable[[], bool]) -> Outcome:
    """Return the outcome of a run. Call `is_correct` only if the program exited with code 0."""
    if execution.ending in (Ending.CPU_TIME, Ending.WALL_TIME):
        return Outcome.TIME
    if execution.ending is Ending.OUTPUT:
        return Outcome.OUTPUT
    if execution.exit_code != 0:
        return Outcome.FAILED
    return Outcome.PASSED if is_correct() else Outcome.WRONG


def texts_match(printed: str, expected: str) -> bool:
    """Return whether the text that was printed and the expected one have the same words in each
    line; see `StdinTest`.
    """
    actual, expected_lines = words_by_line(printed), words_by_line(expected)
    return len(actual) == len(expected_lines) and all(map(lines_match, actual, expected_lines))


def words_by_line(text: str) -> list[list[str]]:
    """Return the words of each line. White space at the end of the text is ignored."""
    return [line.split() for line in text.rstrip().split("\n")]


def lines_match(printed: Sequence[str], expected: Sequence[str]) -> bool:
    """Return whether two lines, given as lists of words, have the same words."""
    return len(printed) == len(expected) and all(map(words_match, printed, expected))


def words_match(printed: str, expected: str) -> bool:
    """Return whether a printed word and `expected` are equal, up to `TOLERANCE` if `expected` is a
    decimal number.
    """
    if DECIMAL_NUMBER.fullmatch(expected) and ANY_NUMBER.fullmatch(printed):
        return is_close(float(printed), float(expected))
    return printed == expected


def values_match(returned: Any, expected: Any) -> bool:
    """Return whether two values in the form of `to_json_value` are equal, up to `TOLERANCE` for
    floats.
    """
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, float | int) and isinstance(expected, float | int):
        if isinstance(returned, int) and isinstance(expected, int):
            return returned == expected
        return is_close(returned, expected)
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(values_match, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(
            values_match(returned[key], expected[key]) for key in expected
        )
    return type(returned) is type(expected) and returned == expected


def is_close(actual: float, expected: float) -> bool:
    """Return whether `actual` equals `expected` up to `TOLERANCE`."""
    try:
        return math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an int larger than any float
        return False


def is_literal(value: Any) -> bool:
    """Return whether `ast.literal_eval(repr(value))` returns a value equal to `value`."""
    if value is None or type(value) in (bool, int, str):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            is_literal(item) for pair in value.items() for item in pair
        )
    if type(value) is set and not value:
        return False
    return type(value) in (list, tuple, set) and all(map(is_literal, value))
