"""forward_backward and optim_step, compared with the SDK's own encoders and decoders."""

import contextlib
from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given, strategies as st
from json_bodies import forward_backward_to_json
from tinker import types as sdk
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types._pydantic_types.forward_backward_input import ForwardBackwardInput as JsonInput
from tinker.types.optim_step_request import OptimStepRequest
from wire_values import (
    dense_tensors,
    forward_backwards,
    plain,
    sdk_model_input,
    sparse_tensors,
    wrong_bodies,
)

from planish.errors import UnsupportedError, UserError
from planish.service import ForwardBackward, OptimStep
from planish.tensors import TensorData
from planish.types import AdamParams, Datum, EncodedTextChunk, ForwardBackwardOutput, ModelInput
from planish.wire import tensors as wire_tensors, training
from planish.wire.fields import Fields
from planish.wire.tensors import MAX_DENSE_ELEMENTS


def sdk_tensor(tensor: TensorData) -> sdk.TensorData:
    values = np.asarray(tensor.data, dtype=tensor.dtype)
    return sdk.TensorData(
        values, tensor.dtype, tensor.shape, tensor.sparse_crow_indices, tensor.sparse_col_indices
    )


def sdk_request(operation: ForwardBackward, seq_id: int) -> sdk.ForwardBackwardRequest:
    data = [
        sdk.Datum(
            model_input=sdk_model_input(datum.model_input),
            loss_fn_inputs={
                name: sdk_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()
            },
        )
        for datum in operation.data
    ]
    given = sdk.ForwardBackwardInput(data, operation.loss_fn, operation.loss_fn_config)  # type: ignore[arg-type]
    return sdk.ForwardBackwardRequest(given, operation.model_id, seq_id)


@pytest.mark.slow
@given(forward_backwards(), st.integers(1, 2**31 - 1))
def test_we_decode_what_the_sdk_encodes(operation, seq_id):
    theirs = forward_backward_request_to_proto(sdk_request(operation, seq_id))
    theirs.forward_only = operation.forward_only
    message = training.parse_forward_backward(theirs.SerializeToString())
    assert training.head_from_message(message.head) == training.RequestHead(
        operation.model_id, seq_id
    )
    assert plain(training.forward_backward_from_body(message)) == plain(operation)


@pytest.mark.slow
@given(forward_backwards(), st.integers(1, 2**31 - 1))
def test_our_encoding_equals_that_of_the_sdk(operation, seq_id):
    theirs = forward_backward_request_to_proto(sdk_request(operation, seq_id))
    theirs.forward_only = operation.forward_only
    ours = pb.ForwardBackwardRequest.FromString(
        training.forward_backward_to_message(operation, seq_id)
    )
    assert ours == theirs


FINITE = st.one_of(dense_tensors("int64"), sparse_tensors())


@pytest.mark.slow
@given(forward_backwards(FINITE), st.integers(1, 2**62))
def test_json_round_trip(operation, seq_id):
    fields = Fields.of(orjson.dumps(forward_backward_to_json(operation, seq_id)))
    assert training.head_from_json(fields) == training.RequestHead(operation.model_id, seq_id)
    assert plain(training.forward_backward_from_json(fields, operation.forward_only)) == plain(
        operation
    )


