"""code_rl, from single answers of a scripted policy to a whole run."""

import json
import pickle
import re
from typing import Any

import pytest
from scripted_policy import ScriptedPolicy, contents, is_one_sequence, made, play, problems

from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import code_rl as recipe
from planish.recipes.code_datasets import (
    CodeDatasetBuilder,
    FunctionDatasetBuilder,
    example_functions,
)
from planish.recipes.code_env import (
    Rules,
    code_block,
    process_sandbox,
    read_program,
    report,
    truncate,
)
from planish.recipes.code_problems import CodeProblem
from planish.recipes.code_rl import Options
from planish.recipes.training_run import read_options
from planish.rl.environments.problem_env import ProblemGroupBuilder
from planish.rl.limits import RolloutLimits
from planish.sandbox import (
    FunctionTest,
    Limits,
    Outcome,
    StdinTest,
    TestResult,
)
from planish.sandbox.sandbox import Ending, Execution

DOUBLE = CodeProblem(
    "Double x.",
    (
        FunctionTest("f", (3,), 6),
        FunctionTest("f", (0,), 0),
        FunctionTest("f", (-5,), -10),
        FunctionTest("f", (2,), 4),
    ),
    (FunctionTest("f", (3,), 6),),
)
ECHO = CodeProblem(
    "Print what you read.",
    (StdinTest("a\n", "a\n"), StdinTest("b\n", "b\n")),
    (StdinTest("a\n", "a\n"),),
)
pytestmark = pytest.mark.sandbox

RIGHT = code_block("def f(x):\n    return 2 * x")
WRONG = code_block("def f(x):\n    return x + 2")
HALF = code_block("def f(x):\n    return abs(2 * x) if x != 2 else 5")
"""Passes the public test, and one more."""


def attempts(model: str, **rules: Any) -> CodeDatasetBuilder:
    return CodeDatasetBuilder(model_name=model, dataset="not read", rules=Rules(**rules))


@pytest.fixture
def rollout(small_model):
    def one(answer: Any, problem=DOUBLE, **rules: Any):
        """Return (trajectory, its reward, its metrics, the text of the observations)."""
        answers: Any = answer if callable(answer) else lambda _: answer
        policy = ScriptedPolicy(small_model, answers)
        group = play(attempts(small_model, **rules).group(problem, 1), policy)
        [trajectory], [reward], [metrics] = (
            group.trajectories_G,
            group.get_total_rewards(),
            group.metrics_G,
        )
        return trajectory, reward, metrics, policy.asked

    return one


def test_the_last_block_of_an_answer_is_its_program():
    assert read_program("First:\n```python\na\n```\nBetter:\n```py\nb\n```") == "b\n"
    assert read_program("```\na\n```") == "a\n"
    assert read_program("a") is None
    assert read_program("```python\na") is None
    assert read_program(code_block("x = 1")) == "x = 1\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "problem", "reward", "correct", "form"),
    [
        (RIGHT, DOUBLE, 1.0, 1, 1),
        (WRONG, DOUBLE, 0.0, 0, 1),
        (HALF, DOUBLE, 0.0, 0, 1),
        ("def f(x): return 2 * x", DOUBLE, -0.1, 0, 0),
        (code_block("print(input())"), ECHO, 1.0, 1, 1),
        (code_block("print('a')"), ECHO, 0.0, 0, 1),
        ("```python\nprint(inp...", ECHO, -0.1, 0, 0),
    ],
)
def test_one_answer(rollout, answer, problem, reward, correct, form):
    trajectory, got, metrics, asked = rollout(answer, problem)
    assert got == pytest.approx(reward)
    assert metrics == {"correct": correct, "format": form}
    assert len(trajectory.transitions) == 1
    assert len(asked) == 1
    assert asked[0].startswith(problem.question)
    assert "6" not in asked[0]


@pytest.mark.slow
def test_a_part_of_the_tests_is_a_part_of_the_reward(rollout):
    for answer, part in ((RIGHT, 1.0), (HALF, 0.5), (WRONG, 0.25), ("no", 0.0)):
        _, reward, metrics, _ = rollout(answer, reward="fraction", format_coef=0.0)
        assert reward == metrics["tests_passed"] == part
        assert metrics["correct"] == (part == 1.0)


