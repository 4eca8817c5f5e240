"""Exact arithmetic on expressions as people write them, without `eval`.

Python's parser parses the expression; anything but numbers and the operators below is rejected.
Values are fractions, so 0.1 + 0.2 is 0.3. Length and size are limited, since the text may come from
a language model, and a short text such as 9**9**9 would compute forever.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from planish.errors import UserError

MAX_CHARS = 200
MAX_BITS = 1000
"""Maximum size of numerator and denominator; such a number still fits into a float."""
SIGNIFICANT_DIGITS = 12

ALLOWED = re.compile(r"[0-9+\-*/%(). ]*")
SPELLINGS = {"x": "*", "×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", "[": "(", "]": ")"}
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")

BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}
UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ExpressionError(UserError):
    """The text is not an arithmetic expression, or its value is undefined or too large."""


def evaluate(expression: str) -> Fraction:
    """Return the value of an expression of numbers, + - * / // % ** and parentheses. Raises
    ExpressionError if it has none.
    """
    if len(expression) > MAX_CHARS:
        raise ExpressionError(
            f"the expression has {len(expression)} characters; write at most {MAX_CHARS}"
        )
    text = THOUSANDS.sub(
        "", "".join(SPELLINGS.get(character, character) for character in expression)
    ).strip()
    if not text or ALLOWED.fullmatch(text) is None:
        raise ExpressionError(
            f"{expression!r} is not an arithmetic expression; write numbers, + - * / ** and "
            "parentheses"
        )
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ExpressionError(
            f"{expression!r} cannot be read; check its parentheses and operators"
        ) from None
    return _value(tree.body, text)


def decimal(value: Fraction) -> str:
    """Return a number as a decimal with at most SIGNIFICANT_DIGITS digits; an integer with all its
    digits.
    """
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{SIGNIFICANT_DIGITS}g}"


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, with or without thousands separators; None if there is
    none.
    """
    found = re.findall(r"-?[0-9]+(?:\.[0-9]+)?", THOUSANDS.sub("", text.replace("−", "-")))
    return Fraction(found[-1]) if found and len(found[-1]) <= MAX_CHARS else None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            # Use the digits in the source, because a float would round them.
            return _bounded(Fraction(ast.get_source_segment(text, node) or ""))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand, text))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, text), _value(right, text))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            operands = _value(left, text), _value(right, text)
            if operands[1] == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
                raise ExpressionError("division by zero")
            return _bounded(BINARY[type(op)](*operands))
        case _:
            raise ExpressionError(f"{ast.unparse(node)} is not a number or one of + - * / // % **")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("only whole exponents can be computed exactly")
    if base == 0 and exponent < 0:
        raise ExpressionError("division by zero")
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > MAX_BITS or abs(exponent) > MAX_BITS:
        raise ExpressionError("the value is too large")
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > MAX_BITS:
        raise ExpressionError("the value is too large")
    return value