def test_we_decode_what_the_sdk_0_21_sends():
    datum = {
        "model_input": sdk.ModelInput.from_ints([1, 2, 3]),
        "loss_fn_inputs": {"target_tokens": [2, 3, 4], "weights": [0.5, 1, 0]},
    }
    given_input = JsonInput(
        data=[
            {**datum, "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}}
        ],  # type: ignore[list-item]
        loss_fn="ppo",
        loss_fn_config={"clip_low_threshold": 0.5},
    )
    body = {
        "forward_backward_input": given_input.model_dump(mode="json", exclude_none=True),
        "model_id": "m",
        "seq_id": 2,
    }
    operation = training.forward_backward_from_json(Fields.of(orjson.dumps(body)), False)
    assert operation.loss_fn_config == {"clip_low_threshold": 0.5}
    inputs = operation.data[0].loss_fn_inputs
    assert operation.data[0].model_input.to_ints() == [1, 2, 3]
    assert inputs["target_tokens"].tolist() == [2, 3, 4]
    assert inputs["weights"].tolist() == [0.5, 1, 0]


OUTPUT_TENSORS = st.integers(1, 3).flatmap(
    lambda columns: st.one_of(
        st.lists(st.floats(width=32), max_size=4).map(
            lambda v: TensorData(np.array(v, np.float32), "float32", [len(v)])
        ),
        st.integers(0, 3).map(
            lambda rows: TensorData(
                np.arange(rows * columns, dtype=np.float32), "float32", [rows, columns]
            )
        ),
    )
)
OUTPUTS = st.builds(
    ForwardBackwardOutput,
    st.sampled_from(["ArrayRecord", "TorchLossReturn"]),
    st.lists(st.fixed_dictionaries({"logprobs": OUTPUT_TENSORS}), max_size=5),
    st.dictionaries(
        st.sampled_from(["loss:sum", "tokens:sum", "kl:mean"]), st.floats(allow_nan=False)
    ),
)


@pytest.mark.slow
@given(OUTPUTS)
def test_the_sdk_reads_our_output(output):
    theirs = deserialize_forward_backward_output(training.output_to_message(output))
    assert theirs.metrics == output.metrics
    # Without outputs the SDK gives the type a name of its own.
    assert theirs.loss_fn_output_type == output.loss_fn_output_type
    assert len(theirs.loss_fn_outputs) == len(output.loss_fn_outputs)
    for read, written in zip(theirs.loss_fn_outputs, output.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(read["logprobs"].to_numpy(), written["logprobs"].to_numpy())
        assert read["logprobs"].shape == written["logprobs"].shape


@pytest.mark.slow
@given(OUTPUTS)
def test_output_round_trip(output):
    assert plain(training.output_from_message(training.output_to_message(output))) == plain(output)


@pytest.mark.parametrize(
    "optional", [{}, {"learning_rate": 0.5, "beta1": 0.1, "grad_clip_norm": 1.0}]
)
def test_we_decode_the_sdks_optim_step(optional):
    request = OptimStepRequest(optim_params=sdk.AdamParams(**optional), model_id="m", seq_id=3)
    body = request.model_dump(exclude_none=True, mode="json")
    fields = Fields.of(orjson.dumps(body))
    assert training.head_from_json(fields) == training.RequestHead("m", 3)
    assert training.optim_step_from_json(fields) == OptimStep("m", AdamParams(**optional))


def test_optim_step_round_trip():
    operation = OptimStep("m", AdamParams(1e-3, 0.8, 0.9, 1e-8, 0.1, 2.0))
    fields = Fields.of(orjson.dumps(training.optim_step_to_json(operation, 7)))
    assert training.optim_step_from_json(fields) == operation


def test_dimuon_is_rejected_with_a_remedy():
    request = OptimStepRequest(
        optim_params=sdk.DimuonParams(learning_rate=1e-3), model_id="m", seq_id=3
    )
    with pytest.raises(UnsupportedError, match="adam_params"):
        training.optim_step_from_json(
            Fields.of(orjson.dumps(request.model_dump(exclude_none=True, mode="json")))
        )


@pytest.mark.parametrize(
    "params", [{"learning_rate": -1}, {"beta1": 1.0}, {"momentum": 0.9}, {"eps": "small"}]
)
def test_a_wrong_adam_parameter_is_named(params):
    body = {"model_id": "m", "seq_id": 1, "adam_params": params}
    with pytest.raises(UserError, match=next(iter(params))):
        training.optim_step_from_json(Fields.of(orjson.dumps(body)))


BODY = forward_backward_to_json(
    ForwardBackward(
        "m",
        [
            Datum(
                ModelInput.from_ints([1, 2]),
                {
                    "target_tokens": [2, 3],
                    "weights": TensorData([1.0], "float32", [2, 2], [0, 0, 1], [1]),
                },
            )
        ],
        "cross_entropy",
        {},
    ),
    1,
)


@pytest.mark.parametrize(("name", "body"), wrong_bodies(BODY, "loss_fn_config"))
def test_a_wrong_field_of_a_json_body_is_named(name, body):
    with pytest.raises(UserError, match=name):
        training.forward_backward_from_json(Fields.of(orjson.dumps(body)), False)


def test_the_dense_size_of_sparse_tensors_is_limited_per_body():
    half = TensorData([], "float32", [1, MAX_DENSE_ELEMENTS // 2], [0, 0], [])
    data = [Datum(ModelInput.from_ints([1]), {"target_tokens": [1], "weights": half})] * 3
    message = training.parse_forward_backward(
        training.forward_backward_to_message(ForwardBackward("m", data, "cross_entropy"), 1)
    )
    with pytest.raises(UserError, match="elements in dense form"):
        training.forward_backward_from_body(message)
    two = replace(message, datum_ranges=message.datum_ranges[:2])
    assert len(training.forward_backward_from_body(two).data) == 2
    body = orjson.dumps(forward_backward_to_json(ForwardBackward("m", data, "cross_entropy"), 1))
    with pytest.raises(UserError, match="elements in dense form"):
        training.forward_backward_from_json(Fields.of(body), False)


@pytest.mark.parametrize(
    ("datums", "chunks", "tensors"), [(101, 0, 0), (1, 101, 0), (2, 1, 50), (21, 3, 1)], ids=str
)
def test_too_many_tiny_parts_are_rejected_before_they_take_memory(
    monkeypatch, datums, chunks, tensors
):
    monkeypatch.setattr(wire_tensors, "MAX_DATA_ITEMS", 100)
    made = []

    def datum(model_input: ModelInput, tensors: dict[str, TensorData]) -> Datum:
        made.append(1)
        return Datum(model_input, tensors)

    monkeypatch.setattr(training, "Datum", datum)
    one = Datum(
        ModelInput([EncodedTextChunk([])] * chunks),
        {f"t{n}": TensorData([], "int64") for n in range(tensors)},
    )
    operation = ForwardBackward("m", [one] * datums, "cross_entropy")
    data = training.forward_backward_to_message(operation, 1)
    with pytest.raises(UserError, match="more than 100 datums, chunks of tokens and tensors"):
        training.forward_backward_from_body(training.parse_forward_backward(data))
    body = orjson.dumps(forward_backward_to_json(operation, 1))
    with pytest.raises(UserError, match="more than 100 datums, chunks of tokens and tensors"):
        training.forward_backward_from_json(Fields.of(body), False)
    # The later cases are known to be too much when the last datum is made.
    assert len(made) in (0, 2 * datums)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "most"),
    [
        (b"\x1a\x00" * 600_000, "131,072 datums"),
        # One datum of 2,200,000 bytes.
        (b"\x1a\xc0\xa3\x86\x01" + b"\x0a\x00" * 1_100_000, "1,048,576 datums and parts"),
    ],
)
def test_a_body_of_empty_messages_is_rejected_before_parsing(monkeypatch, data, most):
    """Empty datums, or empty chunks of one datum, take 30 times their bytes as messages."""
    head = pb.ForwardBackwardRequest(
        model_id="m", seq_id=3, loss_fn="cross_entropy"
    ).SerializeToString()
    assert training.head_from_message(
        training.parse_forward_backward_head(head + data)
    ) == training.RequestHead("m", 3)
    monkeypatch.setattr(training, "ForwardBackwardRequestMessage", None)
    with pytest.raises(UserError, match=f"more than {most}"):
        training.parse_forward_backward(head + data)


@pytest.mark.parametrize("value", [None, True, [1], {"a": 1}])
def test_a_wrong_value_of_a_config_is_named(value):
    given = {**BODY["forward_backward_input"], "loss_fn_config": {"clip": value}}
    body = orjson.dumps({**BODY, "forward_backward_input": given})
    with pytest.raises(UserError, match="loss_fn_config.clip"):
        training.forward_backward_from_json(Fields.of(body), False)


def changed(**tensor) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(**tensor))
    return message.SerializeToString()


TWO = np.zeros(2, np.float32).tobytes()
NO_SHAPE = pb.SparseCsr(values=TWO, crow_indices=bytes(24), col_indices=bytes(16))


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        ({"dense": TWO, "dtype": 0}, "dtype 0"),
        ({"dense": TWO, "dtype": 99}, "dtype 99"),
        ({"dense": TWO[:-1], "dtype": 1}, "7 bytes"),
        ({"dense": TWO, "dtype": 1, "shape": [3]}, "shape"),
        ({"dense": TWO, "dtype": 1, "shape": [-1, -2]}, "shape"),
        ({"dense": TWO, "dtype": 1, "shape": [2**62, 2**62]}, "shape"),
        ({"dtype": 1, "shape": [2]}, "dense or sparse_csr"),
        ({"sparse_csr": NO_SHAPE, "dtype": 1}, "CSR"),
        ({"sparse_csr": NO_SHAPE, "dtype": 1, "shape": [2, 2]}, "sparse_crow_indices"),
        ({"sparse_csr": NO_SHAPE, "dtype": 1, "shape": [2**40, 2**40]}, "CSR"),
        ({"sparse_csr": NO_SHAPE, "dtype": 1, "shape": [-2, -2]}, "CSR"),
    ],
)
def test_a_wrong_tensor_is_named(tensor, problem):
    message = training.parse_forward_backward(changed(**tensor))
    with pytest.raises(UserError, match=r"data\[0\]\.loss_fn_inputs\['weights'\]") as caught:
        training.forward_backward_from_body(message)
    assert problem in str(caught.value)


