r"""Environments of questions with boxed answers: prompt, reward, datasets and pickled groups."""

import asyncio
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from planish.datasets.gsm8k import Problem, problem_prompt
from planish.datasets.math_problems import BOX_SUFFIX
from planish.renderers import get_renderer
from planish.rl.environments.boxed_problems import BoxedProblemDatasetBuilder, BoxedProblemEnv
from planish.runlog.model_renderer import model_renderer
from planish.testing import EOS_TOKEN_ID

DATA = Path(__file__).parents[1] / "datasets" / "data"
PROBLEM = Problem("How many?", r"\frac{1}{2}", "")


@pytest.fixture
def renderer(tokenizer):
    return get_renderer("chatml", tokenizer)


def play(env, text, tokens=(EOS_TOKEN_ID,), stop_reason="stop"):
    async def episode():
        prompt, _ = await env.initial_observation()
        action = [*env.renderer.tokenizer.encode(text), *tokens]
        return prompt, await env.step(action, extra={"stop_reason": stop_reason})

    return asyncio.run(episode())


def test_the_prompt_equals_that_of_rl_loop(renderer):
    prompt, _ = play(BoxedProblemEnv(renderer, PROBLEM), "")
    assert prompt == renderer.build_generation_prompt(problem_prompt(PROBLEM))


def test_another_suffix_also_changes_the_example_question(renderer):
    prompt, _ = play(BoxedProblemEnv(renderer, PROBLEM, BOX_SUFFIX), "")
    text = renderer.tokenizer.decode(prompt.to_ints())
    assert text.count(BOX_SUFFIX) == 2
    assert "without units" not in text


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("text", "tokens", "reward", "correct", "form"),
    [
        (r"So \boxed{0.5}", [EOS_TOKEN_ID], 1.0, 1, 1),
        (r"So \boxed{0.5}", [], 0.9, 1, 0),
        (r"So \boxed{2}", [EOS_TOKEN_ID], 0.0, 0, 1),
        ("So 0.5", [EOS_TOKEN_ID], -0.1, 0, 0),
        (r"\boxed{0.5} or \boxed{3}", [EOS_TOKEN_ID], 0.0, 0, 1),
    ],
)
def test_the_reward_is_reduced_by_a_tenth_without_the_answer_format(
    renderer, text, tokens, reward, correct, form
):
    _, result = play(BoxedProblemEnv(renderer, PROBLEM), text, tokens)
    assert result.reward == pytest.approx(reward)
    assert (result.metrics["correct"], result.metrics["format"], result.metrics["unjudged"]) == (
        correct,
        form,
        0,
    )
    assert result.episode_done


@pytest.mark.sandbox
def test_an_answer_that_cannot_be_graded_is_wrong_and_counted(renderer):
    _, result = play(BoxedProblemEnv(renderer, Problem("?", "2/0", "")), r"\boxed{1/0}")
    assert (result.reward, result.metrics["correct"], result.metrics["unjudged"]) == (0.0, 0, 1)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Return a model directory with a tokenizer and a config, but no weights."""
    from planish.testing import tiny_model

    return str(tiny_model(tmp_path_factory.mktemp("model")))


def built(**options) -> Any:
    return asyncio.run(BoxedProblemDatasetBuilder(batch_size=4, group_size=3, **options)())


def test_training_has_groups_and_evaluation_single_attempts(model):
    train, test = built(collection="math", dataset=str(DATA / "math"), model_name=model)
    assert (len(train), len(test)) == (3, 1)
    batch = train.get_batch(0)
    assert [builder.logging_tags() for builder in batch] == [["math"]] * 4
    envs = asyncio.run(batch[0].make_envs())
    assert len(envs) == 3
    assert len({env.problem.question for env in envs}) == 1
    tests = [asyncio.run(builder.make_envs()) for builder in test.get_batch(0)]
    assert [[env.problem.answer for env in envs] for envs in tests] == [
        ["102"],
        ["6"],
        ["30"],
        [r"4\sqrt3"],
    ]


def test_a_prompt_is_named_by_the_place_of_its_row(model):
    train, test = built(collection="math", dataset=str(DATA / "math"), model_name=model)
    for split, dataset in (("train", train), ("test", test)):
        assert re.fullmatch(rf".*{split}\S*, (line|row) \d+", dataset.longest_prompt().place)


def test_a_pickled_group_is_small_and_equal(model):
    train, _ = built(collection="polaris", dataset=str(DATA / "polaris.jsonl"), model_name=model)
    builder = train.get_batch(0)[0]
    sent = pickle.dumps(builder)
    assert len(sent) < 2000
    [here, *_], [there, *_] = (
        asyncio.run(builder.make_envs()),
        asyncio.run(pickle.loads(sent).make_envs()),
    )
    assert asyncio.run(here.initial_observation()) == asyncio.run(there.initial_observation())
    assert here.renderer is there.renderer is model_renderer(model, None)


def test_without_evaluation_problems_there_is_no_test_set(model, capsys):
    _, test = built(collection="polaris", dataset=str(DATA / "polaris.jsonl"), model_name=model)
    assert test is None
    assert "eval_problems=N" in capsys.readouterr().out
