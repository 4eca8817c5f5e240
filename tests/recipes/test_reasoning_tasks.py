"""Tasks of reasoning-gym are generated and scored in a separate process, with the same results
everywhere and without danger to the caller.
"""

import asyncio
import pickle
import random
import sys
from contextlib import suppress
from typing import Any

import pytest

from planish.errors import UnjudgedAnswerError, UnsupportedError, UserError
from planish.recipes import reasoning_tasks
from planish.recipes.reasoning_problems import (
    ANSWER_INSTRUCTION,
    TaskDatasetBuilder,
    TaskEnv,
    TaskProblem,
    sample_entries,
)
from planish.recipes.reasoning_tasks import Entry, Task, TaskProcess, check_name, task_process
from planish.renderers import get_renderer
from planish.testing import EOS_TOKEN_ID

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]

gym = pytest.importorskip("reasoning_gym")


@pytest.fixture
def process():
    made = []

    def start(name, timeout_seconds=60.0, **options):
        made.append(TaskProcess(Task.of(name, options, seed=3), timeout_seconds))
        return made[-1]

    yield start
    for each in made:
        each.close()


def score(process, response, index=5):
    return asyncio.run(process.score(index, response))


def test_entries_and_scores_are_those_of_the_library(process):
    dataset = gym.create_dataset("letter_counting", seed=3, size=50, max_words=6)
    ours = process("letter_counting", size=50, max_words=6)
    for index in (0, 5, 49):
        entry = ours.entry(index)
        assert (entry.question, entry.answer) == (
            dataset[index]["question"],
            dataset[index]["answer"],
        )
    for response in (dataset[5]["answer"], f"it is {dataset[5]['answer']}", "none", ""):
        assert score(ours, response) == dataset.score_answer(response, dataset[5])


def test_an_entry_does_not_depend_on_the_order_of_sets_in_the_process_that_asks(
    process, monkeypatch
):
    """ransom_note samples from a set of strings, whose order differs from process to process."""
    questions = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        ours = process("ransom_note")
        questions.append([ours.entry(index).question for index in range(3)])
    assert questions[0] == questions[1]


def test_a_busy_machine_does_not_end_the_making_of_problems(process):
    assert process("letter_counting", timeout_seconds=1e-6).entry(3).answer is not None


@pytest.fixture(scope="module")
def evaluating():
    """spiral_matrix calls eval on a response in brackets."""
    ours = TaskProcess(Task.of("spiral_matrix", {}, 0), timeout_seconds=10.0)
    yield ours
    ours.close()


@pytest.mark.parametrize(
    "attack",
    [
        "[open({target!r}, 'w')]",
        "[__import__('os').open({target!r}, 65)]",
        "[__import__('os').system('touch {target}')]",
        "[__import__('subprocess').run(['touch', {target!r}])]",
        "[__import__('socket').create_connection(('127.0.0.1', 9))]",
        "[__import__('shutil').rmtree({directory!r})]",
    ],
)
def test_a_response_that_is_a_program_does_nothing(evaluating, tmp_path, attack):
    target = tmp_path / "made"
    response = attack.format(target=str(target), directory=str(tmp_path))
    with suppress(UnjudgedAnswerError):
        assert score(evaluating, response) == 0.0
    assert tmp_path.exists()
    assert not target.exists()


def test_a_response_that_never_ends_or_ends_the_process_is_unjudged_and_the_next_one_is_scored(
    evaluating,
):
    answer = evaluating.entry(5).answer
    for response in ("[9**9**9]", "[exit()]", "[__import__('os')._exit(0)]"):
        with pytest.raises(UnjudgedAnswerError, match="could not be scored"):
            score(evaluating, response)
    assert score(evaluating, answer) == 1.0


def test_what_a_response_prints_is_no_score(evaluating):
    assert (
        score(
            evaluating,
            """[print('{"score": 1.0}'), __import__('os').write(1, b'{"score": 1.0}\\n'), 1]""",
        )
        == 0.0
    )


def test_unknown_names_and_options_are_rejected_with_suggestions():
    with pytest.raises(UserError, match=r"env=chain_sums: .*did you mean chain_sum"):
        check_name("chain_sums")
    with pytest.raises(UserError, match="zebra_puzzles"):
        check_name("qqqq")
    with pytest.raises(
        UserError, match=r"task\.max_term: chain_sum has no such option; did you mean max_terms"
    ):
        Task.of("chain_sum", {"max_term": 3}, 0)
    with pytest.raises(UserError, match=r"task\.seed"):
        Task.of("chain_sum", {"seed": 3}, 0)


