"""A choice between fixed answers: the token that decides it, its training data, and equal logprobs
in sampler and trainer.
"""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish import ServiceClient
from planish.errors import UserError
from planish.preference.choices import Choice
from planish.renderers import get_renderer

TALK = [
    {"role": "user", "content": "Is it so?"},
    {"role": "assistant", "content": "Perhaps."},
    {"role": "user", "content": "Yes or No?"},
]


@pytest.mark.parametrize("name", ["qwen3_instruct", "qwen3", "chatml", "llama3", "role_colon"])
def test_the_deciding_token_follows_the_full_judge_output(renderer, name):
    renderer = get_renderer(name, renderer.tokenizer)
    choice = Choice.between(("Yes", "No"), renderer)
    for answer, token in zip(choice.answers, choice.deciding_tokens, strict=True):
        whole, _ = renderer.build_supervised_example(
            [*TALK, {"role": "assistant", "content": answer}]
        )
        prompt = choice.prompt(TALK)
        assert whole.to_ints()[: len(prompt) + 1] == [*prompt, token]
        assert renderer.tokenizer.decode(whole.to_ints()[len(prompt) :]).lstrip().startswith(answer)


def test_choices_with_a_common_first_token_are_rejected(renderer):
    with pytest.raises(UserError, match="do not differ in their first token"):
        Choice.between(("Yes", "Yeah", "No"), renderer)


def test_only_the_deciding_position_is_trained(renderer):
    choice = Choice.between(("A", "B", "Tie"), renderer)
    datum = choice.datum(TALK, [0.0, 1.0, 0.0])
    targets, weights = (
        datum.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights")
    )
    assert targets.shape == weights.shape == (datum.model_input.length, 3)
    assert weights.sum() == weights[-1, 1] == 1
    assert renderer.tokenizer.decode(targets[-1]) == "ABT"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with ServiceClient(data_dir=tmp_path_factory.mktemp("data"), dtype="float32") as client:
        yield client


def test_logprobs_equal_transformers_and_the_trainer(client, models, renderer):
    choice = Choice.between(("A", "B", "Tie"), renderer)
    sampler = client.create_sampling_client(base_model=models[0])
    found = asyncio.run(choice.logprobs(sampler, TALK))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
        logits = model(torch.tensor([choice.prompt(TALK)])).logits[0, -1]
    expected = logits.log_softmax(-1)[list(choice.deciding_tokens)].tolist()
    assert found == pytest.approx(expected, abs=1e-4)
    training_client = client.create_lora_training_client(base_model=models[0], rank=2, seed=0)
    output = training_client.forward(
        [choice.datum(TALK, [1.0, 0.0, 0.0])], "cross_entropy"
    ).result()
    assert output.loss_fn_outputs[0]["logprobs"].to_numpy()[-1] == pytest.approx(found, abs=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-found[0], abs=1e-5)
