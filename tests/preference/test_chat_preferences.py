"""The chat preference model: its prompt, its training data and its answers."""

import asyncio
import math
from dataclasses import dataclass

import pytest

from planish.preference.chat_preferences import (
    ChatPreferenceModel,
    comparison_to_datum,
    expected_preference,
    label_choice,
)
from planish.preference.preference_models import BothOrders
from planish.preference.types import Comparison, LabeledComparison
from planish.types import SampleResponse, TensorData

COMPARISON = Comparison(
    [{"role": "user", "content": "Hello."}],
    [{"role": "assistant", "content": "Good day."}],
    [{"role": "assistant", "content": "What?"}],
)
RENDERED = """<|im_start|>user
Hello.<|im_end|>
<|im_start|>system
==== Completion A ====<|im_end|>
<|im_start|>assistant
Good day.<|im_end|>
<|im_start|>system
==== Completion B ====<|im_end|>
<|im_start|>assistant
What?<|im_end|>
<|im_start|>system
==== Preference ====<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture
def choice(renderer):
    return label_choice(renderer)


def test_a_comparison_is_written_as_in_the_public_cookbook(renderer, choice):
    [datum] = comparison_to_datum(LabeledComparison(COMPARISON, "B"), choice)
    assert renderer.tokenizer.decode(datum.model_input.to_ints()) == RENDERED


@pytest.mark.parametrize(("label", "place"), [("A", 0), ("B", 1), ("Tie", 2)])
def test_only_the_label_has_weight_and_a_swap_changes_it(choice, label, place):
    [datum] = comparison_to_datum(LabeledComparison(COMPARISON, label), choice)
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    assert (weights.sum(), weights[-1, place]) == (1, 1)
    [swapped] = comparison_to_datum(LabeledComparison(COMPARISON, label).swap(), choice)
    assert swapped.loss_fn_inputs["weights"].to_numpy()[-1, [1, 0, 2][place]] == 1


def test_an_overlong_comparison_is_dropped_and_counted(choice):
    labeled = LabeledComparison(COMPARISON, "A")
    [datum] = comparison_to_datum(labeled, choice)
    length = datum.model_input.length
    assert [each.model_input.length for each in comparison_to_datum(labeled, choice, length)] == [
        length
    ]
    short = comparison_to_datum(labeled, choice, length - 1)
    assert (list(short), short.num_left_out) == ([], 1)


def test_a_preference_is_an_expectation_and_the_temperature_flattens_it():
    logprobs = [math.log(0.1), math.log(0.6), math.log(0.1)]
    assert expected_preference(logprobs) == pytest.approx(0.5 / 0.8), (
        "what else the model may say has no part in it"
    )
    assert expected_preference([-900.0, -2000.0, -2000.0]) == -1
    assert expected_preference([0.0, -2000.0, -2000.0]) == -1
    assert expected_preference([-3.0, -3.0, -0.1]) == 0
    assert 0 < expected_preference(logprobs, 10.0) < 0.2
    assert expected_preference(logprobs, 0.01) == pytest.approx(1)


@dataclass
class FirstIsBetter:
    """A sampler whose model prefers "Good day." to "What?", and also the first position."""

    choice: object
    asked: int = 0

    async def sample_async(self, prompt, target_prompt_logprobs, **_):
        self.asked += 1
        text = self.choice.renderer.tokenizer.decode(prompt.to_ints())  # type: ignore[attr-defined]
        good_first = text.index("Good day.") < text.index("What?")
        odds = 1.0 + (2.0 if good_first else -2.0)
        rows = target_prompt_logprobs.to_numpy().shape
        answer = [[0.0] * 3] * (rows[0] - 1) + [[odds / 2, -odds / 2, -math.inf]]
        return SampleResponse(
            [],
            target_prompt_logprobs=TensorData(
                [x for row in answer for x in row], "float32", list(rows)
            ),
        )


def test_judging_both_orders_removes_the_position_bias(choice):
    sampler = FirstIsBetter(choice)
    model = ChatPreferenceModel(sampler, choice)  # pyright: ignore[reportArgumentType]
    assert asyncio.run(model.log_odds(COMPARISON)) == -3
    one, other = (asyncio.run(model(each)) for each in (COMPARISON, COMPARISON.swap()))
    assert one != -other
    fair = BothOrders(model)
    sampler.asked = 0
    assert (
        asyncio.run(fair(COMPARISON))
        == -asyncio.run(fair(COMPARISON.swap()))
        == pytest.approx((one - other) / 2)
    )
    assert sampler.asked == 4
