"""The Bradley-Terry model: its loss agrees with plain torch and its scores with transformers, and
preferences are antisymmetric.
"""

import asyncio
import math

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM

from planish import AdamParams, ServiceClient
from planish.preference.bradley_terry import (
    QUESTION,
    BradleyTerryPreferenceModel,
    bradley_terry_loss,
    comparison_to_score_data,
    score_choice,
    score_conversation,
)
from planish.preference.types import Comparison, LabeledComparison

COMPARISON = Comparison(
    [{"role": "user", "content": "Hello."}],
    [{"role": "assistant", "content": "Good day."}],
    [{"role": "assistant", "content": "What?"}],
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with ServiceClient(data_dir=tmp_path_factory.mktemp("data"), dtype="float32") as client:
        yield client


@pytest.fixture(scope="module")
def choice(renderer):
    return score_choice(renderer)


def test_each_pair_has_the_chosen_answer_first_and_one_prompt(renderer, choice):
    chosen, rejected = comparison_to_score_data(LabeledComparison(COMPARISON, "B"), choice)
    texts = [renderer.tokenizer.decode(datum.model_input.to_ints()) for datum in (chosen, rejected)]
    assert "What?" in texts[0]
    assert "Good day." in texts[1]
    assert all(text.endswith(f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n") for text in texts)
    longest = max(datum.model_input.length for datum in (chosen, rejected))
    assert (
        len(
            comparison_to_score_data(LabeledComparison(COMPARISON, "B"), choice, max_length=longest)
        )
        == 2
    )
    short = comparison_to_score_data(
        LabeledComparison(COMPARISON, "B"), choice, max_length=longest - 1
    )
    assert (list(short), short.num_left_out) == ([], 1)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=5))
def test_loss_and_gradient_equal_plain_torch(choice, odds):
    """Plain torch computes the loss from the differences of the pairs' logits. planish computes it
    from the logprobs of Yes and No.
    """
    data = [
        datum
        for _ in odds
        for datum in comparison_to_score_data(LabeledComparison(COMPARISON, "A"), choice)
    ]
    flat = [value for pair in odds for value in pair]
    plain = torch.tensor(
        [[value, 0.5, -1.0] for value in flat], dtype=torch.float64, requires_grad=True
    )
    scores = plain[:, 0] - plain[:, 1]
    expected = torch.nn.functional.softplus(-(scores[::2] - scores[1::2])).mean()
    expected.backward()
    logits = plain.detach().clone().requires_grad_()
    answers = logits.log_softmax(-1)[:, :2]
    rows = [
        torch.cat(
            [torch.full((datum.model_input.length - 1, 2), -7.0, dtype=torch.float64), answer[None]]
        )
        for datum, answer in zip(data, answers, strict=True)
    ]
    loss, measured = bradley_terry_loss(data, rows)
    loss.backward()
    assert plain.grad is not None
    assert logits.grad is not None
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, plain.grad)
    margins = [chosen - rejected for chosen, rejected in odds]
    assert measured["score_margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-6)


def test_the_applied_gradient_is_that_of_the_loss(client, models, choice):
    """The norm of the adapter's gradient with the custom loss equals that of the linear loss with
    weights dL/dscore.
    """
    data = list(comparison_to_score_data(LabeledComparison(COMPARISON, "A"), choice))
    norms = []
    for custom in (True, False):
        trainer = client.create_lora_training_client(base_model=models[0], rank=4, seed=3)
        if custom:
            trainer.forward_backward_custom(data, bradley_terry_loss)
        else:
            output = trainer.forward(data, "cross_entropy").result()
            yes_no = [tensors["logprobs"].to_numpy()[-1] for tensors in output.loss_fn_outputs]
            margin = float(yes_no[0][0] - yes_no[0][1] - yes_no[1][0] + yes_no[1][1])
            pull = 1 / (1 + math.exp(margin))
            weighted = [
                choice.datum(
                    score_conversation(COMPARISON.prompt_conversation, answer, QUESTION),
                    [sign * pull, -sign * pull],
                )
                for answer, sign in ((COMPARISON.completion_A, 1), (COMPARISON.completion_B, -1))
            ]
            trainer.forward_backward(weighted, "cross_entropy")
        norms.append(
            trainer.optim_step(AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"]
        )
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0


def test_a_score_is_a_logit_difference_and_swapping_negates_it(client, models, choice):
    model = BradleyTerryPreferenceModel(
        client.create_sampling_client(base_model=models[0]), choice, temperature=2.0
    )
    reference = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    scores = []
    for answer in (COMPARISON.completion_A, COMPARISON.completion_B):
        prompt = choice.prompt(score_conversation(COMPARISON.prompt_conversation, answer, QUESTION))
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0, -1]
        scores.append(float(logits[choice.deciding_tokens[0]] - logits[choice.deciding_tokens[1]]))
        assert asyncio.run(model.score(COMPARISON.prompt_conversation, answer)) == pytest.approx(
            scores[-1], abs=1e-4
        )
    preference = asyncio.run(model(COMPARISON))
    probability = 1 / (1 + math.exp(-(scores[1] - scores[0]) / 2))
    assert preference == pytest.approx(2 * probability - 1, abs=1e-4)
    assert asyncio.run(model(COMPARISON.swap())) == -preference
