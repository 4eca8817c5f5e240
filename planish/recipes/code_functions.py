"""Small functions to be written, described step by step: drawn as many as one wants, with tests.

    Write a function f(x) that takes a number x, adds 7, then multiplies it by 3, and returns the result.

A problem is a kind of value (number, text or list) and `steps` operations on it, each of which has
words, code and a meaning. Problems that differ in one number are different problems, so there are
thousands, and those of the test are kept out of training by their question. Values are small, and
the tests of a problem are drawn with it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planish.recipes.code_problems import CodeProblem
from planish.sandbox import FunctionTest

TESTS = 4
SHOWN_TESTS = 2
LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Operation:
    words: str
    """As in "adds 7"."""
    code: str
    """An expression of the argument's name."""
    apply: Callable[[Any], Any]


@dataclass(frozen=True)
class ValueKind:
    """What a function takes."""

    name: str
    argument: str
    draw_value: Callable[[random.Random], Any]
    draw_operation: Callable[[random.Random], Operation]


@dataclass(frozen=True)
class FunctionProblem:
    """A problem and the function that solves it."""

    problem: CodeProblem
    solution: str
    """Its source."""


def draw_function(rng: random.Random, steps: int) -> FunctionProblem:
    kind = rng.choice(KINDS)
    operations = [kind.draw_operation(rng) for _ in range(steps)]
    inputs = distinct_inputs(kind, rng)
    tests = tuple(FunctionTest("f", (value,), applied(operations, value)) for value in inputs)
    listed = ", then ".join(operation.words for operation in operations)
    question = f"Write a function f({kind.argument}) that takes a {kind.name} {kind.argument}, {listed}, and returns the result."
    return FunctionProblem(
        CodeProblem(question, tests, tests[:SHOWN_TESTS]), written(kind.argument, operations)
    )


def distinct_inputs(kind: ValueKind, rng: random.Random) -> list[Any]:
    inputs: list[Any] = []
    while len(inputs) < TESTS:
        if (value := kind.draw_value(rng)) not in inputs:
            inputs.append(value)
    return inputs


def applied(operations: Sequence[Operation], value: Any) -> Any:
    for operation in operations:
        value = operation.apply(value)
    return value


def written(argument: str, operations: Sequence[Operation]) -> str:
    """A line for each operation: what small models copy best."""
    *before, last = operations
    lines = [f"    {argument} = {operation.code}" for operation in before]
    return "\n".join([f"def f({argument}):", *lines, f"    return {last.code}"])


def number_operation(rng: random.Random) -> Operation:
    n = rng.randint(2, 9)
    return rng.choice(
        [
            Operation(f"adds {n}", f"x + {n}", lambda x: x + n),
            Operation(f"subtracts {n}", f"x - {n}", lambda x: x - n),
            Operation(f"multiplies it by {n}", f"x * {n}", lambda x: x * n),
            Operation(f"takes the remainder after division by {n}", f"x % {n}", lambda x: x % n),
        ]
    )


def text_operation(rng: random.Random) -> Operation:
    n, end = rng.randint(2, 4), "".join(rng.choices(LETTERS, k=2))
    return rng.choice(
        [
            Operation("reverses it", "s[::-1]", lambda s: s[::-1]),
            Operation("makes it upper case", "s.upper()", lambda s: s.upper()),
            Operation(f"repeats it {n} times", f"s * {n}", lambda s: s * n),
            Operation(f"appends '{end}'", f"s + '{end}'", lambda s: s + end),
            Operation(f"removes the first {n} characters", f"s[{n}:]", lambda s: s[n:]),
        ]
    )


def list_operation(rng: random.Random) -> Operation:
    n = rng.randint(2, 9)
    return rng.choice(
        [
            Operation("sorts it", "sorted(a)", sorted),
            Operation("reverses it", "a[::-1]", lambda a: a[::-1]),
            Operation(f"appends {n}", f"a + [{n}]", lambda a: [*a, n]),
            Operation(
                f"adds {n} to each number", f"[v + {n} for v in a]", lambda a: [v + n for v in a]
            ),
            Operation("removes the first number", "a[1:]", lambda a: a[1:]),
        ]
    )


KINDS = (
    ValueKind("number", "x", lambda rng: rng.randint(0, 99), number_operation),
    ValueKind(
        "text", "s", lambda rng: "".join(rng.choices(LETTERS, k=rng.randint(3, 7))), text_operation
    ),
    ValueKind(
        "list",
        "a",
        lambda rng: [rng.randint(0, 9) for _ in range(rng.randint(2, 5))],
        list_operation,
    ),
)
