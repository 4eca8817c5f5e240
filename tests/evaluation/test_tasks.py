"""The questions of each task. An error about a bad row names its line, before any question is
sent.
"""

import asyncio
import json
from functools import partial

import pytest

from planish.datasets.gsm8k import problem_prompt
from planish.datasets.math_problems import load_problems
from planish.errors import UserError
from planish.evaluation.multiple_choice import letter_of
from planish.evaluation.tasks import TASKS, load_task
from planish.evaluation.types import ChoiceTask, SampledTask
from planish.processes.blocking import call_function

CHOICES = {"question": "Which?", "choices": ["one", "two"]}


def write(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def verdict(task, text, question=0):
    assert isinstance(task, SampledTask)

    async def graded():
        return await call_function(partial(task.grade, task.questions[question], text))

    return asyncio.run(graded())


def test_gsm8k_is_asked_as_in_training(sums):
    task = load_task("gsm8k", sums)
    problems = load_problems(str(sums), "train")
    assert [list(question.messages) for question in task.questions] == [
        problem_prompt(one) for one in problems
    ]
    assert [question.number for question in task.questions] == list(range(1, 13))
    assert verdict(task, r"so \boxed{2.0}").correct
    assert verdict(task, "so 2").extracted is None


def test_a_directory_gives_its_test_split(tmp_path):
    write(tmp_path / "train.jsonl", {"question": "train?", "answer": "1"})
    write(tmp_path / "test.jsonl", {"question": "test?", "answer": "1"})
    [question] = load_task("gsm8k", tmp_path).questions
    assert str(question.messages[-1]["content"]).startswith("test?")


@pytest.mark.sandbox
@pytest.mark.slow
def test_math_rows_have_answers_plain_boxed_or_in_their_solution(tmp_path):
    rows = [
        {"problem": "a", "answer": r"\frac{1}{2}", "solution": r"... \boxed{3}"},
        {"problem": "b", "answer": r"\boxed{\frac{1}{2}}"},
        {"problem": "c", "solution": r"... \boxed{\frac12}"},
        {"problem": "d", "answer": 7},
    ]
    task = load_task("math500", write(tmp_path / "math.jsonl", *rows))
    assert [question.reference for question in task.questions] == [
        r"\frac{1}{2}",
        r"\frac{1}{2}",
        r"\frac12",
        "7",
    ]
    assert verdict(task, r"\boxed{0.5}").correct
    assert not verdict(task, r"\boxed{0.6}").correct


def test_choices_are_listed_with_letters_or_not_shown(capitals):
    lettered, scored = (
        load_task(name, capitals) for name in ("multiple_choice", "multiple_choice_logprobs")
    )
    assert isinstance(scored, ChoiceTask)
    assert "A. Rome\nB. Paris\nC. Oslo" in lettered.questions[0].messages[0]["content"]
    assert "Paris" not in scored.questions[0].messages[0]["content"]
    assert [question.reference for question in lettered.questions] == ["B", "C"]
    assert verdict(lettered, "It is Paris. Answer: B").correct
    assert not verdict(lettered, "Answer: A").correct


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("The answer is (C).", "C"),
        ("**Answer:** B", "B"),
        (r"The answer is \boxed{B}", "B"),
        (r"\boxed{b}", "B"),
        ("Answer: A. No, the answer is B", "B"),
        ("B", "B"),
        (" b.\n", "B"),
        ("(B) since it is red", "B"),
        ("B. Paris", "B"),
        ("B\nbecause it is", "B"),
        ("A. Rome\nB. Paris\nC. Oslo", None),
        ("A. Rome\nB. Paris\nAnswer: B", "B"),
        ("A cat is an animal", None),
        ("The answer is A cat", None),
        ("Because it is so", None),
        ("Answer: E", None),
        ("the answer", None),
        ("", None),
    ],
)
def test_a_letter_is_read_where_it_is_plainly_given(text, letter):
    assert letter_of(text, 4) == letter


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "?"}, 'a "question" and an "answer"'),
        ("gsm8k", {"question": "?", "answer": "..."[:0]}, "the answer is empty"),
        ("gsm8k", "{", "is not JSON"),
        ("math500", {"answer": "4"}, '"problem"'),
        ("math500", {"problem": "p"}, '"solution"'),
        ("math500", {"problem": "p", "solution": "no box"}, "no answer"),
        (
            "multiple_choice",
            {"question": "?", "choices": ["one"], "answer": 0},
            "a list of 2 to 26",
        ),
        ("multiple_choice", {"question": "?", "choices": "one", "answer": 0}, "a list of 2 to 26"),
        ("multiple_choice", {**CHOICES, "answer": "C"}, "a letter from A to B"),
        ("multiple_choice", {**CHOICES, "answer": 2}, "an index from 0 to 1"),
        ("multiple_choice", {**CHOICES, "answer": True}, "an index from 0 to 1"),
        ("multiple_choice", {**CHOICES, "answer": -1}, "an index from 0 to 1"),
        ("multiple_choice", CHOICES, "None"),
        (
            "multiple_choice_logprobs",
            {**CHOICES, "choices": ["one", "one"], "answer": 0},
            "empty or repeated",
        ),
        ("multiple_choice_logprobs", {**CHOICES, "choices": ["one", ""], "answer": 0}, "is empty"),
        (
            "multiple_choice_logprobs",
            {**CHOICES, "question": "", "answer": 0},
            "the question is empty",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line(name, row, message, tmp_path):
    good = {"question": "?", "answer": "1"} if name == "gsm8k" else {"problem": "p", "answer": "1"}
    good = {**CHOICES, "answer": 0} if name.startswith("multiple") else good
    path = write(tmp_path / "rows.jsonl", good, "", row)
    with pytest.raises(UserError, match="rows.jsonl, line 3") as refused:
        load_task(name, path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chess",), "there is no such task; the tasks are gsm8k"),
        (("multiple_choice",), "it has no data of its own"),
        (("gsm8k", "missing.jsonl"), "no such file"),
    ],
)
def test_a_task_that_does_not_exist_is_rejected(arguments, message):
    with pytest.raises(UserError, match=message):
        load_task(*arguments)


