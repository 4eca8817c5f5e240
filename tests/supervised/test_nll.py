"""Nats and bits of texts, computed by hand and by the engine."""

import asyncio
import math

import pytest
import torch

from planish import ServiceClient
from planish.renderers import conversation_to_datum
from planish.supervised import nll
from planish.supervised.nll import NLLEvaluator, NLLSums
from planish.testing import tiny_model
from planish.types import Datum, ForwardBackwardOutput, ModelInput, TensorData

END = 258
"""<|im_end|> of the byte tokenizer."""


def scored(targets, weights, logprobs):
    datum = Datum(
        ModelInput.from_ints([1] * len(targets)), {"target_tokens": targets, "weights": weights}
    )
    shape = list(torch.tensor(logprobs).shape)
    output = ForwardBackwardOutput(
        "arrays",
        [{"logprobs": TensorData(torch.tensor(logprobs).flatten().tolist(), "float32", shape)}],
    )
    return [datum], output


def test_nll_in_nats_uses_weights_and_bits_use_text_length(tokenizer):
    text = list("né".encode())
    targets = [65, *text, END, 66, 67]
    weights = [0.0, 0.5, 0.25, 0.25, 1.0, 0.0, 2.0]
    logprobs = [-9.0, -1.0, -2.0, -3.0, -4.0, -9.0, -5.0]
    found = NLLSums(tokenizer).add(*scored(targets, weights, logprobs)).metrics("nll", "bpb")
    assert found["nll"] == pytest.approx((0.5 + 0.5 + 0.75 + 4.0 + 10.0) / 4.0)
    assert found["bpb"] == pytest.approx((1 + 2 + 3 + 5) / (math.log(2) * 4))


def test_metrics_without_data_are_not_reported(tokenizer):
    assert NLLSums(tokenizer).metrics("nll", "bpb") == {}
    assert NLLSums(tokenizer).add(*scored([END], [1.0], [-2.0])).metrics("nll", "bpb") == {
        "nll": 2.0
    }


def test_soft_targets_have_nats_and_no_text(tokenizer):
    data, output = scored(
        [[65, 66], [67, 68]], [[0.5, 0.5], [1.0, 0.0]], [[-1.0, -3.0], [-2.0, -7.0]]
    )
    assert NLLSums(tokenizer).add(data, output).metrics("nll", "bpb") == {"nll": pytest.approx(2.0)}


def test_nll_does_not_depend_on_the_number_of_calls(tmp_path, renderer, monkeypatch):
    data = [
        conversation_to_datum(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}],
            renderer,
            reduction="none",
        )
        for n in range(1, 6)
    ]
    with ServiceClient(data_dir=tmp_path / "data") as service:
        client = service.create_lora_training_client(
            base_model=str(tiny_model(tmp_path / "model")), rank=2, seed=0
        )
        whole = asyncio.run(NLLEvaluator(data, "held_out")(client))
        monkeypatch.setattr(nll, "DATUMS_PER_CALL", 2)
        assert asyncio.run(NLLEvaluator(data, "held_out")(client)) == pytest.approx(whole, rel=1e-5)
    assert set(whole) == {"held_out/nll", "held_out/bpb"}
    uniform = math.log2(272)
    assert 0.5 * uniform < whole["held_out/bpb"] < 2 * uniform, (
        "a random model knows nothing of bytes"
    )
