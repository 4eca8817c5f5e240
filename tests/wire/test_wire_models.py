"""Requests that create, save and load models, as the SDK's request classes write them."""

import orjson
import pytest
from hypothesis import given, strategies as st
from tinker import types as sdk
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.get_info_response import GetInfoResponse as SdkInfo
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.optimizer import DimuonOptimizerConfig
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest
from wire_values import wrong_bodies

from planish.errors import UnsupportedError, UserError
from planish.service import (
    CreateModel,
    CreateSampler,
    LoadWeights,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import GetInfoResponse, LoraConfig, ModelData
from planish.wire import models
from planish.wire.fields import Fields

PATH = "tinker://s-1:train:0/weights/a"
METADATA = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)


def dumped(request) -> Fields:
    return of(request.model_dump(exclude_unset=False, exclude_none=True, mode="json"))


def of(body) -> Fields:
    return Fields.of(orjson.dumps(body))


LORAS = st.builds(
    LoraConfig,
    rank=st.integers(1, 256),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1)),
    train_unembed=st.just(True),
    train_mlp=st.booleans(),
    train_attn=st.booleans(),
)


@given(LORAS, METADATA)
def test_create_model_round_trip(lora, metadata):
    theirs = CreateModelRequest(
        session_id="s-1",
        model_seq_id=4,
        base_model="org/model",
        user_metadata=metadata,
        lora_config=sdk.LoraConfig(**vars(lora)),
    )
    operation = CreateModel("s-1:train:4", "org/model", lora, user_metadata=metadata)
    assert models.create_model_from_json(dumped(theirs)) == operation
    assert models.create_model_from_json(of(models.create_model_to_json(operation))) == operation


def test_dimuon_is_rejected_with_a_remedy():
    theirs = CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="b", optimizer_config=DimuonOptimizerConfig()
    )
    with pytest.raises(UnsupportedError, match="leave optimizer_config out"):
        models.create_model_from_json(dumped(theirs))


def test_an_invalid_lora_config_is_rejected():
    body = models.create_model_to_json(CreateModel("s-1:train:4", "b"))
    for lora in (
        {"rank": 0},
        {"rank": 2000},
        {"rank": 8, "train_mlp": False, "train_attn": False, "train_unembed": False},
    ):
        with pytest.raises(UserError, match="lora_config"):
            models.create_model_from_json(of({**body, "lora_config": lora}))


def test_load_weights_round_trip():
    theirs = LoadWeightsRequest(model_id="s-1:train:0", seq_id=1, path=PATH, optimizer=True)
    operation = LoadWeights("s-1:train:0", PATH, True)
    assert models.load_weights_from_json(dumped(theirs)) == operation
    assert models.load_weights_from_json(of(models.load_weights_to_json(operation, 1))) == operation


@pytest.mark.parametrize("base_model", [None, "org/other"])
def test_create_model_from_weights_round_trip(base_model):
    theirs = LoadWeightsRequest(
        session_id="s-1",
        model_seq_id=4,
        path=PATH,
        optimizer=False,
        base_model=base_model,
        user_metadata={"a": "b"},
    )
    operation = CreateModel("s-1:train:4", base_model, from_path=PATH, user_metadata={"a": "b"})
    assert models.load_weights_from_json(dumped(theirs)) == operation
    assert models.load_weights_from_json(of(models.create_model_to_json(operation))) == operation


def test_an_access_token_is_rejected_with_a_remedy():
    theirs = LoadWeightsRequest(
        session_id="s", model_seq_id=0, path=PATH, optimizer=False, weights_access_token="t"
    )
    with pytest.raises(UnsupportedError, match="are public"):
        models.load_weights_from_json(dumped(theirs))


@given(st.one_of(st.none(), st.integers(1, 10**8)), st.booleans(), METADATA)
def test_save_weights_round_trip(ttl, overwrite, metadata):
    theirs = SaveWeightsRequest(
        model_id="m",
        path="a",
        seq_id=2,
        ttl_seconds=ttl,
        overwrite=overwrite,
        user_metadata=metadata,
    )
    operation = SaveWeights("m", "a", ttl, overwrite, metadata)
    assert models.save_weights_from_json(dumped(theirs)) == operation
    assert models.save_weights_from_json(of(models.save_to_json(operation, 2))) == operation


