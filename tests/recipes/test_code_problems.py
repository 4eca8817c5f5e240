import json
import random

import pytest

from planish.errors import UserError
from planish.recipes.code_functions import apply_all, sample_function
from planish.recipes.code_problems import read_problem
from planish.sandbox import FunctionTest, StdinTest

ADD = FunctionTest("add", (2, 3), 5)
SUM = StdinTest("2 3\n", "5\n")


def read(row, shown_tests=2, max_tests=None):
    return read_problem({"question": " Add. ", **row}, "row 1", shown_tests, max_tests)


@pytest.mark.parametrize(
    ("row", "test"),
    [
        ({"tests": [{"input": "2 3\n", "output": "5\n"}]}, SUM),
        (
            {
                "tests": [
                    {"input": "2 3\n", "output": "5\n", "type": "stdin_stdout", "fn_name": None}
                ]
            },
            SUM,
        ),
        ({"tests": [{"input": "2 3\n", "output": "5\n", "testtype": "stdin"}]}, SUM),
        ({"tests": {"inputs": ["2 3\n"], "outputs": ["5\n"]}}, SUM),
        ({"tests": {"inputs": [["2 3", ""]], "outputs": [["5", ""]]}}, SUM),
        ({"input_output": {"inputs": ["2 3\n"], "outputs": ["5\n"], "fn_name": None}}, SUM),
        ({"tests": [{"fn_name": "add", "input": [2, 3], "output": 5}]}, ADD),
        (
            {
                "tests": [
                    {"type": "function_call", "fn_name": "add", "input": [2, 3], "output": [5]}
                ]
            },
            ADD,
        ),
        ({"input_output": {"inputs": [[2, 3]], "outputs": [[5]], "fn_name": "add"}}, ADD),
        (
            {
                "tests": [{"input": "2\n3", "output": "5", "testtype": "functional"}],
                "metadata": json.dumps({"func_name": "add"}),
            },
            ADD,
        ),
        ({"test_list": ["assert add(2, 3) == 5"]}, ADD),
    ],
)
def test_each_published_form_is_read(row, test):
    for name in ("tests", "input_output"):
        for form in (row, {**row, name: json.dumps(row[name])} if name in row else row):
            problem = read(form)
            assert problem is not None
            assert problem.question == "Add."
            assert problem.tests == problem.public_tests == (test,)
            assert problem.function == ("add" if test is ADD else None)


def test_values_that_only_python_writes():
    problem = read({"test_list": ["assert f((1, 2), {'a': {3}}, -1) == [(1,), None]"]})
    assert problem is not None
    assert problem.tests == (FunctionTest("f", ((1, 2), {"a": {3}}, -1), [(1,), None]),)
    problem = read({"tests": [{"fn_name": "f", "input": [], "output": [[7]]}]})
    assert problem is not None
    assert problem.tests[0] == FunctionTest("f", (), [7])


@pytest.mark.parametrize(
    "assertion",
    [
        "assert f(x) == 3",
        "assert f(3)",
        "assert abs(f(3) - 1) < 0.1",
        "assert f(3) == g(3)",
        "assert f(3, key=1) == 3",
        "assert f(3) == float('inf')",
        "import os; assert f(3) == 3",
        "f(3) == 3",
        "assert (",
        "assert a.f(3) == 3",
    ],
)
def test_other_assertions_leave_the_row_out(assertion):
    assert read({"test_list": [assertion]}) is None
    assert read({"test_list": ["assert f(3) == 3", assertion]}) is None


@pytest.mark.parametrize(
    "tests",
    [
        [],
        "",
        None,
        "not json",
        "5",
        {"inputs": ["1"], "outputs": []},
        {"inputs": "x"},
        [{"input": "1"}],
        [{"input": 1, "output": "1"}],
        [{"fn_name": "f", "input": "1", "output": 1}],
        [{"fn_name": "not a name", "input": [1], "output": 1}],
        [{"testtype": "functional", "input": "1", "output": "1"}],
        [3],
    ],
)
def test_rows_without_a_runnable_test_are_dropped(tests):
    assert read({"tests": tests}) is None


@pytest.mark.parametrize("metadata", ["easy", "", '"easy"', None, {"level": 3}])
def test_metadata_of_other_collections_say_nothing_of_functions(metadata):
    problem = read({"tests": [{"input": "2 3\n", "output": "5\n"}], "metadata": metadata})
    assert problem is not None
    assert problem.tests == (SUM,)


def test_rows_of_another_form_are_rejected():
    with pytest.raises(
        UserError, match="row 1: needs a text in one of question, problem.*the row has"
    ):
        read({})
    with pytest.raises(UserError, match="row 1: needs a text"):
        read_problem({"question": 3, "tests": []}, "row 1", 2, None)


def test_which_tests_are_public():
    tests = [{"input": str(n), "output": str(n)} for n in range(5)]
    problem = read({"tests": tests})
    assert problem is not None
    assert problem.public_tests == problem.tests[:2]
    assert len(problem.tests) == 5
    assert len(read({"tests": tests}, max_tests=3).tests) == 3  # type: ignore[union-attr]
    own = read({"tests": tests, "public_tests": [{"input": "9", "output": "9"}]})
    assert own is not None
    assert own.public_tests == (StdinTest("9", "9"),)
    started = read({"tests": tests, "starter_code": "class Solution:\n"})
    assert started is not None
    assert started.starter_code == "class Solution:"


@pytest.mark.parametrize("steps", [1, 3])
def test_generated_functions_pass_their_own_tests(steps):
    rng = random.Random(0)
    questions = set()
    for _ in range(200):
        drawn = sample_function(rng, steps)
        namespace = {}
        exec(drawn.solution, namespace)
        for test in drawn.problem.tests:
            assert isinstance(test, FunctionTest)
            assert namespace["f"](*test.arguments) == test.returned
        assert len({repr(test) for test in drawn.problem.tests}) == 4
        assert drawn.problem.question.count(", then ") == steps - 1
        questions.add(drawn.problem.question)
    assert len(questions) > 60
    assert (
        sample_function(random.Random(5), steps).problem
        == sample_function(random.Random(5), steps).problem
    )
    assert apply_all([], 3) == 3
