"""Math collections in their published forms: the fields that are read, the held-out problems, and
rejected rows.
"""

import json
from pathlib import Path

import pytest

from planish.datasets import math_problems
from planish.datasets.grading import Grader
from planish.datasets.math_problems import COLLECTIONS, boxed_answer, load_splits
from planish.datasets.row_files import Row
from planish.errors import UserError

DATA = Path(__file__).parent / "data"


def load(name, dataset, eval_problems=None, seed=0):
    return load_splits(COLLECTIONS[name], str(dataset), eval_problems=eval_problems, seed=seed)


def test_math_takes_answers_from_solutions_and_tests_from_their_own_field():
    splits = load("math", DATA / "math")
    assert [problem.answer for problem in splits.train][:6] == [
        "98",
        "9",
        r"\frac{3}{7}",
        "1",
        "336",
        "3",
    ]
    assert [problem.answer for problem in splits.test] == ["102", "6", "30", r"4\sqrt3"]
    assert splits.train[0].question.startswith("A rectangular garden")
    assert not splits.notes


def test_polaris_and_deepmath_hold_out_the_requested_number():
    for name, answers in (
        ("polaris", {"7", "43", "25"}),
        ("deepmath", {"Yes", r"\dfrac{5}{3}", "-2"}),
    ):
        splits = load(name, DATA / f"{name}.jsonl", eval_problems=3)
        assert (len(splits.train), len(splits.test)) == (7, 3)
        assert not {p.question for p in splits.train} & {p.question for p in splits.test}
        assert answers <= {problem.answer for problem in [*splits.train, *splits.test]}
        assert load(name, DATA / f"{name}.jsonl", eval_problems=3) == splits
        assert load(name, DATA / f"{name}.jsonl", eval_problems=3, seed=1).test != splits.test


def test_without_a_test_split_and_a_number_nothing_is_tested_and_a_note_says_so():
    splits = load("polaris", DATA / "polaris.jsonl")
    assert (len(splits.train), len(splits.test)) == (10, 0)
    assert "eval_problems=N" in splits.notes[0]


def test_a_test_split_is_cut_to_its_first_problems():
    assert [problem.answer for problem in load("math", DATA / "math", eval_problems=2).test] == [
        "102",
        "6",
    ]
    assert list(load("math", DATA / "math", eval_problems=0).test) == []


def test_a_directory_without_a_test_file_has_no_test_split(tmp_path):
    (tmp_path / "train.jsonl").write_text((DATA / "deepmath.jsonl").read_text())
    assert len(load("deepmath", tmp_path, eval_problems=4).test) == 4


def test_every_reference_answer_of_the_files_is_found_in_its_own_solution():
    with Grader(timeout_seconds=60) as grader:
        for name, dataset in (
            ("math", "math"),
            ("polaris", "polaris.jsonl"),
            ("deepmath", "deepmath.jsonl"),
        ):
            splits = load(name, DATA / dataset)
            for problem in [*splits.train, *splits.test]:
                assert grader.equal(problem.answer, boxed_answer(problem.solution) or ""), problem


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"it is \fbox{3}.", "3"),
        (r"The remainder is $\boxed 1$.", "1"),
        (r"either \boxed{1} or \boxed{2}", "2"),
        ("there is none", None),
    ],
)
def test_boxes_as_published_solutions_write_them(solution, answer):
    assert boxed_answer(solution) == answer


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path):
    rows = [{"problem": "a?", "solution": "none"}, {"problem": "b?", "solution": r"\boxed{2}"}]
    splits = load("math", write(tmp_path / "rows.jsonl", *rows), eval_problems=0)
    assert [problem.question for problem in splits.train] == ["b?"]
    assert "1 of 2 rows" in splits.notes[0]
    with pytest.raises(UserError, match="none of its 1 rows"):
        load("math", write(tmp_path / "bad.jsonl", rows[0]))


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("math", {"question": "a?", "answer": "1"}, "problem"),
        ("polaris", {"problem": "a?", "solution": "1"}, "answer"),
        ("deepmath", {"question": "a?", "answer": "1"}, "final_answer"),
        ("deepmath", {"question": "a?", "final_answer": True}, "final_answer"),
        ("gsm8k", {"problem": "a?"}, "question"),
    ],
)
def test_rows_of_another_form_are_rejected_with_their_location(tmp_path, name, row, field):
    with pytest.raises(UserError, match=f'line 1: needs a.*"{field}"'):
        load(name, write(tmp_path / "rows.jsonl", row))


