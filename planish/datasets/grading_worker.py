"""The comparison of answers. `grading.Grader` runs this in a process that it kills if it hangs.

A request has "answer" and "expected"; the reply says whether they are "equal".
"""

import logging
from collections.abc import Callable
from typing import Any

# Only killing the process ends a power tower such as 9^{9^{9}}. The library's own alarm cannot
# interrupt it.
PARSE_OPTIONS = {"parsing_timeout": None, "raise_on_error": True}
DECIMAL_TOLERANCE = 1e-3
"""Relative difference above which a decimal differs from another number."""
IRRATIONAL_TOLERANCE = 1e-12
"""Relative difference above which two numbers differ if one is irrational, such as sqrt(2)."""
_MIN_MAGNITUDE = 1e-60
"""Below this magnitude an irrational number may be a rounding error of 0."""


def start() -> Callable[[dict[str, str]], dict[str, bool]]:
    """Import math-verify and return the function that handles a request."""
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def compare(request: dict[str, str]) -> dict[str, bool]:
        expected, answer = (
            parse(f"${request[name]}$", **PARSE_OPTIONS) for name in ("expected", "answer")
        )
        equal = compare_values(expected[0], answer[0]) if expected and answer else None
        if equal is None:
            equal = bool(verify(expected, answer, timeout_seconds=None, raise_on_error=True))
        return {"equal": equal}

    return compare


def compare_values(expected: Any, answer: Any) -> bool | None:
    """Return whether two parsed values are equal; None if math-verify has to decide.

    math-verify compares many numbers with an absolute tolerance, so all numbers near 0 would be
    equal. Rational numbers are compared exactly here, and other numbers with a relative tolerance.
    Intervals, tuples, sets and matrices differ if two of their numbers at the same place differ.
    """
    expected_elements, answer_elements = _elements(expected), _elements(answer)
    if expected_elements is None or answer_elements is None:
        return _compare_numbers(expected, answer)
    pairs = zip(expected_elements, answer_elements, strict=False)
    has_same_form = type(expected) is type(answer) and len(expected_elements) == len(
        answer_elements
    )
    if has_same_form and any(_compare_numbers(*pair) is False for pair in pairs):
        return False
    return None


def _elements(value: Any) -> list[Any] | None:
    """Return the elements of an interval, tuple, set of rationals or matrix; None for others."""
    from sympy import FiniteSet, Interval, MatrixBase, Rational, Tuple

    if isinstance(value, Interval):
        return [value.start, value.end]
    if isinstance(value, MatrixBase):
        return list(value.flat())
    if isinstance(value, Tuple):
        return list(value.args)
    if isinstance(value, FiniteSet):
        numbers = [_number(element) for element in value.args]
        is_rational = all(isinstance(number, Rational) for number in numbers)
        return sorted(numbers) if is_rational else None
    return None


def _number(value: Any) -> Any:
    """Return the evaluated number; None for a percentage or a value that is not a real number."""
    from sympy import Expr, UnevaluatedExpr

    # math-verify writes 50% as 50 * UnevaluatedExpr(1/100), and accepts 50 and 1/2 for it.
    if not isinstance(value, Expr) or value.has(UnevaluatedExpr) or value.free_symbols:
        return None
    number = value.doit()
    return number if number.is_number and number.is_extended_real and number.is_finite else None


def _compare_numbers(expected: Any, answer: Any) -> bool | None:
    from sympy import Float, Rational

    numbers = [_number(expected), _number(answer)]
    if any(number is None for number in numbers):
        return None
    if all(isinstance(number, Rational) for number in numbers):
        return numbers[0] == numbers[1]
    is_decimal = any(number.has(Float) for number in numbers)
    tolerance = DECIMAL_TOLERANCE if is_decimal else IRRATIONAL_TOLERANCE
    magnitude = max(abs(number.evalf(20)) for number in numbers)
    difference = abs((numbers[0] - numbers[1]).evalf(20))
    return False if magnitude > _MIN_MAGNITUDE and difference > tolerance * magnitude else None