def test_a_save_without_a_name_is_named_by_its_number():
    assert (
        models.save_weights_from_json(dumped(SaveWeightsRequest(model_id="m", seq_id=12))).name
        == "000012"
    )


@given(st.one_of(st.none(), st.integers(1, 10**8)), METADATA)
def test_save_weights_for_sampler_round_trip(ttl, metadata):
    theirs = SaveWeightsForSamplerRequest(
        model_id="m", path="a", seq_id=2, ttl_seconds=ttl, user_metadata=metadata
    )
    operation = SaveWeightsForSampler("m", "a", ttl, False, metadata)
    assert models.save_weights_for_sampler_from_json(dumped(theirs)) == operation
    assert (
        models.save_weights_for_sampler_from_json(of(models.save_to_json(operation, 2)))
        == operation
    )


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
def test_publish_sampler_round_trip(kind):
    theirs = SaveWeightsForSamplerRequest(
        model_id="s-1:train:0", sampling_session_seq_id=4, kind=kind, seq_id=2
    )
    operation = PublishSampler("s-1:train:0", "s-1:sample:4")
    assert models.save_weights_for_sampler_from_json(dumped(theirs)) == operation
    assert (
        models.save_weights_for_sampler_from_json(of(models.publish_to_json(operation, 2)))
        == operation
    )


@pytest.mark.parametrize(("base_model", "model_path"), [("b", None), (None, PATH), ("b", PATH)])
def test_create_sampler_round_trip(base_model, model_path):
    theirs = CreateSamplingSessionRequest(
        session_id="s-1", sampling_session_seq_id=4, base_model=base_model, model_path=model_path
    )
    operation = CreateSampler("s-1:sample:4", base_model, model_path)
    assert models.create_sampler_from_json(dumped(theirs)) == operation
    assert (
        models.create_sampler_from_json(of(models.create_sampler_to_json(operation))) == operation
    )


@pytest.mark.parametrize("tokenizer_id", [None, "org/tokenizer"])
def test_the_sdk_reads_our_info(tokenizer_id):
    info = GetInfoResponse("m", ModelData("llama", "org/model", tokenizer_id), True, 8)
    body = models.model_info_to_json(info, tokenizer_id)
    theirs = SdkInfo.model_validate(body)
    assert (theirs.model_data.model_name, theirs.model_data.tokenizer_id) == (
        "org/model",
        tokenizer_id,
    )
    assert theirs.lora_rank == 8
    assert models.model_info_from_json(of(body)) == info


READERS = [
    (
        models.create_model_from_json,
        models.create_model_to_json(CreateModel("s-1:train:4", "b", LoraConfig(8, 1))),
    ),
    (models.load_weights_from_json, models.load_weights_to_json(LoadWeights("m", PATH, True), 1)),
    (
        models.load_weights_from_json,
        models.create_model_to_json(CreateModel("s-1:train:4", "b", from_path=PATH)),
    ),
    (
        models.save_weights_from_json,
        models.save_to_json(SaveWeights("m", "a", 5, True, {"k": "v"}), 1),
    ),
    (
        models.save_weights_for_sampler_from_json,
        models.save_to_json(SaveWeightsForSampler("m", "a", 5, True), 1),
    ),
    (
        models.save_weights_for_sampler_from_json,
        models.publish_to_json(PublishSampler("m", "s:sample:0"), 1),
    ),
    (
        models.create_sampler_from_json,
        models.create_sampler_to_json(CreateSampler("s-1:sample:4", "b", PATH)),
    ),
]


@pytest.mark.parametrize(
    ("read", "name", "body"),
    [(read, *wrong) for read, body in READERS for wrong in wrong_bodies(body, "type")],
)
def test_a_wrong_field_is_named(read, name, body):
    with pytest.raises(UserError, match=name):
        read(of(body))
