"""Evaluations: what is counted, what remains after a kill, and what is rejected before the first
question is sent.
"""

import asyncio
import json
import re
import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from fake_sampler import END, FakeSampler, Killed
from metric_tables import definition_of

from planish.datasets.process_grader import SharedGrader
from planish.errors import UserError
from planish.evaluation import Sampling, TaskEvaluator, Verdict, boxed, evaluate, load_task
from planish.evaluation.metrics import with_log_names

DRAWN = Sampling(samples=4, max_tokens=200, temperature=0.8, seed=5)


def lucky_sum(prompt, luck):
    left, right = map(int, re.findall(r"(\d+) \+ (\d+)", prompt)[-1])
    return rf"\boxed{{{left + right if luck.random() < 0.5 else -1}}}" + END


def measured(sampler, task, *arguments, **options):
    return asyncio.run(evaluate(sampler, task, *arguments, **options))


def rows_of(directory):
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


def test_numbers_of_answers_that_are_known(tokenizer, sums):
    def answer(prompt, luck):
        if "What is 3 +" in prompt:
            return "I do not know" + END
        if "What is 4 +" in prompt:
            return r"\boxed{6} and so on" * 20
        return rf"\boxed{{{4 if 'What is 2 +' in prompt else 0}}}" + END

    results = measured(
        FakeSampler(tokenizer, answer), load_task("gsm8k", sums, limit=5), Sampling(max_tokens=64)
    )
    metrics = results.metrics
    # 2 is right; 4 is right in a box although it was cut off later
    assert {
        name: metrics[name] for name in ("num_correct", "num_examples", "num_samples", "num_errors")
    } == {"num_correct": 2, "num_examples": 5, "num_samples": 5, "num_errors": 0}
    assert metrics["score"] == metrics["pass@1"] == pytest.approx(0.4)
    assert metrics["score_stderr"] == pytest.approx((0.4 * 0.6 / 4) ** 0.5)
    assert (metrics["ended"], metrics["cut_off"], metrics["answered"]) == (0.8, 0.2, 0.8)


def test_samples_of_a_question_are_one_request_and_questions_are_in_flight_together(
    tokenizer, sums
):
    sampler = FakeSampler(tokenizer, lucky_sum)
    results = measured(sampler, load_task("gsm8k", sums), DRAWN, k=[1, 2, 4], concurrency=5)
    assert [count for count, _ in sampler.requests] == [4] * 12
    assert sampler.most_at_once == 5
    assert len({params.seed for _, params in sampler.requests}) == 12
    assert {(params.max_tokens, params.temperature) for _, params in sampler.requests} == {
        (200, 0.8)
    }
    metrics = results.metrics
    assert metrics["score"] == metrics["pass@1"]
    assert metrics["pass@1"] < metrics["pass@2"] < metrics["pass@4"]
    assert results.settings == {
        "samples": 4,
        "max_tokens": 200,
        "temperature": 0.8,
        "seed": 5,
        "k": [1, 2, 4],
        "context_window": None,
    }


@pytest.mark.parametrize("die_after", [0, 1, 7, 11])
def test_a_killed_evaluation_resumes_to_the_same_numbers(tokenizer, sums, tmp_path, die_after):
    task = load_task("gsm8k", sums)
    whole = measured(FakeSampler(tokenizer, lucky_sum), task, DRAWN, k=[1, 4])
    with pytest.raises(Killed):
        measured(
            FakeSampler(tokenizer, lucky_sum, die_after=die_after),
            task,
            DRAWN,
            out=tmp_path,
            concurrency=2,
        )
    assert not (tmp_path / "results.json").exists()
    answered = {row["question"] for row in rows_of(tmp_path)}
    sampler = FakeSampler(tokenizer, lucky_sum)
    resumed = measured(sampler, task, DRAWN, k=[1, 4], out=tmp_path)
    assert len(sampler.asked) == 12 - len(answered)
    assert resumed == whole
    assert json.loads((tmp_path / "results.json").read_text())["metrics"] == whole.metrics
    assert len(rows_of(tmp_path)) == 48


