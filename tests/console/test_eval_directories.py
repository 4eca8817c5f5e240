"""Evaluations without a run: lists, questions before and after, damaged directories."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_thread import serving_app
from test_console_app import Console

from planish.console.answers import Answers
from planish.console.app import create_app
from planish.console.catalog import Catalog
from planish.evaluation.files import EvaluationDirectory
from planish.evaluation.types import SampledAnswer

NASTY = "<script>document.title='owned'</script>"


def write_evaluation(path: Path, rewards: list[list[float]], *, finish: bool = True) -> None:
    """Write an evaluation with the rewards of each question's answers."""
    with EvaluationDirectory(path, {"task": "gsm8k", "name": f"model-{path.name}"}) as directory:
        for question, of_question in enumerate(rewards):
            directory.append(
                [
                    SampledAnswer(
                        question=question,
                        sample=sample,
                        prompt_id=f"p{question}",
                        prompt=f"What is {question}? {NASTY}",
                        answer=f"It is {sample}. {NASTY}",
                        tokens=[1, 2],
                        stop_reason="stop",
                        reward=reward,
                        extracted=NASTY,
                        reference=str(question),
                    )
                    for sample, reward in enumerate(of_question)
                ]
            )
        if finish:
            directory.write_results({"metrics": {"eval/gsm8k/pass@2": 0.75}})


@pytest.fixture
def console(tmp_path) -> Iterator[Console]:
    with serving_app(create_app(Answers(Catalog([tmp_path])))) as url:
        found = Console(url)
        yield found
        found.http.close()


def test_evaluations_are_listed_and_compared_question_by_question(console, tmp_path):
    write_evaluation(tmp_path / "a", [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    write_evaluation(tmp_path / "b", [[0.0, 1.0], [1.0, 1.0]], finish=False)
    first, second = console.get("evals")["evals"]
    assert (first["task"], first["model"], first["is_finished"]) == ("gsm8k", "model-a", True)
    assert (first["questions"], first["answers"], first["mean"]) == (3, 6, 0.5)
    assert first["stderr"] == pytest.approx(0.5 / 3**0.5)
    assert first["metrics"] == {"eval/gsm8k/pass@2": 0.75}
    assert not second["is_finished"]
    ids = [first["id"], second["id"]]
    compared = console.get("eval_questions", eval=ids)
    assert [(row["question"], row["means"]) for row in compared["questions"]] == [
        (0, [1.0, 0.5]),
        (2, [0.0, None]),
        (1, [0.5, 1.0]),
    ]
    question = console.get("eval_question", eval=ids, question=1)
    assert [len(one["answers"]) for one in question["evals"]] == [2, 2]
    assert question["evals"][0]["answers"][0]["reference"] == "1"
    assert console.error("eval_questions", eval=["nobody"])[0] == 404
    assert console.error("eval_questions")[0] == 400
    assert console.get("runs")["runs"] == []


def test_answers_are_added_while_the_evaluation_runs(console, tmp_path):
    write_evaluation(tmp_path / "a", [[1.0]], finish=False)
    assert console.get("evals")["evals"][0]["answers"] == 1
    with open(tmp_path / "a/samples.jsonl", "ab") as file:
        file.write(b'{"question": 1, "reward": 0.0}\nnot JSON\n{"reward": 1.0}\n{"question": 2')
    [found] = console.get("evals")["evals"]
    assert (found["questions"], found["mean"]) == (2, 0.5)
    assert "line 3 is not a JSON object" in found["problems"][0]
    assert "1 rows of samples.jsonl have no question" in found["problems"][1]
    (tmp_path / "a/config.json").unlink()
    assert "config.json is missing" in " ".join(console.get("evals")["evals"][0]["problems"])