@pytest.mark.parametrize("column", ["system", "system_prompt", "tools", "images"])
def test_columns_that_would_change_the_prompt_are_errors(tmp_path, column):
    row = {"question": "a?", "answer": "1\n#### 1"}
    for empty in (None, "", []):
        load("gsm8k", write(tmp_path / "rows.jsonl", {**row, column: empty}))
    path = write(tmp_path / "rows.jsonl", row, {**row, column: ["x"]})
    with pytest.raises(UserError, match=f'line 2: the column "{column}" has'):
        load("gsm8k", path)


@pytest.mark.parametrize(
    ("answer", "read"),
    [(7, "7"), (r"\boxed{7}", "7"), (r" \frac{1}{2} ", r"\frac{1}{2}"), ("", "3"), (None, "3")],
)
def test_math_has_the_answer_of_its_own_field_however_it_is_written(tmp_path, answer, read):
    row = {"problem": "p", "answer": answer, "solution": r"so \boxed{3}"}
    [problem] = load("math", write(tmp_path / "rows.jsonl", row)).train
    assert problem.answer == read


def test_numbers_are_answers_as_they_are_written(tmp_path):
    rows = [{"question": "a?", "final_answer": 2}, {"question": "b?", "final_answer": 0.5}]
    answers = [
        problem.answer for problem in load("deepmath", write(tmp_path / "rows.jsonl", *rows)).train
    ]
    assert answers == ["2", "0.5"]


def test_all_problems_cannot_be_held_out():
    with pytest.raises(UserError, match="eval_problems=10.*of its 10 problems"):
        load("polaris", DATA / "polaris.jsonl", eval_problems=10)


def test_the_published_math_is_both_splits_of_all_subjects_without_the_500(monkeypatch):
    asked = []

    def rows(place, split):
        asked.append((place, split))
        if place == math_problems.MATH_500:
            return [
                Row({"problem": "algebra train?", "solution": r"\boxed{5}", "answer": "5"}, "row 1")
            ]
        subject = place.partition(":")[2]
        return [Row({"problem": f"{subject} {split}?", "solution": r"\boxed{4}"}, "row 1")]

    monkeypatch.setattr(math_problems, "load_rows", rows)
    splits = load_splits(COLLECTIONS["math"], None, eval_problems=None)
    assert len(splits.train) == 13
    assert "algebra train?" not in {problem.question for problem in splits.train}
    assert [problem.answer for problem in splits.test] == ["5"]
    assert ("EleutherAI/hendrycks_math:geometry", "test") in asked


def test_published_collections_without_a_test_split_are_not_asked_for_one(monkeypatch):
    asked = []
    monkeypatch.setattr(
        math_problems,
        "load_rows",
        lambda place, split: (
            asked.append((place, split))
            or [Row({"problem": f"{n}?", "answer": "1"}, f"row {n}") for n in range(4)]
        ),
    )
    assert len(load_splits(COLLECTIONS["polaris"], None, eval_problems=1).test) == 1
    assert asked == [("POLARIS-Project/Polaris-Dataset-53K", "train")]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gsm8k", {"question": " ", "answer": "#### 4"}),
        ("math", {"problem": "", "solution": r"\boxed{4}"}),
    ],
)
def test_a_problem_without_a_question_is_an_error(tmp_path, name, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match="line 1: the (question|problem) is empty"):
        load_splits(COLLECTIONS[name], str(path), eval_problems=0)