def test_a_question_that_is_half_written_is_asked_again(tokenizer, sums, tmp_path):
    task = load_task("gsm8k", sums)
    whole = measured(FakeSampler(tokenizer, lucky_sum), task, DRAWN, out=tmp_path)
    content = (tmp_path / "samples.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines[:10]) + lines[10][:40])
    sampler = FakeSampler(tokenizer, lucky_sum)
    assert measured(sampler, task, DRAWN, out=tmp_path) == whole
    assert len(sampler.asked) == 10
    assert sorted((tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)) == sorted(
        lines
    )


def test_what_is_finished_is_not_asked_again_and_more_may_be(tokenizer, sums, tmp_path):
    measured(
        FakeSampler(tokenizer, lucky_sum), load_task("gsm8k", sums, limit=5), DRAWN, out=tmp_path
    )
    sampler = FakeSampler(tokenizer, lucky_sum)
    again = measured(sampler, load_task("gsm8k", sums, limit=3), DRAWN, k=[2], out=tmp_path)
    assert (sampler.asked, again.metrics["num_examples"]) == ([], 3)
    more = measured(sampler, load_task("gsm8k", sums), DRAWN, out=tmp_path)
    assert len(sampler.asked) == 7
    assert more == measured(FakeSampler(tokenizer, lucky_sum), load_task("gsm8k", sums), DRAWN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "seed was 5, is 6"),
        ({"samples": 2}, "samples was 4, is 2"),
        ({"max_tokens": 9}, "max_tokens"),
    ],
)
def test_a_directory_of_another_evaluation_is_rejected(tokenizer, sums, tmp_path, change, message):
    task = load_task("gsm8k", sums, limit=2)
    measured(FakeSampler(tokenizer, lucky_sum), task, DRAWN, out=tmp_path)
    before = (tmp_path / "samples.jsonl").read_bytes()
    sampler = FakeSampler(tokenizer, lucky_sum)
    with pytest.raises(UserError, match=message):
        measured(sampler, task, replace(DRAWN, **change), out=tmp_path)
    with pytest.raises(UserError, match="name was"):
        measured(sampler, task, DRAWN, out=tmp_path, model_name="another")
    assert (sampler.asked, (tmp_path / "samples.jsonl").read_bytes()) == ([], before)


def test_other_questions_are_rejected(tokenizer, sums, capitals, tmp_path):
    measured(
        FakeSampler(tokenizer, lucky_sum), load_task("gsm8k", sums, limit=2), DRAWN, out=tmp_path
    )
    with pytest.raises(UserError, match="digest was"):
        measured(
            FakeSampler(tokenizer), load_task("multiple_choice", capitals), DRAWN, out=tmp_path
        )


def test_a_prompt_without_room_is_an_error_of_its_question(tokenizer, tmp_path):
    rows = [{"question": "x" * length, "answer": "1"} for length in (10, 3000)]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampler = FakeSampler(tokenizer)
    results = measured(
        sampler,
        load_task("gsm8k", path),
        DRAWN,
        context_window=2000,
        out=tmp_path / "out",
        concurrency=1,
    )
    assert len(sampler.asked) == 1
    assert (results.metrics["num_errors"], results.metrics["num_correct"]) == (4, 4)
    errors = [row for row in rows_of(tmp_path / "out") if row["error"]]
    assert [(row["question"], row["stop_reason"]) for row in errors] == [(2, None)] * 4
    assert "context of 2000" in errors[0]["error"]


def test_an_answer_gets_no_more_tokens_than_there_is_room_for(tokenizer, sums):
    sampler = FakeSampler(tokenizer, lambda prompt, luck: "a" * 500)
    task = load_task("gsm8k", sums, limit=1)
    measured(sampler, task, Sampling(max_tokens=400))
    length = len(tokenizer.encode(sampler.asked[0], add_special_tokens=False))
    results = measured(sampler, task, Sampling(max_tokens=400), context_window=length + 30)
    assert [params.max_tokens for _, params in sampler.requests] == [400, 30]
    assert (results.metrics["tokens_per_answer"], results.metrics["cut_off"]) == (30, 1.0)


@pytest.mark.slow
def test_an_answer_that_cannot_be_judged_is_counted(tokenizer, sums, monkeypatch):
    grader = SharedGrader(timeout_seconds=2)
    monkeypatch.setattr(boxed, "process_grader", lambda: grader)
    power = r"\boxed{9^{9^{9^{9}}}}" + END
    results = measured(FakeSampler(tokenizer, lambda *_: power), load_task("gsm8k", sums, limit=1))
    grader.close()
    assert (
        results.metrics["num_errors"],
        results.metrics["num_correct"],
        results.metrics["answered"],
    ) == (1, 0, 1.0)


