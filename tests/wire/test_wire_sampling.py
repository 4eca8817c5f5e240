"""asample requests, compared with the SDK's own encoder and decoder."""

import contextlib
from dataclasses import fields

import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st
from tinker import types as sdk
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types._pydantic_types.tensor_data import TensorData as JsonTensor
from tinker.types.sample_request import SampleRequest as SdkRequest
from wire_values import MODEL_INPUTS, TOKENS, dense_tensors, plain, sdk_model_input, wrong_bodies

from planish.errors import UnsupportedError, UserError
from planish.service import Sample
from planish.tensors import TensorData
from planish.types import (
    MAX_STOP_BYTES,
    Constraint,
    ModelInput,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TopkLogprobs,
)
from planish.wire.fields import Fields
from planish.wire.sampling import (
    SampleRequest,
    sample_request_from_json,
    sample_request_to_json,
    sample_response_from_message,
    sample_response_to_json,
    sample_response_to_message,
)

# A character has at most 4 bytes in UTF-8.
STOP_STRINGS = st.text(min_size=1, max_size=MAX_STOP_BYTES // 4)
STOPS = st.one_of(
    st.none(), STOP_STRINGS, st.lists(TOKENS, max_size=3), st.lists(STOP_STRINGS, max_size=3)
)
OPTIONS = {
    "max_tokens": st.one_of(st.none(), st.integers(1, 10_000)),
    "seed": st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1)),
    "stop": STOPS,
    "temperature": st.just(0.0) | st.floats(1e-30, 100),
    "top_k": st.one_of(st.just(-1), st.integers(1, 1000)),
    "top_p": st.floats(0, 1, exclude_min=True),
}
COUNTS = st.integers(0, 30)
REQUESTS = st.builds(
    SampleRequest,
    seq_id=st.integers(0, 2**63 - 1),
    operation=st.builds(
        Sample,
        sampler_id=st.just("s:sample:0"),
        prompt=MODEL_INPUTS,
        num_samples=st.integers(1, 64),
        sampling_params=st.builds(SamplingParams, **OPTIONS),
        prompt_logprobs=st.booleans(),
        topk_prompt_logprobs=COUNTS,
        topk_sample_logprobs=COUNTS,
        target_prompt_logprobs=st.one_of(st.none(), dense_tensors("int64")),
        prompt_alt_tokens_k=COUNTS,
        prompt_logprobs_last_n=st.one_of(st.none(), COUNTS),
    ),
)


def sdk_body(request: SampleRequest) -> bytes:
    op, params = request.operation, request.operation.sampling_params
    targets = op.target_prompt_logprobs
    asked = (
        None
        if targets is None
        else JsonTensor(data=targets.data, dtype=targets.dtype, shape=targets.shape)
    )
    stop = params.stop if params.stop is None or isinstance(params.stop, str) else list(params.stop)
    theirs = SdkRequest(
        num_samples=op.num_samples,
        prompt=sdk_model_input(op.prompt),
        sampling_params=sdk.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=stop,  # pyright: ignore[reportArgumentType]  (all strings or all ids)
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        ),
        sampling_session_id=op.sampler_id,
        seq_id=request.seq_id,
        prompt_logprobs=op.prompt_logprobs,
        topk_prompt_logprobs=op.topk_prompt_logprobs,
        topk_sample_logprobs=op.topk_sample_logprobs,
        target_prompt_logprobs=asked,
        prompt_alt_tokens_k=op.prompt_alt_tokens_k,
        prompt_logprobs_last_n=op.prompt_logprobs_last_n,
        record_stability_info=False,
    )
    return orjson.dumps(theirs.model_dump(exclude_unset=False, exclude_none=True, mode="json"))


@given(REQUESTS)
def test_we_decode_what_the_sdk_encodes(request):
    assert plain(sample_request_from_json(Fields.of(sdk_body(request)))) == plain(request)