@pytest.mark.slow
def test_a_program_is_mended(rollout):
    def answer(asked):
        return RIGHT if "It returned" in asked else WRONG

    trajectory, reward, metrics, asked = rollout(answer, max_turns=3)
    assert reward == 1.0
    assert metrics == {"correct": 1.0, "format": 1.0, "correct_at_once": 0.0, "repaired": 1.0}
    assert asked[1] == "f(3) must return 6. It returned 5. Write the whole program again."
    assert len(trajectory.transitions) == 2
    assert trajectory.stop_reason == "completed"
    assert is_one_sequence(trajectory)


@pytest.mark.slow
def test_what_is_right_at_once_is_not_asked_again(rollout):
    trajectory, reward, metrics, _ = rollout(RIGHT, max_turns=3)
    assert (reward, len(trajectory.transitions), metrics["correct_at_once"]) == (1.0, 1, 1.0)
    trajectory, reward, metrics, asked = rollout(HALF, max_turns=3)
    assert (reward, len(trajectory.transitions), metrics["repaired"]) == (0.0, 1, 0.0)
    assert "-5" not in str(asked)  # only public tests are shown


@pytest.mark.slow
def test_a_part_is_earned_by_hidden_tests_where_others_were_shown(rollout):
    only_shown = code_block("def f(x):\n    return 6 if x == 3 else 1")
    assert rollout(only_shown, reward="fraction")[1] == 0.25
    assert rollout(only_shown, reward="fraction", max_turns=2)[1] == 0.0
    assert rollout(HALF, reward="fraction", max_turns=2)[1] == pytest.approx(1 / 3)
    assert CodeProblem("", DOUBLE.tests[:1], DOUBLE.tests[:1]).hidden_tests == DOUBLE.tests[:1]


@pytest.mark.slow
def test_repair_ends(rollout):
    trajectory, reward, metrics, asked = rollout(WRONG, max_turns=3)
    assert (reward, len(trajectory.transitions), metrics["correct"]) == (0.0, 3, 0.0)
    assert trajectory.stop_reason == "max_turns"
    _, reward, metrics, asked = rollout("no program", max_turns=2)
    assert reward == pytest.approx(-0.1)
    assert asked[1] == "There is no program in the answer. Write it between ```python and ```."
    _, reward, _, _ = rollout(lambda asked: "cut..." if "returned" in asked else WRONG, max_turns=3)
    assert reward == pytest.approx(-0.1)


def test_an_episode_that_a_limit_ends_counts_its_last_program(small_model):
    def limited_env():
        env = attempts(small_model, max_turns=3, reward="fraction").make_env(DOUBLE)
        env.rollout_limits = RolloutLimits(max_turns=1)
        return env

    limited = ProblemGroupBuilder(limited_env, 1)
    partly = code_block("def f(x):\n    return 2 * x if x not in (2, 3) else 0")
    for answer, expected in ((partly, 2 / 3), ("no program", -0.1)):
        group = play(limited, ScriptedPolicy(small_model, lambda _, answer=answer: answer))
        assert group.get_total_rewards() == [pytest.approx(expected)]
        assert group.trajectories_G[0].stop_reason == "max_turns"


def execution(**changes):
    return Execution(
        **{
            "ending": Ending.EXITED,
            "exit_code": 1,
            "stdout": b"",
            "stderr": b"",
            "seconds": 0.1,
            **changes,
        }
    )


def test_reports_say_what_happened():
    call, echo = DOUBLE.tests[0], ECHO.tests[0]
    failed = TestResult(
        Outcome.FAILED, execution(stderr=b"Traceback\n  File\nNameError: name 'y'\n"), ""
    )
    assert report(call, failed) == "f(3) must return 6. It failed: NameError: name 'y'."
    assert report(call, TestResult(Outcome.FAILED, execution(exit_code=139), "")).endswith(
        "It failed: exit code 139."
    )
    assert report(call, TestResult(Outcome.TIME, execution(), "")).endswith("It took too long.")
    assert report(call, TestResult(Outcome.OUTPUT, execution(), "")).endswith(
        "It printed without end."
    )
    wrong = TestResult(Outcome.WRONG, execution(exit_code=0), "b\n")
    assert report(echo, wrong) == "For the input\na\nit must print\na\n It printed\nb\n"
    assert truncate("x" * 1000) == "x" * 400 + " ... (1000 characters)"


# Data


def questions_of(dataset, batches=1):
    return {
        problem.question
        for index in range(batches)
        for problem in problems(dataset.get_batch(index))
    }