def test_options_that_make_no_problem_are_rejected_with_the_reason(process):
    with pytest.raises(UserError, match=r"chain_sum.*max_terms must be >= min_terms"):
        process("chain_sum", max_terms=1).entry(0)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UnsupportedError, match=r"pip install planish\[reasoning-gym\]"):
        check_name("chain_sum")


TASK = Task("any", '{"size": 10}')


class Scores:
    """A stand-in for the process, with the score of each response."""

    def __init__(self, scores):
        self.scores = scores

    async def score(self, index, response):
        assert index == 4
        return self.scores[response]


@pytest.mark.parametrize(
    ("text", "tokens", "reward", "correct", "form"),
    [
        ("<answer>9</answer>", [EOS_TOKEN_ID], 1.0, 1, 1),
        ("so <answer> 9\n</answer>", [], 0.9, 1, 0),
        ("<answer>8</answer> no <answer>9</answer>", [EOS_TOKEN_ID], 1.0, 1, 1),
        ("<answer>8</answer>", [EOS_TOKEN_ID], 0.25, 0, 1),
        ("<answer>7</answer>", [EOS_TOKEN_ID], 0.0, 0, 1),
        ("9", [EOS_TOKEN_ID], -0.1, 0, 0),
    ],
)
def test_the_reward_is_the_score_and_a_tenth_less_without_the_form(
    monkeypatch, tokenizer, text, tokens, reward, correct, form
):
    scores = Scores({"9": 1.0, "8": 0.25, "7": 0.0})
    monkeypatch.setattr("planish.recipes.reasoning_problems.task_process", lambda task: scores)
    env = TaskEnv(get_renderer("chatml", tokenizer), TaskProblem(Entry(TASK, 4, "4 + 5 = ?", "9")))
    result = asyncio.run(env.step([*tokenizer.encode(text), *tokens]))
    assert result.reward == pytest.approx(reward)
    assert (result.metrics["correct"], result.metrics["format"]) == (correct, form)
    assert result.metrics["score"] == pytest.approx(reward if form else max(0.0, reward + 0.1))


def test_worked_examples_stand_before_the_question(tokenizer):
    shown = (Entry(TASK, 1, "1 + 1 = ?\n", "2"), Entry(TASK, 2, "1 + 2 = ?", "3"))
    env = TaskEnv(
        get_renderer("chatml", tokenizer), TaskProblem(Entry(TASK, 4, "4 + 5 = ?", None), shown)
    )
    prompt, _ = asyncio.run(env.initial_observation())
    text = tokenizer.decode(prompt.to_ints())
    assert (
        text.index(f"1 + 1 = ?{ANSWER_INSTRUCTION}")
        < text.index("<answer>3</answer>")
        < text.index(f"4 + 5 = ?{ANSWER_INSTRUCTION}")
    )
    assert env.get_reference_answer() == "not named"


@pytest.fixture
def built(small_model):
    def build(**options) -> Any:
        task = {"max_terms": 2, "max_digits": 1, "size": 60}
        builder = TaskDatasetBuilder(
            task_name="chain_sum", model_name=small_model, task=task, batch_size=8, **options
        )
        return asyncio.run(builder())

    return build


def entries(dataset, batches):
    return [
        builder.env_thunk.args[0].entry for index in batches for builder in dataset.get_batch(index)
    ]


def test_questions_of_tests_and_examples_are_never_trained_on_and_batches_are_functions_of_the_index(
    built,
):
    train, test = built(eval_problems=12, seed=1)
    tested = {entry.question for entry in entries(test, [0])}
    shown = {entry.question for entry in test.get_batch(0)[0].env_thunk.args[0].shown}
    trained = {entry.question for entry in entries(train, range(12))}
    assert (len(tested), len(shown)) == (12, 2)
    assert not (tested | shown) & trained
    assert entries(train, [5]) == entries(built(eval_problems=12, seed=1)[0], [5])
    assert entries(train, [5]) != entries(train, [6])
    assert len(pickle.dumps(train.get_batch(0)[0])) < 2000
    assert built(eval_problems=0, seed=1)[1] is None


def test_a_task_with_too_few_questions_is_rejected():
    task = Task.of("chain_sum", {"max_terms": 2, "max_digits": 1, "size": 3}, 0)
    with pytest.raises(UserError, match="hardly any question remains besides the 3"):
        sample_entries(task, random.Random(0), 4, set())


def test_one_process_for_all_environments_of_a_task():
    task = Task.of("chain_sum", {}, 0)
    assert task_process(task) is task_process(Task.of("chain_sum", {}, 0))
    assert task.num_entries == reasoning_tasks.NUM_ENTRIES
