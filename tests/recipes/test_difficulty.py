"""Training problems are selected by the success rates of earlier answers."""

import asyncio
import json
import re
from dataclasses import replace
from statistics import fmean

import pytest

from planish.errors import DamagedFileError, UserError
from planish.evaluation import Sampling, Verdict, evaluate, load_task
from planish.files import read_rows
from planish.recipes import math_rl, rl_basic
from planish.rl.environments.boxed_problems import BoxedProblemDatasetBuilder, BoxedProblemEnv
from planish.rl.environments.difficulty import DifficultyOptions, success_rates
from planish.training.train_rl import checked_datasets


def train(client, small_model, sums_dataset, path, **changes):
    usual = {
        "model_name": small_model,
        "dataset": str(sums_dataset),
        "log_path": str(path),
        "batch_size": 13,
        "group_size": 4,
        "lora_rank": 2,
        "max_tokens": 4,
        "eval_every": 0,
    }
    return rl_basic.main(rl_basic.Options(**{**usual, **changes}), client)


@pytest.fixture
def earlier(engine, small_model, sums_dataset, tmp_path, monkeypatch):
    """The directory of a run in which some answers to each question are right."""

    async def check_answer(self, sample_str):
        return sum(sample_str.encode()) % 2 == 0

    monkeypatch.setattr(BoxedProblemEnv, "check_answer", check_answer)
    return train(engine, small_model, sums_dataset, tmp_path / "earlier")


def rates_by_number(run):
    """Return the success rate of "What is N + 2?" by N, from the texts of the rollouts."""
    verdicts: dict[int, list[float]] = {}
    for path in run.glob("train_*_rollouts.jsonl"):
        for row in read_rows(path):
            [turn] = row["turns"]
            number = int(re.findall(r"What is (\d+) \+ 2\?", turn["observation"])[-1])
            verdicts.setdefault(number, []).append(turn["metrics"]["correct"])
    return {number: fmean(each) for number, each in verdicts.items()}


def numbers_of(small_model, sums_dataset, **options):
    """Return the N of the training problems "What is N + 2?"."""
    builder = BoxedProblemDatasetBuilder(
        collection="gsm8k", dataset=str(sums_dataset), model_name=small_model, **options
    )
    train_set, test_set = checked_datasets(asyncio.run(builder()))
    assert test_set is not None
    assert test_set.data_size() == 5, "tests are not selected"
    questions = [problem.question for problem in train_set.problems]  # type: ignore[attr-defined]
    return {int(re.findall(r"\d+", question)[0]) for question in questions}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["flat", "folders"])
def test_problems_in_a_range_of_success_rates_are_used(
    engine, small_model, sums_dataset, tmp_path, monkeypatch, caplog, layout
):
    async def check_answer(self, sample_str):
        return sum(sample_str.encode()) % 2 == 0

    monkeypatch.setattr(BoxedProblemEnv, "check_answer", check_answer)
    run = train(engine, small_model, sums_dataset, tmp_path / "earlier", rollout_layout=layout)
    if layout == "folders":
        for path in run.glob("iteration_*/train_rollouts.jsonl"):
            path.rename(run / f"train_{path.parent.name}_rollouts.jsonl")
    rates = rates_by_number(run)
    assert len(rates) == 26
    expected = {number for number, rate in rates.items() if 0.25 <= rate <= 0.5}
    assert 0 < len(expected) < 26
    options = {"difficulty_from": str(run), "min_success_rate": 0.25, "max_success_rate": 0.5}
    assert numbers_of(small_model, sums_dataset, **options) == expected
    assert (
        f"of 26 training problems, {len(expected)} are used, {26 - len(expected)} have a success "
        "rate outside 0.25 to 0.5, and 0 have no earlier answers"
    ) in caplog.text


@pytest.mark.slow
def test_problems_without_earlier_answers_are_left_out_and_counted(
    earlier, engine, small_model, sums_dataset, caplog
):
    [first] = earlier.glob("train_iteration_000000_rollout_summaries.jsonl")
    numbers = numbers_of(small_model, sums_dataset, difficulty_from=str(first))
    texts = read_rows(earlier / "train_iteration_000000_rollouts.jsonl")
    asked = {
        int(re.findall(r"What is (\d+) \+ 2\?", row["turns"][0]["observation"])[-1])
        for row in texts
    }
    assert numbers == asked
    assert len(asked) == 13
    assert "13 are used, 0 have a success rate outside 0 to 1, and 13 have no earlier answers" in (
        caplog.text
    )