def test_generated_problems_are_functions_of_seed_and_index(small_model):
    def batch(seed, index, steps=1):
        train, _ = made(FunctionDatasetBuilder(model_name=small_model, seed=seed, steps=steps))
        return train.get_batch(index)

    assert contents(batch(0, 3)) == contents(batch(0, 3))
    assert contents(batch(0, 3)) != contents(batch(0, 4))
    assert contents(batch(0, 3)) != contents(batch(1, 3))
    assert contents(batch(0, 3)) != contents(batch(0, 3, steps=2))
    assert contents(pickle.loads(pickle.dumps(batch(0, 3)))) == contents(batch(0, 3))


def test_tests_and_examples_are_not_trained_on(small_model):
    train, test = made(FunctionDatasetBuilder(model_name=small_model, eval_problems=40))
    tested = questions_of(test)
    trained = questions_of(train, 40)
    shown = {function.problem.question for function in example_functions(1)}
    assert len(tested) == 40
    assert len(shown) == 3
    assert not tested & trained
    assert not shown & (tested | trained)
    with pytest.raises(
        UserError,
        match="eval_problems=5000: there are about 1.. functions of steps=1, .* give at most",
    ):
        made(FunctionDatasetBuilder(model_name=small_model, eval_problems=5000))
    assert made(FunctionDatasetBuilder(model_name=small_model, eval_problems=0))[1] is None


def row(number):
    return {"question": f"Add {number}.", "tests": [{"input": "1", "output": str(1 + number)}]}


def write(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_rows_of_a_file(small_model, tmp_path, capsys):
    rows = [*map(row, range(10)), {"question": "Untested.", "tests": []}]
    file = write(tmp_path / "problems.jsonl", rows)
    train, test = made(CodeDatasetBuilder(model_name=small_model, dataset=file, batch_size=4))
    assert test is None
    assert len(train) == 3
    assert "1 of 11 rows have no tests that can be run" in capsys.readouterr().out
    train, test = made(CodeDatasetBuilder(model_name=small_model, dataset=file, eval_problems=3))
    questions = questions_of(train, len(train))
    held_out = questions_of(test)
    assert (len(questions), len(held_out), questions & held_out) == (7, 3, set())
    with pytest.raises(UserError, match="eval_problems=10: .* has no test split"):
        made(CodeDatasetBuilder(model_name=small_model, dataset=file, eval_problems=10))
    nothing = write(tmp_path / "nothing.jsonl", rows[-1:])
    with pytest.raises(UserError, match="none of its 1 rows has tests"):
        made(CodeDatasetBuilder(model_name=small_model, dataset=nothing))


def test_columns_and_fields_of_tests_that_are_not_used_are_named(small_model, tmp_path, caplog):
    """Columns of other problem forms count too: only the first question is asked."""
    tests = [{"input": "1", "output": "2", "type": "stdin_stdout", "points": 5}]
    rows = [
        row(0),
        {**row(1), "problem": "Add 1, please.", "metadata": "{}", "time_limit": 2},
        {"problem": "Add 2.", "input_output": json.dumps(tests), "time_limit": None},
        {"question": "Add 3.", "tests": {"inputs": ["1"], "outputs": ["4"], "limits": {"s": 1}}},
        {**row(4), "public_tests": json.dumps([{"input": "1", "output": "5", "hint": "+"}])},
        {**row(5), "metadata": '{"func_name": "f"}', "starter_code": "x = 1"},
    ]
    file = write(tmp_path / "problems.jsonl", rows)
    made(CodeDatasetBuilder(model_name=small_model, dataset=file, batch_size=4))
    assert (
        f'dataset {file}, train: columns that are not used: "problem" (1 row, first in {file}, '
        f'line 2), "metadata" (1 row, first in {file}, line 2), "time_limit" (1 row, first in '
        f'{file}, line 2), "input_output[].points" (1 row, first in {file}, line 3), '
        f'"tests[].limits" (1 row, first in {file}, line 4), "public_tests[].hint" (1 row, first '
        f"in {file}, line 5)"
    ) in caplog.text


def test_problems_with_long_prompts_are_left_out_and_counted(small_model, tmp_path, caplog):
    rows = [*map(row, range(4)), {**row(4), "question": "Add 4." + " Think." * 500}]
    file = write(tmp_path / "problems.jsonl", rows)
    for env in ("solve", "repair"):
        options = Options(model_name=small_model, dataset=file, env=env, max_prompt_tokens=500)
        caplog.clear()
        train, _ = made(recipe.dataset_builder(options))
        assert questions_of(train) == {f"Add {number}." for number in range(4)}
        assert (
            "1 of 5 train problems are left out, because their prompts have more than "
            f"max_prompt_tokens=500 tokens; the first is {file}, line 5, with"
        ) in caplog.text
    options = Options(model_name=small_model, max_prompt_tokens=20)
    with pytest.raises(UserError, match="max_prompt_tokens=20: .* problems are longer"):
        made(recipe.dataset_builder(options))


def test_a_directory_has_splits(small_model, tmp_path):
    for split, numbers in (("train", range(5)), ("test", range(10, 13)), ("hard", range(20, 22))):
        write(tmp_path / f"{split}.jsonl", map(row, numbers))
    shared = {"model_name": small_model, "dataset": str(tmp_path)}

    def tested(**options):
        _, test = made(CodeDatasetBuilder(**shared, **options))
        return test and [problem.question for problem in problems(test.get_batch(0))]

    assert tested() == ["Add 10.", "Add 11.", "Add 12."]
    assert tested(eval_problems=2) == ["Add 10.", "Add 11."]
    assert tested(eval_problems=0) is None
    assert tested(test_split="hard") == ["Add 20.", "Add 21."]
    train, _ = made(CodeDatasetBuilder(**shared, train_split="hard"))
    assert questions_of(train) == {"Add 20.", "Add 21."}


@pytest.mark.slow
def test_the_worked_examples_are_right(small_model):
    """A policy that copies them gives correct answers."""
    for function in example_functions(2):
        builder = attempts(small_model).group(function.problem, 1)
        policy = ScriptedPolicy(
            small_model, lambda _, solution=function.solution: code_block(solution)
        )
        assert play(builder, policy).get_total_rewards() == [1.0]


# Options and runs


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_turns": 3}, "max_turns=3 is an option for env=repair"),
        ({"env": "repair", "max_turns": 1}, "max_turns=1"),
        ({"max_tests": 3}, "max_tests=3 is an option for dataset="),
        ({"dataset": "x.jsonl", "steps": 2}, "steps=2 is an option for generated"),
        ({"dataset": "x.jsonl", "shown_tests": 0}, "shown_tests=0"),
        ({"steps": 0}, "steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"group_size": 1}, "group_size=1"),
        ({"eval_problems": -1}, "eval_problems=-1"),
        ({"format_coef": -1.0}, "format_coef=-1.0"),
        ({"max_steps": None}, "max_steps=None"),
        ({"cpu_seconds": 0}, "cpu_seconds=0"),
        ({"memory_mb": 1}, "memory_bytes=1048576"),
    ],
)
def test_options_that_cannot_be_right(options, complaint, tmp_path):
    with pytest.raises(UserError, match=re.escape(complaint)):
        recipe.main(Options(log_path=str(tmp_path / "run"), **options))
    assert not (tmp_path / "run").exists()


