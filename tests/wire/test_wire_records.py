"""The SDK's classes read the records."""

from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import given, strategies as st
from tinker import types as sdk

from planish.errors import UserError
from planish.service import CheckpointInfo, SamplerInfo
from planish.types import Checkpoint, GetServerCapabilitiesResponse, LoraConfig, SupportedModel
from planish.wire import records
from planish.wire.fields import Fields

TIMES = st.datetimes(min_value=datetime(2000, 1, 1), timezones=st.just(UTC))
CHECKPOINTS = st.builds(
    Checkpoint,
    checkpoint_id=st.just("weights/a"),
    checkpoint_type=st.sampled_from(["training", "sampler"]),
    time=TIMES,
    tinker_path=st.just("tinker://m/weights/a"),
    size_bytes=st.one_of(st.none(), st.integers(0, 2**53)),
    public=st.booleans(),
    user_metadata=st.one_of(
        st.none(), st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2)
    ),
    expires_at=st.one_of(st.none(), TIMES),
)


def of(body) -> Fields:
    return Fields.of(orjson.dumps(body))


@given(CHECKPOINTS)
def test_checkpoint_round_trip(checkpoint):
    body = records.checkpoint_to_json(checkpoint)
    assert vars(sdk.Checkpoint.model_validate(body)) == vars(checkpoint)
    assert records.checkpoint_from_json(of(body)) == checkpoint


def test_weights_info_round_trip():
    checkpoint = Checkpoint("weights/a", "training", datetime.now(UTC), "tinker://m/weights/a")
    lora = LoraConfig(8, train_mlp=False)
    body = records.weights_info_to_json(CheckpointInfo("b", lora, checkpoint))
    theirs = sdk.WeightsInfoResponse.model_validate(body)
    assert (theirs.base_model, theirs.lora_rank, theirs.train_mlp, theirs.train_attn) == (
        "b",
        8,
        False,
        True,
    )
    assert records.lora_from_weights_info(of(body)) == lora


def test_capabilities_round_trip():
    ours = GetServerCapabilitiesResponse(
        [SupportedModel("a", 2048, vocab_size=272), SupportedModel("b", None, trainable=False)]
    )
    body = records.capabilities_to_json(ours)
    theirs = sdk.GetServerCapabilitiesResponse.model_validate(body)
    assert [
        vars(model) | {"vocab_size": size}
        for model, size in zip(theirs.supported_models, (272, None), strict=True)
    ] == [vars(model) for model in ours.supported_models]
    assert records.capabilities_from_json(of(body)) == ours


@pytest.mark.parametrize("model_path", [None, "tinker://m/sampler_weights/a"])
def test_sampler_round_trip(model_path):
    info = SamplerInfo("s:sample:0", "b", model_path)
    body = records.sampler_info_to_json(info)
    assert vars(sdk.GetSamplerResponse.model_validate(body)) == vars(info)
    assert records.sampler_info_from_json(of(body)) == info


def test_an_invalid_time_is_named_in_the_error():
    checkpoint = Checkpoint("weights/a", "training", datetime.now(UTC), "tinker://m/weights/a")
    body = {**records.checkpoint_to_json(checkpoint), "time": "yesterday"}
    with pytest.raises(UserError, match="time='yesterday'"):
        records.checkpoint_from_json(of(body))


def test_external_weights_are_a_samplers():
    checkpoint = Checkpoint(
        "external_weights/a", "sampler", datetime.now(UTC), "tinker://m/external_weights/a"
    )
    body = {**records.checkpoint_to_json(checkpoint), "checkpoint_type": "external"}
    assert records.checkpoint_from_json(of(body)) == checkpoint
    with pytest.raises(UserError, match="checkpoint_type"):
        records.checkpoint_from_json(of({**body, "checkpoint_type": "other"}))