@pytest.mark.slow
def test_a_recipe_trains_on_the_selected_problems(
    earlier, engine, small_model, sums_dataset, tmp_path
):
    first = str(earlier / "train_iteration_000000_rollout_summaries.jsonl")
    run = train(engine, small_model, sums_dataset, tmp_path / "later", difficulty_from=first)
    assert len(read_rows(run / "metrics.jsonl")) == 1, "13 of 26 problems make one batch"


def summary(correct, prompt="a"):
    metrics = {} if correct is None else {"correct": correct}
    return {"prompt_id": prompt, "steps": [{"metrics": metrics}], "trajectory_metrics": {}}


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_an_answer_without_a_verdict_is_not_right(tmp_path):
    rows = [summary(1.0), summary(None), summary(0.0), summary(1.0), summary(0.0, "b")]
    assert success_rates(written(tmp_path / "a.jsonl", *rows)) == {"a": 0.5, "b": 0.0}


def test_results_that_cannot_be_used_are_named(tmp_path, small_model, sums_dataset):
    with pytest.raises(UserError, match="no answer there has the metric correct"):
        success_rates(written(tmp_path / "a.jsonl", summary(None)))
    with pytest.raises(DamagedFileError, match="has a row that is no rollout summary"):
        success_rates(written(tmp_path / "b.jsonl", {"question": "a"}))
    with pytest.raises(
        UserError, match=r"there is no file \*_rollout_summaries.jsonl or samples.jsonl"
    ):
        success_rates(str(tmp_path / "nowhere"))
    other = written(tmp_path / "c.jsonl", summary(1.0))
    with pytest.raises(UserError, match="26 have no earlier answers .*; give a wider range"):
        numbers_of(small_model, sums_dataset, difficulty_from=other)


def test_answers_of_an_evaluation_select_the_problems_that_it_asked(
    engine, small_model, sums_dataset, tmp_path, caplog
):
    """`planish eval` writes the questions of training as the recipe does."""
    reference = load_task("gsm8k", sums_dataset / "train.jsonl", limit=20)
    graded = replace(
        reference, grade=lambda question, text: Verdict(question.number % 3 == 0, text)
    )
    sampling = Sampling(samples=2, max_tokens=2, temperature=1.0)
    client = engine.create_sampling_client(base_model=small_model)
    asyncio.run(evaluate(client, graded, sampling, out=tmp_path / "eval"))
    options = {"min_success_rate": 0.5}
    for source in (tmp_path / "eval", tmp_path / "eval" / "samples.jsonl"):
        numbers = numbers_of(small_model, sums_dataset, difficulty_from=str(source), **options)
        texts = (sums_dataset / "train.jsonl").read_text().splitlines()
        asked = [int(re.findall(r"\d+", json.loads(text)["question"])[0]) for text in texts]
        assert numbers == {asked[number - 1] for number in range(3, 21, 3)}
    assert "6 are used, 14 have a success rate outside 0.5 to 1, and 6 have no earlier answers" in (
        caplog.text
    )


def test_a_question_that_an_evaluation_could_not_ask_has_no_success_rate(tmp_path):
    rows = [
        {"prompt_id": prompt, "reward": reward, "stop_reason": stop_reason}
        for prompt, reward, stop_reason in (
            ("a", 1.0, "stop"),
            ("a", 0.0, "length"),
            ("b", 0.0, None),
        )
    ]
    assert success_rates(written(tmp_path / "samples.jsonl", *rows)) == {"a": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_success_rate": 0.5}, "give difficulty_from too"),
        ({"difficulty_from": "x", "min_success_rate": 0.6, "max_success_rate": 0.5}, "from 0 to 1"),
        ({"difficulty_from": "x", "max_success_rate": 1.5}, "from 0 to 1"),
    ],
)
def test_an_invalid_range_is_rejected(options, message):
    with pytest.raises(UserError, match=message):
        DifficultyOptions(**options).check_success_rates()


def test_an_invalid_range_is_rejected_by_a_builder(small_model, sums_dataset):
    with pytest.raises(UserError, match="give difficulty_from too"):
        numbers_of(small_model, sums_dataset, min_success_rate=0.5)


def test_generated_problems_have_no_earlier_results(small_model):
    options = math_rl.options_for("arithmetic", model_name=small_model, difficulty_from="x")
    with pytest.raises(UserError, match="difficulty_from=x: these problems are generated"):
        asyncio.run(math_rl.dataset_builder(options)())
