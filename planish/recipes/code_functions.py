"""Generated programming problems: small functions that are described step by step, with tests.

    Write a function f(x) that takes a number x, adds 7, then multiplies it by 3, and returns the
    result.

A problem has a kind of value (number, text or list) and `steps` operations on it. Each operation
has a description, its code and a Python function. Most operations contain a random number or random
letters, so there are thousands of problems. Test problems are recognised by their question and
never trained on. Values are small. The tests of a problem are generated with it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planish.recipes.code_problems import CodeProblem
from planish.sandbox import FunctionTest

NUM_TESTS = 4
NUM_PUBLIC_TESTS = 2
LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Operation:
    """One step of a function."""

    words: str
    """Its description, such as "adds 7"."""
    code: str
    """A Python expression of the argument, such as "x + 7"."""
    apply: Callable[[Any], Any]


@dataclass(frozen=True)
class ValueKind:
    """A type of argument, with generators of its values and operations."""

    name: str
    argument: str
    sample_value: Callable[[random.Random], Any]
    sample_operation: Callable[[random.Random], Operation]


@dataclass(frozen=True)
class FunctionProblem:
    """A problem and the function that solves it."""

    problem: CodeProblem
    solution: str
    """Source of the function."""


def sample_function(rng: random.Random, steps: int) -> FunctionProblem:
    """Return a random problem with `steps` operations, its tests and its solution."""
    kind = rng.choice(KINDS)
    operations = [kind.sample_operation(rng) for _ in range(steps)]
    inputs = distinct_inputs(kind, rng)
    tests = tuple(FunctionTest("f", (value,), apply_all(operations, value)) for value in inputs)
    description = ", then ".join(operation.words for operation in operations)
    question = (
        f"Write a function f({kind.argument}) that takes a {kind.name} {kind.argument}, "
        f"{description}, and returns the result."
    )
    return FunctionProblem(
        CodeProblem(question, tests, tests[:NUM_PUBLIC_TESTS]), source_of(kind.argument, operations)
    )


def distinct_inputs(kind: ValueKind, rng: random.Random) -> list[Any]:
    """Return random arguments for the tests, all different."""
    inputs: list[Any] = []
    while len(inputs) < NUM_TESTS:
        value = kind.sample_value(rng)
        if value not in inputs:
            inputs.append(value)
    return inputs


def apply_all(operations: Sequence[Operation], value: Any) -> Any:
    """Return what the function of these operations returns for the argument `value`."""
    for operation in operations:
        value = operation.apply(value)
    return value


def source_of(argument: str, operations: Sequence[Operation]) -> str:
    """Return the source of the function, with one line for each operation. Small models copy this
    style best.
    """
    *before, last = operations
    lines = [f"    {argument} = {operation.code}" for operation in before]
    return "\n".join([f"def f({argument}):", *lines, f"    return {last.code}"])


def number_operation(rng: random.Random) -> Operation:
    """Return a random operation on a number."""
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
    """Return a random operation on a text."""
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
    """Return a random operation on a list of numbers."""
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
