r"""Grade an answer in \boxed{}: check whether it equals the known answer.

Two numbers are compared by value, in the forms in which people write them (1,234 or 1\,234, 1.5e3,
2 1/2, 72 cm^2). An answer that names several values is wrong, because a policy could hedge.
docs/guide/evaluation.md has the table of forms.

math-verify compares all other answers, in a sandboxed process that can be killed. An answer such as
9^{9^{9^{9}}} would occupy a computer algebra system forever, and neither an alarm nor a thread can
interrupt it there.

GradingError is raised, and counted, if an answer cannot be graded: the library fails on it, it
takes too long, or the machine has no sandbox. The caller decides which reward that means.
"""

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Self

from planish.errors import UnjudgedAnswerError
from planish.sandbox.errors import SandboxUnavailableError
from planish.sandbox.worker_process import WorkerError, WorkerProcess, WorkerStartError

logger = logging.getLogger(__name__)

_DIGITS = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"{_DIGITS}(?:[eE][-+]?\d{{1,3}})?")
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\}|\\[ ,!]| )\d{3})+(?:\.\d+)?")
_MAX_CHARACTERS = 1000
"""The maximum number of characters of a number; Python rejects numbers of more than 4300 digits."""
_GROUP_SEPARATOR = re.compile(r",|\{,\}|\\[ ,!]| ")
_POWER_OF_TEN = re.compile(rf"({_DIGITS})\s*\\(?:times|cdot)\s*10\^(?:\{{([-+]?\d{{1,3}})\}}|(\d))")
_MIXED_NUMBER = re.compile(r"([-+]?)(\d+)(?:\s+(\d+)/(\d+)|\s*\\[dt]?frac\{(\d+)\}\{(\d+)\})")
_UNIT = re.compile(
    r"\s+(?:square |cubic |sq\.? )?(?:mm|cm|dm|m|km|in|inch|inches|ft|foot|feet|yd|yards?|mi|miles?|"
    r"mg|g|kg|grams?|lbs?|pounds?|oz|ounces?|ml|l|lit(?:er|re)s?|s|sec|seconds?|min|minutes?|h|hrs?|"
    r"hours?|days?|weeks?|months?|years?|dollars?|cents?|degrees?|percent|mph|km/h|m/s|units?|meters?|"
    r"metres?)(?:\^(?:[23]|\{[23]\}))?"
)
"""A unit after a number, separated by a space."""
_VALUE_SEPARATORS = (r"\\", "&", "#", ";", "$", " or ", " and ", r"\text{or}", r"\text{ or }")
"""Separators of several values. An answer may have one only if the known answer has it too."""
_NUMBER_LITERAL = re.compile(r"\d+(?:\.\d+)?")
_SEPARATOR_IN_NUMBER = re.compile(r"(?<=\d)(?:,|\{,\}|\\[ ,!])(?=\d{3}(?!\d))")
_SUBSCRIPT_OR_WORD = re.compile(
    r"(?<=[A-Za-z])_(?:\d|\{\w+\})|\\(?:text|mathrm|mbox|textrm)\{[^{}]*\}(?:\^(?:\d|\{\d\}))?"
)
"""Subscripts, and words such as units, whose digits are not values."""
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
_ARITHMETIC = re.compile(
    r"[-+*/^(!÷×·]|\\(?:[dt]?frac|[dt]?binom|sqrt|cdot|times|div|pi|log|ln|exp|sin|cos|tan)(?![A-Za-z])|"
    r"\}\s*[\[{]|\]\s*\{|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
)
"""Operators that combine two numbers into one value."""
_BRACKET_OR_SPACE = re.compile(r"[\s()\[\]{}]|\\(?:left|right|quad)(?![A-Za-z])|\\[ ,;:!]")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
BOX_START = r"\boxed{"
_BRACE_OR_ESCAPE = re.compile(r"[{}]|\\.", re.DOTALL)
r"""A brace, or a backslash with the character after it. So `\}` is no brace, but `\\}` ends with one:
a line break and a closing brace.
"""


class GradingError(UnjudgedAnswerError):
    """The answer could not be graded."""


