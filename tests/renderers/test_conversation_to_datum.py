"""Supervised examples become datums: shifted by one, truncated and weighted."""

import pytest
import torch
from family_tokenizers import family_tokenizer

from planish.renderers import conversation_to_datum, datum_from_weights, get_renderer
from planish.types import ModelInput

RENDERER = get_renderer("qwen3_instruct", family_tokenizer("qwen"))
MESSAGES = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]


def weights_of(datum) -> torch.Tensor:
    return datum.loss_fn_inputs["weights"].to_torch()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_positions_predict_the_next_token(reduction):
    datum = conversation_to_datum(MESSAGES, RENDERER, None, "all_assistant_messages", reduction)
    example, weights = RENDERER.build_supervised_example(MESSAGES, "all_assistant_messages")
    tokens = example.to_ints()
    assert datum.model_input.to_ints() == tokens[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == tokens[1:]
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert datum.loss_fn_inputs["weights"].dtype == "float32"
    targets = [
        token
        for token, weight in zip(tokens[1:], weights_of(datum).tolist(), strict=True)
        if weight
    ]
    assert RENDERER.tokenizer.decode(targets) == "Two.<|im_end|>Four.<|im_end|>"
    expected = 1.0 if reduction == "mean" else float(weights.sum())
    assert weights_of(datum).sum().item() == pytest.approx(expected)


def test_the_defaults_train_all_assistant_messages_with_mean_reduction():
    datum = conversation_to_datum(MESSAGES, RENDERER)
    other = conversation_to_datum(MESSAGES, RENDERER, None, "all_assistant_messages", "mean")
    assert torch.equal(weights_of(datum), weights_of(other))


def test_max_length_counts_positions():
    whole = conversation_to_datum(MESSAGES, RENDERER, reduction="none")
    length = whole.model_input.length
    assert conversation_to_datum(MESSAGES, RENDERER, length).model_input == whole.model_input
    short = conversation_to_datum(MESSAGES, RENDERER, length - 2, reduction="none")
    assert short.model_input.to_ints() == whole.model_input.to_ints()[: length - 2]
    assert weights_of(short).sum() == weights_of(whole).sum() - 2
    assert weights_of(
        conversation_to_datum(MESSAGES, RENDERER, length - 2)
    ).sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 3}, r"max_length=3 positions; raise max_length or leave"),
        ({"max_length": 0}, r"max_length=0; give"),
        ({"max_length": True}, r"max_length=True; give"),
        ({"reduction": "sum"}, r"reduction='sum'; give 'mean' or 'none'"),
    ],
)
def test_invalid_datum_arguments_are_rejected(arguments, message):
    message = message.replace(r"; give", r": give")
    with pytest.raises(ValueError, match=message):
        conversation_to_datum(MESSAGES, RENDERER, **arguments)


def test_weights_of_wrong_length_or_sign_are_rejected():
    tokens = ModelInput.from_ints([1, 2, 3])
    with pytest.raises(ValueError, match=r"shape \(2,\) for 3 tokens"):
        datum_from_weights(tokens, torch.ones(2))
    with pytest.raises(ValueError, match=r"'mean' cannot divide"):
        datum_from_weights(tokens, torch.tensor([0.0, 1.0, -1.0]))
    assert weights_of(
        datum_from_weights(tokens, torch.tensor([0.0, 1.0, -1.0]), reduction="none")
    ).tolist() == [1.0, -1.0]
    with pytest.raises(ValueError, match="no token with a weight"):
        datum_from_weights(tokens, torch.tensor([1.0, 0.0, 0.0]))
