r"""Programming problems with tests, read from the formats of published collections.

A row has a question ("question", "problem", "prompt" or "text"), optionally "starter_code", and
tests, as a value or as its JSON. The formats of tests are:

A program that reads standard input and prints:

    "tests": [{"input": "2 3\n", "output": "5\n"}]

A function, or a method of a class Solution. The returned value is in a list:

    "tests": [{"fn_name": "add", "input": [2, 3], "output": [5]}]

All inputs in one list and all outputs in another, with "fn_name" for functions. APPS and TACO call
this field "input_output":

    "tests": {"inputs": ["2 3\n"], "outputs": ["5\n"]}

LiveCodeBench, with one JSON value per line, and "metadata": {"func_name": "add"}:

    "tests": [{"input": "2\n3", "output": "5", "testtype": "functional"}]

MBPP:

    "test_list": ["assert add(2, 3) == 5"]

With env=repair, the policy sees the tests in the field "public_tests", which may have any of these
formats. If a row has no such field, the policy sees the first few of its tests. A row without a
test that can be run is left out.

An assertion contains the expected value, so it never runs in the sandbox, where the program could
read that value. It is split into a call, which runs in the sandbox, and the expected value. This
works for `assert f(literals) == literal`; a row with any other assertion is left out.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from planish.errors import UserError
from planish.sandbox import FunctionTest, ProgramTest, StdinTest

QUESTION_KEYS = ("question", "problem", "prompt", "text")
TEST_KEYS = ("tests", "input_output", "test_list")
TEST_FIELDS = ("input", "output", "inputs", "outputs", "fn_name", "type", "testtype")
"""The fields of tests. "type" adds nothing: a test of a function has an "fn_name"."""

Row = Mapping[str, Any]


class UnusableTestError(ValueError):
    """A test that cannot be run."""


@dataclass(frozen=True)
class CodeProblem:
    """A problem with its tests."""

    question: str
    tests: tuple[ProgramTest, ...]
    """All tests that a program must pass."""
    public_tests: tuple[ProgramTest, ...] = ()
    """Tests that may be shown to the policy. They need not be in `tests`."""
    starter_code: str = ""
    location: str = field(default="", compare=False, repr=False)
    """The place of its row, such as file and line, for messages; "" if it is not from a row."""

    @property
    def hidden_tests(self) -> tuple[ProgramTest, ...]:
        """The tests that are not public. If all tests are public, these are all tests."""
        return tuple(test for test in self.tests if test not in self.public_tests) or self.tests

    @property
    def function(self) -> str | None:
        """Name of the function to write; None for a program that reads input and prints."""
        first = self.tests[0]
        return first.function if isinstance(first, FunctionTest) else None


def read_problem(
    row: Row, where: str, shown_tests: int, max_tests: int | None
) -> CodeProblem | None:
    """Return the problem of a row with at most `max_tests` tests; None if no test can be run. A row
    without a question or without tests raises UserError, which names the row by `where`. If the row
    has no public tests, its first `shown_tests` tests are public.
    """
    question = next((row[name] for name in QUESTION_KEYS if isinstance(row.get(name), str)), None)
    test_data = next((row[name] for name in TEST_KEYS if row.get(name)), None)
    if question is None or all(name not in row for name in TEST_KEYS):
        raise UserError(
            f"{where}: needs a text in one of {', '.join(QUESTION_KEYS)} and tests in one of "
            f"{', '.join(TEST_KEYS)}; the row has {sorted(row)}"
        )
    name = function_name(row)
    try:
        tests = tuple(read_tests(test_data, name))[:max_tests]
        public_tests = tuple(read_tests(row.get("public_tests"), name)) or tests[:shown_tests]
    except UnusableTestError:
        return None
    if not tests:
        return None
    return CodeProblem(
        question.strip(), tests, public_tests, str(row.get("starter_code") or "").rstrip()
    )


def unused_fields(row: Row) -> dict[str, Any]:
    """Return the columns of a row that `read_problem` does not use, and the fields of its tests
    that no test has, as "COLUMN[].FIELD".
    """
    question = next((name for name in QUESTION_KEYS if isinstance(row.get(name), str)), None)
    tests = next((name for name in TEST_KEYS if row.get(name)), None)
    metadata = "metadata" if function_name(row) else None
    used = {question, tests, metadata, "starter_code", "public_tests"}
    unused = {name: value for name, value in row.items() if name not in used}
    for column in (tests, "public_tests"):
        data = row.get(column) if column else None
        for test in data if isinstance(data, list) else [data]:
            for name, value in test.items() if isinstance(test, Mapping) else ():
                if name not in TEST_FIELDS:
                    unused[f"{column}[].{name}"] = value
    return unused


def with_parsed_tests(row: Row) -> dict[str, Any]:
    """Return a row whose tests are values, and not JSON text. Text that is no JSON stays."""
    parsed = dict(row)
    for name in (*TEST_KEYS, "public_tests"):
        if name in row:
            with suppress(UnusableTestError):
                parsed[name] = from_json(row[name])
    return parsed


def function_name(row: Row) -> str | None:
    """Return the function name in a row's "metadata", as in LiveCodeBench; None if there is none.
    Other collections may have metadata that is not JSON.
    """
    try:
        metadata = from_json(row.get("metadata"))
    except UnusableTestError:
        return None
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def read_tests(test_data: Any, function: str | None) -> Iterator[ProgramTest]:
    """Yield the tests in `test_data`, which has any of the formats. `function` is the function name
    in a row of LiveCodeBench. A test that cannot be run raises UnusableTestError.
    """
    test_data = from_json(test_data)
    if isinstance(test_data, Mapping):
        inputs, outputs = test_data.get("inputs"), test_data.get("outputs")
        if (
            not isinstance(inputs, Sequence)
            or not isinstance(outputs, Sequence)
            or len(inputs) != len(outputs)
        ):
            raise UnusableTestError
        test_data = [
            {"input": test_input, "output": output, "fn_name": test_data.get("fn_name")}
            for test_input, output in zip(inputs, outputs, strict=True)
        ]
    if test_data and not isinstance(test_data, Sequence):
        raise UnusableTestError
    for test in test_data or ():
        yield read_assertion(test) if isinstance(test, str) else read_test(test, function)


def read_test(test: Any, function: str | None) -> ProgramTest:
    """Return the test of a mapping with "input" and "output"."""
    if not isinstance(test, Mapping) or "input" not in test or "output" not in test:
        raise UnusableTestError
    test_input, expected = test["input"], test["output"]
    name = test.get("fn_name")
    if name:
        if not isinstance(test_input, list):
            raise UnusableTestError
        return function_test(name, test_input, returned_value(expected))
    if test.get("testtype") == "functional":
        if not function or not isinstance(test_input, str) or not isinstance(expected, str):
            raise UnusableTestError
        return function_test(
            function,
            [parse_json(line) for line in test_input.split("\n") if line.strip()],
            parse_json(expected),
        )
    return StdinTest(as_text(test_input), as_text(expected))


def read_assertion(source: str) -> FunctionTest:
    """Return the test of an assertion such as `assert f(1, [2]) == 3`."""
    try:
        statement = ast.parse(source.strip()).body
        match statement:
            case [
                ast.Assert(
                    ast.Compare(ast.Call(ast.Name(name), arguments, []), [ast.Eq()], [expected])
                )
            ]:
                values = [ast.literal_eval(argument) for argument in arguments]
                return function_test(name, values, ast.literal_eval(expected))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise UnusableTestError from error
    raise UnusableTestError


def function_test(name: str, arguments: Sequence[Any], expected: Any) -> FunctionTest:
    """Return a test of a function. Raises UnusableTestError if its values cannot be sent to a
    program.
    """
    try:
        return FunctionTest(name, tuple(arguments), expected)
    except UserError as error:
        raise UnusableTestError from error


def returned_value(expected: Any) -> Any:
    """Return the value in a list of one value; any other value unchanged."""
    return expected[0] if isinstance(expected, list) and len(expected) == 1 else expected


def as_text(value: Any) -> str:
    """Return an input or output as text. A few collections have a list of lines instead."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise UnusableTestError
    return value


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises UnusableTestError if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableTestError from error


def from_json(given: Any) -> Any:
    """Return the value of a JSON text; any other value unchanged."""
    return parse_json(given) if isinstance(given, str) and given.strip() else given
