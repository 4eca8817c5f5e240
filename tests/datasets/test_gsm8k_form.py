"""Datasets in GSM8K's form, by directory, file and hub name. An error names the invalid row."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from planish.datasets.gsm8k import Problem, problem_prompt
from planish.datasets.math_problems import load_problems
from planish.datasets.rows import load_rows
from planish.errors import UserError

ROW = {"question": "How many?", "answer": "She has 2*3 = <<2*3=6>>6.\nThen <<6+1=7>>7.\n#### 1,007"}


def write(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_a_worked_answer_is_taken_apart(tmp_path):
    write(tmp_path / "train.jsonl", ROW)
    [problem] = load_problems(str(tmp_path), "train")
    assert problem == Problem(
        "How many?", "1,007", "She has 2*3 = 6.\nThen 7.\nThe answer is \\boxed{1,007}"
    )
    prompt = problem_prompt(problem)
    assert prompt[-1]["content"].startswith("How many?")
    assert "\\boxed{}" in prompt[-1]["content"]


def test_an_answer_without_the_mark_is_the_answer(tmp_path):
    [problem] = load_problems(
        str(write(tmp_path / "own.jsonl", {"question": "2+2?", "answer": "4"})), "train"
    )
    assert (problem.answer, problem.solution) == ("4", "The answer is \\boxed{4}")


def test_columns_that_are_not_used_are_refused_or_named(tmp_path, caplog):
    path = write(tmp_path / "own.jsonl", ROW, {**ROW, "level": "hard", "topic": "sums"})
    load_problems(str(path), "train")
    assert (
        f'dataset {path}, train: columns that are not used: "level" (1 row, first in {path}, line '
        f'2), "topic" (1 row, first in {path}, line 2)'
    ) in caplog.text
    for unused in ({"images": ["a.png"]}, {"system": "Be brief."}):
        write(path, {**ROW, **unused})
        with pytest.raises(UserError, match=f'line 1: the column "{next(iter(unused))}" has'):
            load_problems(str(path), "train")


def test_a_line_separator_inside_a_string_does_not_end_a_row(tmp_path):
    path = write(tmp_path / "own.jsonl", {"question": "a\u2028b", "answer": "4"})
    assert load_problems(str(path), "train")[0].question == "a\u2028b"


def test_parquet_in_parts(tmp_path):
    for part in range(2):
        table = pyarrow.Table.from_pylist([{**ROW, "question": f"part {part}"}])
        pyarrow.parquet.write_table(table, tmp_path / f"test-0000{part}-of-00002.parquet")
    assert [problem.question for problem in load_problems(str(tmp_path), "test")] == [
        "part 0",
        "part 1",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a", "answer": "1"}\n{"question": "b"}\n', "line 2.*question.*answer"),
        ('{"question": "a", "answer": "1"}\nno json\n', "line 2 is not JSON"),
        ("[1]\n", "row 1 is not a JSON object"),
        ('{"question": "a", "answer": "work #### "}\n', "line 1.*empty"),
        ("", "no rows"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path, content, message):
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        load_problems(str(tmp_path), "train")


def test_missing_datasets_are_rejected_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match="no such file or directory"):
        load_rows("../does-not-exist", "train")
    with pytest.raises(UserError, match=r"has no test\.jsonl"):
        load_rows(str(tmp_path), "test")
    path = write(tmp_path / "own.jsonl", {"question": "2+2?", "answer": "4"})
    with pytest.raises(UserError, match="eval_problems=0"):
        load_rows(str(path), "test")
    broken = tmp_path / "train.parquet"
    broken.write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        load_rows(str(broken), "train")


@pytest.mark.slow
def test_a_hub_that_is_out_of_reach_is_an_error_with_the_remedy(monkeypatch):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"no route.*local directory with train\.jsonl"):
        load_rows("openai/gsm8k", "train")


def test_the_hub_gets_the_config_of_the_name(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *where, split: asked.append((*where, split)) or datasets.Dataset.from_list([ROW]),
    )
    load_rows("openai/gsm8k", "train")
    load_rows("openai/gsm8k:socratic", "test")
    load_rows("some/one", "test")
    assert asked == [
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "socratic", "test"),
        ("some/one", None, "test"),
    ]