CONSTRAINTS = st.one_of(
    st.none(),
    st.just(Constraint("json_object")),
    st.just(Constraint("json_schema", '{"type": "integer"}')),
    st.builds(Constraint, st.sampled_from(["regex", "lark"]), st.text(min_size=1)),
    st.builds(
        Constraint, st.just("choice"), choices=st.lists(st.text(min_size=1), min_size=1, max_size=3)
    ),
)
ADDED = {
    "min_p": st.floats(0, 1),
    "stop_token_ids": st.lists(TOKENS, max_size=3),
    "min_tokens": st.integers(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "frequency_penalty": st.floats(-100, 100),
    "presence_penalty": st.floats(-100, 100),
    "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3),
}
RESTRICTIONS = st.one_of(
    st.fixed_dictionaries({"constraint": CONSTRAINTS}),
    st.fixed_dictionaries({"allowed_token_ids": st.lists(TOKENS, max_size=3)}),
)


@given(REQUESTS, st.booleans(), st.fixed_dictionaries(ADDED), RESTRICTIONS)
def test_request_round_trip(request, prompt_only, added, restrictions):
    params = SamplingParams(**{**vars(request.operation.sampling_params), **added, **restrictions})
    operation = Sample(
        **{**vars(request.operation), "prompt_only": prompt_only, "sampling_params": params}
    )
    request = SampleRequest(request.seq_id, operation)
    assert plain(
        sample_request_from_json(Fields.of(orjson.dumps(sample_request_to_json(request))))
    ) == plain(request)


def test_the_round_trip_has_every_option():
    drawn = {*OPTIONS, *ADDED, "constraint", "allowed_token_ids"}
    assert drawn == {option.name for option in fields(SamplingParams)}


def floats(count: int) -> np.ndarray:
    return -np.arange(count, dtype=np.float32) - 0.5


def topk(rows: int, k: int, undefined: tuple[int, ...] = ()) -> TopkLogprobs:
    logprobs = -np.arange(rows * k, dtype=np.float32).reshape(rows, k)
    ids = np.arange(rows * k, dtype=np.int32).reshape(rows, k) % 7
    ids[list(undefined)], logprobs[list(undefined)] = 0, np.nan
    return TopkLogprobs(ids, logprobs)


@st.composite
def responses(draw: st.DrawFn) -> SampleResponse:
    lengths, k, prompt = (
        draw(st.lists(st.integers(1, 5), max_size=3)),
        draw(st.integers(0, 3)),
        draw(st.integers(2, 5)),
    )
    sequences = [
        SampledSequence(
            draw(st.sampled_from(["stop", "length"])),
            f"s:{i}",
            np.arange(n, dtype=np.int32),
            floats(n),
            topk(n, k) if k else None,
        )
        for i, n in enumerate(lengths)
    ]
    prompt_logprobs = floats(prompt)
    prompt_logprobs[: draw(st.integers(1, prompt))] = np.nan
    asked = draw(st.booleans())
    grid = TensorData(floats(2 * (prompt - 1)), "float32", [prompt - 1, 2])
    tokens = TensorData(np.arange(2 * (prompt - 1)), "int64", [prompt - 1, 2])
    return SampleResponse(
        sequences,
        prompt_logprobs if asked else None,
        topk(prompt, k, (0,)) if asked and k else None,
        grid if asked else None,
        PromptAltTokens(tokens, grid) if asked else None,
        draw(st.integers(0, 100)),
    )


@given(responses())
def test_the_sdk_reads_our_response(response):
    theirs = deserialize_sample_response(sample_response_to_message(response))
    assert theirs.prompt_cache_hit_tokens == response.prompt_cache_hit_tokens
    assert theirs.prompt_logprobs == response.prompt_logprobs
    assert theirs.topk_prompt_logprobs == response.topk_prompt_logprobs
    for name in ("target_prompt_logprobs", "prompt_alt_tokens"):
        assert (getattr(theirs, name) is None) == (getattr(response, name) is None)
    if theirs.target_prompt_logprobs and response.target_prompt_logprobs:
        assert theirs.target_prompt_logprobs.tolist() == response.target_prompt_logprobs.tolist()
    if theirs.prompt_alt_tokens and response.prompt_alt_tokens:
        assert (
            theirs.prompt_alt_tokens.tokens.tolist() == response.prompt_alt_tokens.tokens.tolist()
        )
        assert (
            theirs.prompt_alt_tokens.logprobs.tolist()
            == response.prompt_alt_tokens.logprobs.tolist()
        )
    for read, written in zip(theirs.sequences, response.sequences, strict=True):
        assert (read.stop_reason, read.tokens, read.logprobs) == (
            written.stop_reason,
            written.tokens,
            written.logprobs,
        )
        assert read.topk_logprobs == written.topk_logprobs


@given(responses())
def test_response_round_trip(response):
    ids = [sequence.sequence_id for sequence in response.sequences]
    assert plain(sample_response_from_message(sample_response_to_message(response), ids)) == plain(
        response
    )


@given(responses())
def test_the_json_response_equals_the_protobuf_response(response):
    body = orjson.loads(orjson.dumps(sample_response_to_json(response)))
    assert [(s["tokens"], s["logprobs"], s["stop_reason"]) for s in body["sequences"]] == [
        (s.tokens, s.logprobs, s.stop_reason) for s in response.sequences
    ]
    assert body.get("prompt_logprobs") == response.prompt_logprobs


def with_targets(targets: TensorData) -> Fields:
    prompt = ModelInput.from_ints([1, 2, 3, 4])
    asked = Sample("s:sample:0", prompt, 1, SamplingParams(), target_prompt_logprobs=targets)
    return Fields.of(orjson.dumps(sample_request_to_json(SampleRequest(0, asked))))


def test_a_sparse_target_scores_only_listed_entries():
    sparse = TensorData(np.array([5, 7]), "int64", [3, 2], [0, 1, 1, 2], [0, 1])
    read = sample_request_from_json(with_targets(sparse))
    assert read.operation.target_prompt_logprobs is not None
    assert read.operation.target_prompt_logprobs.tolist() == [[5, -1], [-1, -1], [-1, 7]]


def test_the_dense_size_of_a_sparse_target_is_limited():
    sparse = TensorData(np.zeros(0), "int64", [3, 1 << 21], [0, 0, 0, 0], [])
    with pytest.raises(UserError, match="target_prompt_logprobs"):
        sample_request_from_json(with_targets(sparse))


def test_a_response_with_too_few_sequences_is_rejected():
    body = sample_response_to_message(SampleResponse([]))
    with pytest.raises(UserError, match="0 sequences"):
        sample_response_from_message(body, ["s:0"])


BODY = sample_request_to_json(
    SampleRequest(
        3,
        Sample(
            "s:sample:0",
            ModelInput.from_ints([1, 2]),
            2,
            SamplingParams(max_tokens=5, seed=1, stop=[3], min_p=0.5),
            target_prompt_logprobs=TensorData([[3, -1]], "int64"),
            prompt_logprobs_last_n=1,
        ),
    )
)


@pytest.mark.parametrize(("name", "body"), wrong_bodies(BODY, "type"))
def test_a_wrong_field_is_named(name, body):
    with pytest.raises(UserError, match=name):
        sample_request_from_json(Fields.of(orjson.dumps(body)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.5),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 0),
        ("stop", ""),
        ("stop", [1, "a"]),
        ("stop", {}),
    ],
)
def test_a_sampling_param_out_of_range_is_named(field, value):
    body = {**BODY, "sampling_params": {field: value}}
    with pytest.raises(UserError, match=rf"sampling_params.{field}"):
        sample_request_from_json(Fields.of(orjson.dumps(body)))


@pytest.mark.parametrize("num_samples", [0, -1, 10**9])
def test_a_number_of_samples_out_of_range_is_named(num_samples):
    with pytest.raises(UserError, match="num_samples"):
        sample_request_from_json(Fields.of(orjson.dumps({**BODY, "num_samples": num_samples})))


@pytest.mark.parametrize(
    "chunk",
    [
        {"type": "image_asset_pointer", "location": "x", "format": "png"},
        {"type": "dmel", "dmel": ""},
    ],
)
def test_chunks_other_than_text_and_images_are_rejected(chunk):
    with pytest.raises(UnsupportedError, match=r"prompt.chunks\[0\].*(ImageChunk|image chunks)"):
        sample_request_from_json(Fields.of(orjson.dumps({**BODY, "prompt": {"chunks": [chunk]}})))


def test_stability_info_is_read_for_the_engine_to_decide_on():
    request = sample_request_from_json(
        Fields.of(orjson.dumps({**BODY, "record_stability_info": True}))
    )
    assert request.operation.record_stability_info
    again = sample_request_from_json(Fields.of(orjson.dumps(sample_request_to_json(request))))
    assert again == request


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_rejected(body):
    with contextlib.suppress(UserError):
        sample_response_from_message(body, [])