def test_the_likeliest_choice_by_sum_and_by_mean(tokenizer, capitals, tmp_path):
    # Each token of a message costs the same, so the shortest has the largest sum; "Oslo" has the
    # largest mean.
    sampler = FakeSampler(tokenizer, logprob=lambda text: -1.5 if "Oslo" in text else -2.0)
    task = load_task("multiple_choice_logprobs", capitals)
    results = measured(sampler, task, out=tmp_path)
    assert len(sampler.asked) == 6
    rows = sorted(rows_of(tmp_path), key=lambda row: row["question"])
    assert [row["answer"] for row in rows] == ["C", "C"]
    assert results.metrics == {
        "score": 0.5,
        "score_stderr": 0.5,
        "score_length_normalized": 0.5,
        "score_length_normalized_stderr": 0.5,
        "num_correct": 1,
        "num_examples": 2,
        "num_errors": 0,
    }
    again = FakeSampler(tokenizer)
    assert measured(again, task, out=tmp_path) == results
    assert again.asked == []


def test_sum_and_mean_may_choose_differently(tokenizer, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"question": "?", "choices": ["x", "yyyyyyyy"], "answer": "B"}))
    sampler = FakeSampler(tokenizer, logprob=lambda text: -1.0 if "yyyyyyyy" in text else -2.0)
    results = measured(sampler, load_task("multiple_choice_logprobs", path))
    assert (results.metrics["score"], results.metrics["score_length_normalized"]) == (0.0, 1.0)


def test_choices_that_do_not_fit_are_an_error_of_their_question(tokenizer, capitals):
    sampler = FakeSampler(tokenizer)
    results = measured(sampler, load_task("multiple_choice_logprobs", capitals), context_window=20)
    assert (sampler.asked, results.metrics["num_errors"], results.metrics["num_correct"]) == (
        [],
        2,
        0,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": [1, 5]}, "k=.*samples=4"),
        ({"k": [0]}, "k="),
        ({"k": [1, 1]}, "each k once"),
        ({"concurrency": 0}, "concurrency=0"),
    ],
)
def test_invalid_options_are_rejected_before_any_request(tokenizer, sums, options, message):
    sampler = FakeSampler(tokenizer)
    with pytest.raises(UserError, match=message):
        measured(sampler, load_task("gsm8k", sums), DRAWN, **options)
    assert sampler.asked == []


def test_choices_take_no_sampling_options(tokenizer, capitals):
    for options in ({"k": [1]}, {"sampling": Sampling()}):
        with pytest.raises(UserError, match="samples nothing"):
            measured(
                FakeSampler(tokenizer), load_task("multiple_choice_logprobs", capitals), **options
            )


@pytest.mark.parametrize(
    "options", [{"samples": 2}, {"samples": 0}, {"max_tokens": 0}, {"temperature": -1.0}]
)
def test_invalid_sampling_options_are_rejected(options):
    with pytest.raises(UserError):
        Sampling(**options)


def test_the_evaluator_of_a_training_loop(tokenizer, sums, capitals):
    drawn = TaskEvaluator(load_task("gsm8k", sums, title="sums"), DRAWN, k=[1, 4])
    scored = TaskEvaluator(load_task("multiple_choice_logprobs", capitals))
    assert drawn.name == "sums"
    metrics = asyncio.run(drawn(cast(Any, FakeSampler(tokenizer, lucky_sum))))
    assert {
        "eval/sums/score",
        "eval/sums/num_correct",
        "eval/sums/num_examples",
        "eval/sums/num_errors",
    } <= set(metrics)
    assert metrics == with_log_names(
        "sums", measured(FakeSampler(tokenizer, lucky_sum), drawn.task, DRAWN, k=[1, 4]).metrics
    )
    for key in [*metrics, *asyncio.run(scored(cast(Any, FakeSampler(tokenizer))))]:
        assert definition_of(key, "guide/evaluation.md") is not None, key


def test_plain_graders_run_at_the_same_time(tokenizer, sums):
    """The grader of each of a question's four answers waits for the other three."""
    barrier = threading.Barrier(4)

    def grade(question, text):
        barrier.wait(60)
        return Verdict(True, text)

    task = replace(load_task("gsm8k", sums, limit=2), grade=grade)
    results = measured(FakeSampler(tokenizer, lucky_sum), task, DRAWN, concurrency=1)
    assert results.metrics["num_correct"] == 8


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "grade of the task gsm8k returned None; return a planish.evaluation.Verdict"),
        (True, "grade of the task gsm8k returned True; return a"),
        (
            Verdict(cast(Any, (False, "why")), None),
            r"returned correct=\(False, 'why'\); return True",
        ),
        (Verdict(cast(Any, None), None), "returned correct=None; return True or False"),
    ],
)
def test_a_grader_must_return_a_verdict(tokenizer, sums, returned, message):
    task = replace(load_task("gsm8k", sums, limit=1), grade=lambda question, text: returned)
    with pytest.raises(UserError, match=message):
        measured(FakeSampler(tokenizer, lucky_sum), task, DRAWN)