def test_presets_are_options():
    for preset, options in recipe.PRESETS.items():
        config = read_options(recipe.Options, recipe.PRESETS, [f"preset={preset}", "seed=3"])
        assert {name: getattr(config, name) for name in options} == options
        recipe.check(config)
        recipe.dataset_builder(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["env=solve"], ["env=repair", "max_turns=2", "reward=fraction", "steps=2"], ["FILE"]],
)
def test_a_run_and_its_resumption(arguments, small_model, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    if arguments == ["FILE"]:
        arguments = [f"dataset={write(tmp_path / 'problems.jsonl', map(row, range(10)))}"]
    given = [
        f"model_name={small_model}",
        f"log_path={tmp_path / 'run'}",
        "lora_rank=4",
        "max_tokens=6",
    ]
    given += ["eval_every=1", "eval_problems=2", "batch_size=2", "group_size=2", *arguments]
    for steps in (1, 2):
        path = recipe.main(read_options(Options, {}, [*given, f"max_steps={steps}"]))
    rows = read_rows(path / "metrics.jsonl")
    assert [one["step"] for one in rows] == [0, 1, 2]
    assert all("test/env/all/correct" in one for one in rows)
    assert all(-0.1 - 1e-9 <= one["env/all/reward/total"] <= 1.0 for one in rows[:2])
    assert json.loads((path / "config.json").read_text())["recipe_name"] == "code_rl"


def test_a_sandbox_is_one_for_a_process_and_its_limits():
    assert process_sandbox(Limits()) is process_sandbox(Limits())
    assert process_sandbox(Limits()) is not process_sandbox(Limits(cpu_seconds=9))
