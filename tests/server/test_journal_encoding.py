"""What is journaled is decoded unchanged, and a repeated request is recognised however it
arrived.
"""

from dataclasses import replace

import numpy as np
import pytest
from json_bodies import forward_backward_to_json
from server_client import adam, gradient, sample

from planish.server.request import encode_operation
from planish.service import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    PublishSampler,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import LoraConfig, ModelInput, SamplingParams, TensorData
from planish.wire.fields import Fields
from planish.wire.models import parse_server_id
from planish.wire.operations import operation_from_bytes
from planish.wire.training import forward_backward_from_json

MODEL, SAMPLER = "a1:train:3", "a1:sample:4"

OPERATIONS = [
    adam(MODEL),
    CreateModel(MODEL, "base", LoraConfig(8, 5, train_mlp=False), user_metadata={"a": "b"}),
    CreateModel(
        MODEL, None, from_path="tinker://r/weights/w", with_optimizer=True, user_metadata={"a": "b"}
    ),
    CreateModel(MODEL, "base", from_path="tinker://r/sampler_weights/w"),
    LoadWeights(MODEL, "tinker://r/weights/w", with_optimizer=True),
    SaveWeights(MODEL, "w", 3600, True, {"a": "b"}),
    SaveWeightsForSampler(MODEL, "w", 3600, False, {}),
    PublishSampler(MODEL, SAMPLER),
    UnloadModel(MODEL),
    sample(SAMPLER, seed=3, stop=["x"]),
    sample(SAMPLER, seed=2**63, stop=[], top_k=3, top_p=0.5, min_p=0.1, temperature=0.0),
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: type(operation).__name__)
def test_an_operation_survives_encoding(operation):
    journaled = encode_operation(operation, 7)
    assert journaled.operation is operation
    assert operation_from_bytes(journaled.kind, journaled.body) == operation


@pytest.mark.parametrize("forward_only", [True, False])
def test_training_data_survive_encoding(forward_only):
    operation = replace(
        gradient(MODEL, 1, forward_only), loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9}
    )
    journaled = encode_operation(operation, 2**40)
    assert journaled.kind == ("forward" if forward_only else "forward_backward")
    back = operation_from_bytes(journaled.kind, journaled.body)
    assert isinstance(back, ForwardBackward)
    assert replace(back, data=[]) == replace(operation, data=[])
    assert len(back.data) == len(operation.data)
    for ours, theirs in zip(back.data, operation.data, strict=True):
        assert ours.model_input.to_ints() == theirs.model_input.to_ints()
        assert ours.loss_fn_inputs.keys() == theirs.loss_fn_inputs.keys()
        for name, tensor in theirs.loss_fn_inputs.items():
            np.testing.assert_array_equal(ours.loss_fn_inputs[name].to_numpy(), tensor.to_numpy())


def test_prompt_logprob_requests_survive_encoding():
    targets = TensorData(np.array([[1, -1], [2, 3]]), "int64", [2, 2])
    operation = Sample(
        SAMPLER,
        ModelInput.from_ints([1, 2, 3]),
        1,
        SamplingParams(1, seed=1),
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=4,
        prompt_logprobs_last_n=5,
        record_stability_info=True,
    )
    journaled = encode_operation(operation, 0)
    back = operation_from_bytes(journaled.kind, journaled.body)
    assert isinstance(back, Sample)
    assert back.target_prompt_logprobs is not None
    np.testing.assert_array_equal(back.target_prompt_logprobs.to_numpy(), targets.to_numpy())
    assert replace(back, target_prompt_logprobs=None) == replace(
        operation, target_prompt_logprobs=None
    )


def test_the_digest_covers_the_request_and_not_the_chosen_seed():
    first, second = (encode_operation(sample(SAMPLER), 3) for _ in range(2))
    assert first.digest == second.digest
    assert first.operation != second.operation
    assert operation_from_bytes("sample", first.body) == first.operation
    created = [encode_operation(CreateModel(MODEL, "base", LoraConfig(4)), 0) for _ in range(2)]
    assert created[0].digest == created[1].digest
    assert created[0].body != created[1].body


def test_different_requests_have_different_digests():
    digests = {
        encode_operation(operation, 7).digest
        for operation in [*OPERATIONS, gradient(MODEL, 1), gradient(MODEL, 2)]
    }
    assert len(digests) == len(OPERATIONS) + 2


def test_both_wires_have_one_digest():
    operation = gradient(MODEL, 1)
    told = Fields(forward_backward_to_json(operation, 5))
    assert (
        encode_operation(forward_backward_from_json(told, False), 5).digest
        == encode_operation(operation, 5).digest
    )
    shuffled = [
        replace_inputs(datum, dict(reversed(list(datum.loss_fn_inputs.items()))))
        for datum in operation.data
    ]
    assert (
        encode_operation(replace(operation, data=shuffled), 5).digest
        == encode_operation(operation, 5).digest
    )


def replace_inputs(datum, inputs):
    return type(datum)(datum.model_input, inputs)


def test_ids_contain_session_and_number():
    assert (parse_server_id(MODEL).session_id, parse_server_id(SAMPLER).seq_id) == ("a1", 4)