@pytest.mark.parametrize("kind", ["dmel", None])
def test_chunks_other_than_text_and_images_are_rejected(kind):
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    chunk = message.data.add().model_input.add()
    if kind == "dmel":
        chunk.dmel.dmel = b"sound"
    with pytest.raises(UserError, match=r"data\[0\]\.model_input\[0\].*encoded_text"):
        training.forward_backward_from_body(
            training.parse_forward_backward(message.SerializeToString())
        )


@pytest.mark.parametrize(("model_id", "seq_id"), [("", 1), ("a/b", 1), ("m", 0), ("m", -1)])
def test_a_request_without_model_or_number_is_rejected(model_id, seq_id):
    body = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id).SerializeToString()
    with pytest.raises(UserError, match="model_id|seq_id"):
        training.head_from_message(training.parse_forward_backward(body).head)


def test_provenance_spans_are_ignored():
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    datum.model_input_spans.add().sampled_tokens.length = 2
    operation = training.forward_backward_from_body(
        training.parse_forward_backward(message.SerializeToString())
    )
    assert operation.data[0].model_input.to_ints() == [1, 2]


VALID = changed(dense=TWO, dtype=1, shape=[2])


@given(st.integers(0, len(VALID) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_a_damaged_body_is_parsed_or_rejected(position, inserted, cut):
    damaged = VALID[:position] + inserted + VALID[position + cut :]
    try:
        message = training.parse_forward_backward(damaged)
        training.head_from_message(message.head)
        training.forward_backward_from_body(message)
    except UserError:
        pass


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_rejected(body):
    for read in (training.parse_forward_backward, training.output_from_message):
        with contextlib.suppress(UserError):
            read(body)
