import asyncio
import json
import pickle
import random
import re

import pytest
from hypothesis import given, strategies as st
from scripted_policy import ScriptedPolicy, contents, is_one_sequence, made, play, problems

from planish.errors import UserError
from planish.recipes import calculator as recipe
from planish.recipes.arithmetic_expressions import decimal, evaluate
from planish.recipes.calculator import (
    CalculatorDatasetBuilder,
    Kind,
    Options,
    calculator,
    example_problems,
    few_shot_messages,
)


def call(expression, name="calculator", parameter="expression"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {parameter: expression}})}\n</tool_call>"


def group_of(model, expression="384 * 27", size=1):
    return CalculatorDatasetBuilder(model_name=model).group(expression, size)


def diligent(said):
    """Compute what the question asks, and answer with the tool's result."""
    question = re.fullmatch(r"What is (.*)\?", said)
    return call(question.group(1)) if question else f"The answer is {said.split()[1]}."


def test_a_policy_that_uses_the_calculator(small_model):
    policy = ScriptedPolicy(small_model, diligent)
    group = play(group_of(small_model, size=2), policy)
    assert group.get_total_rewards() == [1.0, 1.0]
    assert group.metrics_G == [{"correct": 1.0}] * 2
    assert set(policy.asked[2:]) == {"<tool_response>\n10368\n</tool_response>"}
    for trajectory in group.trajectories_G:
        assert is_one_sequence(trajectory)
        assert trajectory.transitions[0].metrics["tool_calls/calculator"] == 1
        assert trajectory.stop_reason == "completed"


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["10368"], 1.0),
        (["10,368"], 1.0),
        (["10367"], 0.0),
        (["I do not know"], 0.0),
        (["no end..."], -0.1),
        ([call("384 *"), call("384 * 27"), "10368"], 1.0),
        ([call("384 * 27", name="abacus"), "10368"], 1.0),
        ([call("384 * 27", parameter="x"), "10368"], 1.0),
        ([call("384 * 27"), "no end..."], -0.1),
        ([call("384 * 27")] * 4, 0.0),
    ],
)
def test_rewards(small_model, answers, reward):
    said = iter(answers)
    group = play(group_of(small_model), ScriptedPolicy(small_model, lambda _: next(said)))
    assert group.get_total_rewards() == [reward]
    assert group.metrics_G == [{"correct": float(reward == 1.0)}]
    assert is_one_sequence(group.trajectories_G[0])


@pytest.mark.parametrize("expression", ["384 *", "__import__('os')", "9**9**9"])
def test_calculator_errors_are_reported_to_the_model(small_model, expression):
    said = iter([call(expression), "?"])
    policy = ScriptedPolicy(small_model, lambda _: next(said))
    group = play(group_of(small_model), policy)
    assert "Error: calculator:" in policy.asked[1]
    assert group.trajectories_G[0].transitions[0].metrics["tool_errors"] == 1


def test_the_tool_is_a_function_too():
    assert asyncio.run(calculator(expression="2 + 2")) == "4"
    assert calculator.parameters_schema["required"] == ["expression"]


@given(operands=st.integers(2, 10), digits=st.integers(2, 12), seed=st.integers())
def test_problems_have_their_size_and_a_value(operands, digits, seed):
    expression = Kind(operands=operands, digits=digits).sample(random.Random(seed))
    numbers = re.findall(r"\d+", expression)
    assert len(numbers) == operands
    assert all(digits - 1 <= len(number) <= digits for number in numbers)
    assert evaluate(expression).denominator == 1


@pytest.mark.parametrize("kind", [Kind(), Kind(operands=4, digits=2), Kind(operands=10, digits=12)])
def test_the_shown_problems_are_worked_rightly(kind):
    messages = few_shot_messages(kind)
    for question, asked, computed, answer in zip(*[iter(messages)] * 4, strict=True):
        expression = json.loads(asked["tool_calls"][0]["function"]["arguments"])["expression"]
        assert question["content"] == f"What is {expression}?"
        assert computed["content"] == answer["content"] == decimal(evaluate(expression))
    operations = "".join(example_problems(kind))
    assert all(f" {operation} " in operations for operation in "+-*")


def test_problems_of_the_test_are_not_trained_on(small_model):
    builder = CalculatorDatasetBuilder(
        model_name=small_model, kind=Kind(digits=2), batch_size=50, group_size=2, test_problems=1000
    )
    train, test = made(builder)
    tested = set(problems(test.get_batch(0)))
    trained = {expression for index in range(40) for expression in problems(train.get_batch(index))}
    assert len(tested) == 1000
    assert len(trained) > 1000
    assert not tested & trained
    assert not set(example_problems(Kind(digits=2))) & tested


def test_batches_are_functions_of_seed_and_index(small_model):
    def batch(seed, index):
        train, _ = made(CalculatorDatasetBuilder(model_name=small_model, seed=seed))
        return train.get_batch(index)

    assert contents(batch(0, 3)) == contents(batch(0, 3))
    assert contents(batch(0, 3)) != contents(batch(0, 4))
    assert contents(batch(0, 3)) != contents(batch(1, 3))
    assert contents(pickle.loads(pickle.dumps(batch(0, 3)))) == contents(batch(0, 3))


def test_there_may_be_no_tests(small_model):
    _, test = made(CalculatorDatasetBuilder(model_name=small_model, test_problems=0))
    assert test is None


@pytest.mark.parametrize(
    ("option", "value"),
    [("operands", 1), ("digits", 1), ("batch_size", 0), ("group_size", 1), ("test_problems", -1)],
)
def test_options_that_cannot_be_right(option, value):
    with pytest.raises(UserError, match=f"{option}={value}"):
        recipe.main(Options(**{option: value}))