@dataclass(frozen=True)
class Grade:
    """The result of grading a response."""

    boxed: str | None
    """The content of the last box; None if there is no closed box."""
    correct: bool


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} whose braces match; it may contain braces itself.

    None if there is no such box.
    """
    last_box: tuple[int, int] | None = None
    open_braces: list[int] = []
    """The start of the content of each brace that is not closed yet."""
    for match in _BRACE_OR_ESCAPE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.end())
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            if text.endswith(BOX_START, 0, start) and (last_box is None or start > last_box[0]):
                last_box = start, match.start()
    return None if last_box is None else text[slice(*last_box)].strip()


class Grader:
    """Compares answers.

    It owns one process, started at the first answer that is not a plain number.
    """

    def __init__(self, timeout_seconds: float = 5.0) -> None:
        self.timeout_seconds = timeout_seconds
        self.num_failures = 0
        """How many answers raised GradingError."""
        self._process = WorkerProcess(Path(__file__).with_name("grading_worker.py"))
        self._has_warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, response: str, expected: str) -> Grade:
        """Grade the last box of a response. Raise GradingError if its content cannot be graded."""
        boxed = extract_boxed(response)
        return Grade(boxed, boxed is not None and self.equal(boxed, expected))

    def equal(self, answer: str, expected: str) -> bool:
        """Return whether an answer equals the expected one.

        Raise GradingError if the two cannot be compared.
        """
        answer_text, expected_text = _normalize(answer), _normalize(expected)
        if not answer_text:  # also if the expected answer is empty
            return False
        if answer_text == expected_text:
            return True
        if any(sign in answer_text and sign not in expected_text for sign in _VALUE_SEPARATORS):
            return False
        sides = [side.strip() for side in answer_text.split("=")]
        if len(sides) > 1 and "=" not in expected_text:
            # `x = 72` names 72. In `2 + 70 = 72` both sides equal it; in `73 = 72` they do not.
            values = [side for side in sides if not _is_variable(side)]
            return bool(values) and all(self.equal(side, expected) for side in values)
        numbers = parse_number(answer_text), parse_number(expected_text)
        if numbers[0] is not None and numbers[1] is not None:
            return numbers[0] == numbers[1]
        if numbers[0] is not None:  # math-verify does not parse all of these forms
            answer_text = str(numbers[0])
        elif is_one_value(expected_text) and not is_one_value(answer_text):
            return False
        try:
            reply = self._process.request(
                {"answer": answer_text, "expected": expected_text}, self.timeout_seconds
            )
        except SandboxUnavailableError as error:
            if numbers[1] is None:
                raise
            # The known answer is a number, so most answers need no process: continue without it.
            self.num_failures += 1
            if not self._has_warned:
                self._has_warned = True
                logger.warning("answers other than plain numbers cannot be graded: %s", error)
            raise GradingError(
                f"the answer {answer[:200]!r} could not be graded: {error}"
            ) from error
        except WorkerStartError as error:
            raise WorkerStartError(
                f"the grading process did not start: {error}; is math-verify installed?"
            ) from error
        except WorkerError as error:
            self.num_failures += 1
            message = (
                f"the answer {answer[:200]!r} could not be compared with {expected!r}: {error}"
            )
            raise GradingError(message) from error
        return bool(reply["equal"])

    def close(self) -> None:
        """Stop the grading process."""
        self._process.close()


def _normalize(answer: str) -> str:
    text = answer.strip().strip("$").strip().removesuffix(".").strip()
    while text.endswith("\\\\"):  # a line break after the answer
        text = text.removesuffix("\\\\").strip()
    return text.removeprefix("\\$").strip()


def is_one_value(text: str) -> bool:
    """Return whether arithmetic connects all numbers of `text`, so that it names one value.

    `72|73` and `72 73` are not one value: math-verify might use either number.
    """
    text = _SHORT_FRACTION.sub(
        r"\1/\2", _SUBSCRIPT_OR_WORD.sub(" ", _SEPARATOR_IN_NUMBER.sub("", text))
    )
    depth = 0
    for character in re.sub(r"\\[\\{}]", "", text):
        depth += _BRACKETS.get(character, 0)
        if depth < 0:
            return False
    return depth == 0 and all(map(_is_arithmetic, _NUMBER_LITERAL.split(text)[1:-1]))


def _is_arithmetic(between: str) -> bool:
    """Return whether the text between two numbers combines them into one value."""
    remainder, operations = _ARITHMETIC.subn("", between)
    return operations > 0 and not _BRACKET_OR_SPACE.sub("", remainder)


def _is_variable(side: str) -> bool:
    r"""Return whether a side of an equation is a name, such as x, x_1, f(x) or \text{Area}."""
    return re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?|\{[A-Za-z ]+\}|\([a-z]\))?", side) is not None


def parse_number(text: str) -> Fraction | None:
    """Return the value of a number, with or without a unit; None for any other expression."""
    if not text.isascii() or len(text) > _MAX_CHARACTERS:
        return None
    unit = _UNIT.search(text)
    if unit is not None and unit.end() == len(text):
        text = text[: unit.start()]
    if _GROUPED_NUMBER.fullmatch(text):
        return Fraction(_GROUP_SEPARATOR.sub("", text))
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if power_match := _POWER_OF_TEN.fullmatch(text):
        return Fraction(power_match[1]) * Fraction(10) ** int(power_match[2] or power_match[3])
    mixed_match = _MIXED_NUMBER.fullmatch(text)
    if mixed_match is None:
        return None
    sign, whole, *fraction_groups = mixed_match.groups()
    numerator, denominator = (int(part) for part in fraction_groups if part is not None)
    if denominator == 0:
        return None
    return (int(whole) + Fraction(numerator, denominator)) * (-1 if sign == "-" else 1)