def test_a_limit_takes_the_first_and_all_rows_are_checked(sums, tmp_path):
    assert len(load_task("gsm8k", sums, limit=3).questions) == 3
    assert load_task("gsm8k", sums, limit=3).digest == load_task("gsm8k", sums).digest
    with pytest.raises(UserError, match="limit=0"):
        load_task("gsm8k", sums, limit=0)
    bad = write(tmp_path / "bad.jsonl", {"question": "?", "answer": "1"}, {"question": "?"})
    with pytest.raises(UserError, match="line 2"):
        load_task("gsm8k", bad, limit=1)


def test_the_digest_tells_questions_apart(sums, tmp_path):
    other = write(tmp_path / "other.jsonl", {"question": "What is 0 + 2?", "answer": "3"})
    assert load_task("gsm8k", other).digest != load_task("gsm8k", sums).digest


def test_each_kind_says_what_its_rows_are():
    assert all(kind.row_fields for kind in TASKS.values())


def test_columns_of_a_task_are_used_refused_or_named(tmp_path, caplog):
    row = {"question": "What is 1 + 1?", "answer": "2\n#### 2", "level": 3}
    data = write(tmp_path / "validation.jsonl", row, row)
    data.with_name("test.jsonl").write_text(json.dumps({**row, "images": ["x.png"]}) + "\n")
    assert len(load_task("gsm8k", tmp_path, split="validation").questions) == 2
    assert caplog.messages == [
        f'dataset {tmp_path}: columns that are not used: "level" (2 rows, first in {data}, line 1)'
    ]
    with pytest.raises(UserError, match='test.jsonl, line 1: the column "images" has'):
        load_task("gsm8k", tmp_path)
    data.with_name("test.jsonl").write_text(json.dumps({**row, "system": "Be brief."}) + "\n")
    with pytest.raises(UserError, match='test.jsonl, line 1: the column "system" has .* prompt of'):
        load_task("gsm8k", tmp_path)
