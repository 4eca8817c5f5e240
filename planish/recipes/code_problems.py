r"""Programming problems with tests, read from the forms in which they are published.

A row has a question ("question", "problem", "prompt" or "text"), perhaps "starter_code", and tests,
as a value or as its JSON:

    "tests": [{"input": "2 3\n", "output": "5\n"}]                            a program that reads
        and prints
    "tests": [{"fn_name": "add", "input": [2, 3], "output": [5]}]             a function, or a
        method of class Solution
    "tests": {"inputs": ["2 3\n"], "outputs": ["5\n"]}                        the same by columns,
        with "fn_name" for functions;
                                                                              APPS and TACO call it "input_output"
    "tests": [{"input": "2\n3", "output": "5", "testtype": "functional"}]     LiveCodeBench: a JSON
        value a line, and
                                                                              "metadata": {"func_name": "add"}
    "test_list": ["assert add(2, 3) == 5"]                                    MBPP

What a function returns stands in a list of one value, as these collections write it.
"public_tests", in any of the forms, are those that env=repair shows; without them it shows the
first of the others. A row with no test that can be run is left out.

An assertion holds its own answer, so it is never run: it is taken apart into a call, which goes
into the sandbox, and a value, which does not. That can be done with `assert f(literals) ==
literal`; a row with another assertion is left out.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.errors import UserError
from planish.sandbox import FunctionTest, ProgramTest, StdinTest

QUESTIONS = ("question", "problem", "prompt", "text")
TESTS = ("tests", "input_output", "test_list")

Row = Mapping[str, Any]


class UnusableTestError(ValueError):
    """A test that cannot be run."""


@dataclass(frozen=True)
class CodeProblem:
    question: str
    tests: tuple[ProgramTest, ...]
    """All that a program must pass."""
    public_tests: tuple[ProgramTest, ...] = ()
    """Those that may be shown; some of `tests`, or others."""
    starter_code: str = ""

    @property
    def hidden_tests(self) -> tuple[ProgramTest, ...]:
        """Those of `tests` that are not public; all of them if none would be left."""
        return tuple(test for test in self.tests if test not in self.public_tests) or self.tests

    @property
    def function(self) -> str | None:
        """The function that is to be written; None for a program that reads and prints."""
        first = self.tests[0]
        return first.function if isinstance(first, FunctionTest) else None


def read_problem(
    row: Row, where: str, shown_tests: int, max_tests: int | None
) -> CodeProblem | None:
    """A row as a problem with at most `max_tests` tests, None if it has no test that can be run;
    UserError, with `where`, for another form. `shown_tests`: how many are public where the row does
    not say.
    """
    question = next((row[name] for name in QUESTIONS if isinstance(row.get(name), str)), None)
    given = next((row[name] for name in TESTS if row.get(name)), None)
    if question is None or all(name not in row for name in TESTS):
        raise UserError(
            f"{where}: needs a text in one of {', '.join(QUESTIONS)} and tests in one of {', '.join(TESTS)}; the row has "
            f"{sorted(row)}"
        )
    name = function_name(row)
    try:
        tests = tuple(read_tests(given, name))[:max_tests]
        public = tuple(read_tests(row.get("public_tests"), name)) or tests[:shown_tests]
    except UnusableTestError:
        return None
    if not tests:
        return None
    return CodeProblem(question.strip(), tests, public, str(row.get("starter_code") or "").rstrip())


def function_name(row: Row) -> str | None:
    """Where a whole row has one; what other collections write there is no JSON, or says nothing of
    functions.
    """
    try:
        metadata = loaded(row.get("metadata"))
    except UnusableTestError:
        return None
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def read_tests(given: Any, function: str | None) -> Iterator[ProgramTest]:
    """Tests in any of the forms; `function`: the name that LiveCodeBench gives beside them."""
    given = loaded(given)
    if isinstance(given, Mapping):
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if (
            not isinstance(inputs, Sequence)
            or not isinstance(outputs, Sequence)
            or len(inputs) != len(outputs)
        ):
            raise UnusableTestError
        given = [
            {"input": one, "output": other, "fn_name": given.get("fn_name")}
            for one, other in zip(inputs, outputs, strict=True)
        ]
    if given and not isinstance(given, Sequence):
        raise UnusableTestError
    for test in given or ():
        yield read_assertion(test) if isinstance(test, str) else read_test(test, function)


def read_test(test: Any, function: str | None) -> ProgramTest:
    if not isinstance(test, Mapping) or "input" not in test or "output" not in test:
        raise UnusableTestError
    given, expected = test["input"], test["output"]
    name = test.get("fn_name")
    if name:
        if not isinstance(given, list):
            raise UnusableTestError
        return function_test(name, given, sole(expected))
    if test.get("testtype") == "functional":
        if not function or not isinstance(given, str) or not isinstance(expected, str):
            raise UnusableTestError
        return function_test(
            function, [parsed(line) for line in given.split("\n") if line.strip()], parsed(expected)
        )
    return StdinTest(as_text(given), as_text(expected))


def read_assertion(source: str) -> FunctionTest:
    """`assert f(1, [2]) == 3`."""
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
    try:
        return FunctionTest(name, tuple(arguments), expected)
    except UserError as error:
        raise UnusableTestError from error


def sole(expected: Any) -> Any:
    """A returned value out of the list that it stands in."""
    return expected[0] if isinstance(expected, list) and len(expected) == 1 else expected


def as_text(given: Any) -> str:
    """A few collections have lines instead of a text."""
    if isinstance(given, list) and all(isinstance(line, str) for line in given):
        return "\n".join(given)
    if not isinstance(given, str):
        raise UnusableTestError
    return given


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableTestError from error


def loaded(given: Any) -> Any:
    """What a text of JSON says; anything else as it is."""
    return parsed(given) if isinstance(given, str) and given.strip() else given
