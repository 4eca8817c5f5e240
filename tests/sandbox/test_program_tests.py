"""Which outputs count as correct."""

import ast
import asyncio
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from planish.errors import UserError
from planish.sandbox import FunctionTest, Outcome, StdinTest
from planish.sandbox.call import to_json_value
from planish.sandbox.program_tests import is_literal, texts_match, values_match

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
KEYS = st.integers() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS, min_size=1)
    ),
    max_leaves=12,
)


def run(sandbox, test, source):
    return asyncio.run(test.run(sandbox, source))


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("5\n", "5", True),
        ("5  \n\n", "5\n", True),
        ("1 2\n3", "1 2\n3\n", True),
        ("  1   2", "1 2", True),
        ("1\n\n2", "1\n2", False),
        ("0.3333333", "0.33333333", True),
        ("0.334", "0.333", False),
        ("2", "2.0", True),
        ("2.0", "2", False),
        ("1e-9", "0.0", True),
        ("nan", "0.5", False),
        ("1_0.0", "10.0", False),
        ("", "", True),
        ("yes", "Yes", False),
    ],
)
def test_printed_text(printed, expected, same):
    assert texts_match(printed, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        (3, 3.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (True, 1, False),
        (1, True, False),
        (None, 0, False),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        ({2, 1}, {1, 2}, True),
        ({1}, [1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({1: "a"}, {"1": "a"}, False),
        ("5", 5, False),
        (10**400, 1.0, False),
        ([[1], []], [[1], []], True),
    ],
)
def test_returned_values(returned, expected, same):
    assert (
        values_match(json.loads(json.dumps(to_json_value(returned))), to_json_value(expected))
        is same
    )


@pytest.mark.slow
@given(VALUES)
def test_a_value_comes_through_as_itself(value):
    """Values enter as literals and return as JSON."""
    assert is_literal(value)
    there = ast.literal_eval(repr(value))
    assert there == value
    assert values_match(json.loads(json.dumps(to_json_value(there))), to_json_value(value))


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), object(), set(), frozenset({1}), [{1: set()}], type]
)
def test_values_without_a_literal_are_rejected(value):
    with pytest.raises(UserError, match="FunctionTest.arguments of f"):
        FunctionTest("f", [value], 1)
    with pytest.raises(UserError, match="FunctionTest.returned of f"):
        FunctionTest("f", [1], value)
    with pytest.raises(UserError, match=r"function='f\('"):
        FunctionTest("f(", [1], 1)


@pytest.mark.slow
def test_a_program_that_reads_and_prints(sandbox):
    box = sandbox()
    test = StdinTest("3 4\n", "7\n")
    right = run(box, test, "a, b = map(int, input().split())\nprint(a + b)")
    assert (right.outcome, right.answer, right.execution.exit_code) == (Outcome.PASSED, "7\n", 0)
    assert run(box, test, "print(open(0).read().count('3') + 6)").outcome is Outcome.PASSED
    assert run(box, test, "print(8)").outcome is Outcome.WRONG
    broken = run(box, test, "print(7)\nprint(undefined)")
    assert broken.outcome is Outcome.FAILED
    assert b"NameError" in broken.execution.stderr
    assert run(box, test, "def (").outcome is Outcome.FAILED
    assert (
        run(box, test, "if __name__ == '__main__':\n    print(7)\n    exit()").outcome
        is Outcome.PASSED
    )
    for half in ("\udcff", "\ud800"):
        assert run(box, test, half).outcome is Outcome.FAILED
        assert run(box, StdinTest(half, "7"), "print(7)").outcome is Outcome.PASSED


@pytest.mark.slow
def test_a_program_that_takes_too_much(sandbox):
    test = StdinTest("", "7")
    assert run(sandbox(cpu_seconds=1), test, "while True: pass").outcome is Outcome.TIME
    assert run(sandbox(output_bytes=100), test, "while True: print(7)").outcome is Outcome.OUTPUT


@pytest.mark.slow
def test_a_function_that_is_called(sandbox):
    box = sandbox()
    test = FunctionTest("add", [(1, 2), {"x"}], [1, 2, "x"])
    right = run(
        box, test, "print('debug')\ndef add(a, b):\n    print('more')\n    return a + tuple(b)"
    )
    assert (right.outcome, right.answer) == (Outcome.PASSED, '[1, 2, "x"]')
    assert b"debug\nmore" in right.execution.stderr
    method = "class Solution:\n    def add(self, a, b):\n        return [*a, *b]"
    assert run(box, test, method).outcome is Outcome.PASSED
    assert run(box, test, "def add(a, b): return a").outcome is Outcome.WRONG
    for wrong in (
        "def other(a, b): return a",
        "def add(a): return a",
        "def add(a, b): return object()",
        "def add(:",
    ):
        assert run(box, test, wrong).outcome is Outcome.FAILED, wrong
    recursive = "def add(a, b):\n    a = []\n    a.append(a)\n    return a"
    assert run(box, test, recursive).outcome is Outcome.FAILED
    assert (
        run(box, FunctionTest("f", [10**6], 10**2000), "def f(x): return 10**2000").outcome
        is Outcome.PASSED
    )


def test_runs_are_repeatable(sandbox):
    """The order of a set of texts differs between ordinary runs of Python."""
    source = "print(list({str(n) for n in range(50)}))"
    box = sandbox()
    assert asyncio.run(box.run(source)).stdout == asyncio.run(box.run(source)).stdout


def test_the_example_of_the_page(sandbox, capsys):
    sandbox()
    page = (Path(__file__).parents[2] / "docs/reference/sandbox.md").read_text()
    [code], [output] = (
        re.findall(f"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text")
    )
    exec(code, {})
    assert capsys.readouterr().out == output
