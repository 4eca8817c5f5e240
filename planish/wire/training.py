"""forward_backward, forward and optim_step, in both encodings.

The SDK 0.38 sends forward_backward and forward as protobuf, with a flag for forward only. The SDK
0.21 sends JSON, and sends forward to another path. Datums may contain spans that say which sampler
their tokens come from. No loss of planish uses these spans, so they are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np
from google.protobuf.message_factory import GetMessageClass

from planish.errors import UnsupportedError, UserError
from planish.service import ForwardBackward, OptimStep
from planish.tensors import TensorData
from planish.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse
from planish.wire.fields import (
    MAX_MAP_ENTRIES,
    MAX_STRING_CHARACTERS,
    MAX_VALUES,
    Fields,
    check_count,
    check_identifier,
    shown,
)
from planish.wire.messages import (
    ForwardBackwardOutputMessage,
    ForwardBackwardRequestMessage,
    TensorMessage,
    parse_message,
)
from planish.wire.pacing import pause_if_due
from planish.wire.tensors import (
    MAX_DATA_ITEMS,
    MAX_DIMENSIONS,
    PROTO_DTYPES,
    array_from_bytes,
    check_data_items,
    check_dense_elements,
    dense_element_count,
    model_input_from_json,
    model_input_from_messages,
    tensor_from_json,
    tensor_from_message,
    tensor_to_json,
    tensor_to_message,
    tensor_values,
    write_chunks,
)

_REQUEST_NAME = ForwardBackwardRequestMessage.DESCRIPTOR.name
_DATA_FIELD = ForwardBackwardRequestMessage.DESCRIPTOR.fields_by_name["data"].number
MAX_FIELDS = 1 << 20
"""Limit for the number of protobuf fields in one body, including the fields of its datums and
tensors. The fields are counted before parsing, because a parsed empty field takes 30 times the
memory of its encoding.
"""
_DATUM_TYPE = ForwardBackwardRequestMessage.DESCRIPTOR.fields_by_name["data"].message_type
_INPUT_ENTRY_TYPE = _DATUM_TYPE.fields_by_name["loss_fn_inputs"].message_type
_INPUTS_PATH = (_DATA_FIELD, _DATUM_TYPE.fields_by_name["loss_fn_inputs"].number)
_TENSOR_PATH = (*_INPUTS_PATH, _INPUT_ENTRY_TYPE.fields_by_name["value"].number)
_SHAPE_PATH = (*_TENSOR_PATH, TensorMessage.DESCRIPTOR.fields_by_name["shape"].number)
_NESTED_PATHS = {(_DATA_FIELD,), _INPUTS_PATH, _TENSOR_PATH}
_DatumMessage = GetMessageClass(_DATUM_TYPE)
_MAX_VARINT_BYTES = 10
_FIELDS_PER_PAUSE = 1024
"""The number of fields that are counted between two calls of `pause_if_due`, about 1 ms."""
_ADAM_FIELDS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


@dataclass(frozen=True)
class RequestHead:
    """The model of a request, and the request's number."""

    model_id: str
    seq_id: int
    """The number of the request in its model, starting at 1."""


def head_from_json(fields: Fields) -> RequestHead:
    """Read the model and number of a request from JSON."""
    return RequestHead(fields.identifier("model_id"), fields.integer("seq_id", low=1))


def head_from_message(message: Any) -> RequestHead:
    """Read the model and number of a request from protobuf."""
    check_identifier("model_id", message.model_id)
    if message.seq_id < 1:
        raise UserError(f"seq_id={message.seq_id}: give a whole number of at least 1")
    return RequestHead(message.model_id, message.seq_id)


def parse_forward_backward_head(body: bytes) -> Any:
    """Parse a protobuf body without its datums. Only the first `MAX_FIELDS` fields are read, so
    that a body with too many fields cannot exhaust the memory.
    """
    fields = islice(_iterate_fields(body, 0, len(body)), MAX_FIELDS)
    head = [body[begin:end] for number, begin, _, end in fields if number != _DATA_FIELD]
    return parse_message(ForwardBackwardRequestMessage(), b"".join(head))


@dataclass(frozen=True)
class ForwardBackwardBody:
    """A protobuf body whose datums are not parsed yet.

    They are parsed one by one, because parsing all of them in one call would hold the interpreter
    lock for hundreds of milliseconds.
    """

    body: bytes
    datum_ranges: Sequence[tuple[int, int]]
    """Where each datum begins and ends in `body`."""

    @property
    def head(self) -> Any:
        """The message without its datums."""
        return parse_forward_backward_head(self.body)

    def datums(self) -> Iterator[Datum]:
        """Parse the datums, and yield them."""
        for index, (begin, end) in enumerate(self.datum_ranges):
            message = parse_message(_DatumMessage(), self.body[begin:end])
            yield _datum_from_message(message, f"data[{index}]")


def parse_forward_backward(body: bytes) -> ForwardBackwardBody:
    """Find the datums of a protobuf body. Raise UserError if the body has too many fields, or a
    shape of too many dimensions.
    """
    datum_ranges: list[tuple[int, int]] = []
    for count, (number, begin, end) in enumerate(_walk_fields(body), start=1):
        if count % _FIELDS_PER_PAUSE == 0:
            pause_if_due()
        if number == (_DATA_FIELD,):
            datum_ranges.append((begin, end))
            check_data_items("data", len(datum_ranges))
        if count > MAX_FIELDS:
            raise UserError(
                f"the body has more than {MAX_FIELDS:,} datums and parts; send fewer in one call"
            )
        # Check the length before parsing: a small dimension has one byte here and eight when parsed.
        if number == _SHAPE_PATH and end - begin > MAX_DIMENSIONS * _MAX_VARINT_BYTES:
            raise UserError(f"a tensor has more than {MAX_DIMENSIONS} dimensions; give fewer")
    return ForwardBackwardBody(body, datum_ranges)


def _walk_fields(body: bytes) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield (path, start of the content, end) for each field of the body and of the messages in
    `_NESTED_PATHS`: datums, the entries of their `loss_fn_inputs`, and the tensors of these
    entries. A path has the field numbers of the enclosing fields and of the field itself.
    """
    pending: list[tuple[tuple[int, ...], Iterator[tuple[int, int, int, int]]]] = [
        ((), _iterate_fields(body, 0, len(body)))
    ]
    while pending:
        path, fields = pending[-1]
        for number, _, begin, end in fields:
            field_path = (*path, number)
            yield field_path, begin, end
            if field_path in _NESTED_PATHS:
                pending.append((field_path, _iterate_fields(body, begin, end)))
                break
        else:
            pending.pop()


def forward_backward_from_body(body: ForwardBackwardBody) -> ForwardBackward:
    """Read an operation from a protobuf body."""
    message = body.head
    check_count("loss_fn", len(message.loss_fn), MAX_STRING_CHARACTERS, "characters")
    for name in ("loss_fn_config", "loss_fn_config_v2"):
        check_count(name, len(getattr(message, name)), MAX_MAP_ENTRIES, "entries")
    data = _collect_within_limits(body.datums())
    return ForwardBackward(
        message.model_id, data, message.loss_fn, _loss_config(message), message.forward_only
    )


def forward_backward_to_message(operation: ForwardBackward, seq_id: int) -> bytes:
    """Write an operation as protobuf. The same operation always has the same bytes."""
    message = ForwardBackwardRequestMessage(
        model_id=operation.model_id,
        seq_id=seq_id,
        loss_fn=operation.loss_fn,
        forward_only=operation.forward_only,
    )
    for key, value in operation.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = message.loss_fn_config_v2[key].number = float(value)
    for datum in operation.data:
        datum_message = message.data.add()
        write_chunks(datum.model_input, datum_message.model_input)
        for name, tensor in datum.loss_fn_inputs.items():
            datum_message.loss_fn_inputs[name].CopyFrom(tensor_to_message(tensor))
    return message.SerializeToString(deterministic=True)


def forward_backward_from_json(fields: Fields, forward_only: bool) -> ForwardBackward:
    """Read the body of /forward if `forward_only` is True, else the body of /forward_backward."""
    with fields:
        head = head_from_json(fields)
        with fields.object(
            "forward_input" if forward_only else "forward_backward_input"
        ) as input_fields:
            check_data_items(input_fields.path("data"), len(input_fields.array("data", MAX_VALUES)))
            data = _collect_within_limits(
                _datum_from_json(datum) for datum in input_fields.objects("data", MAX_DATA_ITEMS)
            )
            config = input_fields.optional(input_fields.mapping, "loss_fn_config", {})
            for key, value in config.items():
                if isinstance(value, bool) or not isinstance(value, int | float | str):
                    path = input_fields.path("loss_fn_config")
                    raise UserError(f"{path}.{key[:40]}={shown(value)}: give a number or a string")
            return ForwardBackward(
                head.model_id, data, input_fields.text("loss_fn"), config, forward_only
            )


def output_to_message(output: ForwardBackwardOutput) -> bytes:
    """Write an output as protobuf. Consecutive datums with the same fields, dtypes and trailing
    shapes share a record.
    """
    message = ForwardBackwardOutputMessage(
        loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics
    )
    for _, group in groupby(output.loss_fn_outputs, key=_batch_key):
        datums = list(group)
        record = message.loss_fn_outputs.add(
            type_tag=output.loss_fn_output_type, num_datums=len(datums)
        )
        for name in datums[0]:
            _write_batch(record.fields[name], [datum[name] for datum in datums])
    return message.SerializeToString()


def output_from_message(body: bytes) -> ForwardBackwardOutput:
    """Read an output from protobuf."""
    message = parse_message(ForwardBackwardOutputMessage(), body)
    outputs: list[dict[str, TensorData]] = []
    for record in message.loss_fn_outputs:
        columns = {name: _read_batch(batch, name) for name, batch in record.fields.items()}
        if any(len(column) != record.num_datums for column in columns.values()):
            raise UserError(
                "loss_fn_outputs: a field does not have one tensor for each of "
                f"{record.num_datums} datums"
            )
        outputs += [
            {name: column[i] for name, column in columns.items()} for i in range(record.num_datums)
        ]
    return ForwardBackwardOutput(message.loss_fn_output_type, outputs, dict(message.metrics))


def output_to_json(output: ForwardBackwardOutput) -> dict[str, Any]:
    """Write an output as JSON."""
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {k: tensor_to_json(v) for k, v in datum.items()} for datum in output.loss_fn_outputs
        ],
        "metrics": output.metrics,
    }


def optim_step_from_json(fields: Fields) -> OptimStep:
    """Read an optim_step."""
    with fields:
        head = head_from_json(fields)
        fields.skip("type")
        if fields.has("optimizer_params"):
            raise UnsupportedError(
                "optimizer_params: the update rule of Dimuon is not public, and AdamW is the only "
                "optimizer here; give adam_params"
            )
        with fields.object("adam_params") as adam_fields:
            params = {
                name: adam_fields.number(name) for name in _ADAM_FIELDS if adam_fields.has(name)
            }
    return OptimStep(head.model_id, AdamParams(**params))


def optim_step_to_json(operation: OptimStep, seq_id: int) -> dict[str, Any]:
    """Write an optim_step."""
    params = {name: getattr(operation.adam_params, name) for name in _ADAM_FIELDS}
    return {
        "model_id": operation.model_id,
        "seq_id": seq_id,
        "type": "optim_step",
        "adam_params": params,
    }


def optim_step_response_from_json(fields: Fields) -> OptimStepResponse:
    """Read the result of an optim_step."""
    metrics = fields.object("metrics")
    return OptimStepResponse({name: metrics.number(name) for name in metrics})


def _iterate_fields(body: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, start of the field, start of its content, end) for each field of the
    message in `body[begin:end]`. Raise UserError if these bytes are not a message.
    """
    while begin < end:
        tag, content = _varint(body, begin, end)
        match tag & 7:
            case 0:
                _, field_end = _varint(body, content, end)
            case 1:
                field_end = content + 8
            case 5:
                field_end = content + 4
            case 2:
                size, content = _varint(body, content, end)
                field_end = content + size
            case _:
                raise UserError(f"the body is not a {_REQUEST_NAME} in protobuf: it has groups")
        if field_end > end:
            raise UserError(f"the body is not a {_REQUEST_NAME} in protobuf: it is cut off")
        yield tag >> 3, begin, content, field_end
        begin = field_end


def _varint(body: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return the number that begins at `begin`, and where it ends."""
    value = shift = 0
    while begin < end and shift < 70:
        byte = body[begin]
        begin += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, begin
        shift += 7
    raise UserError(f"the body is not a {_REQUEST_NAME} in protobuf: it is cut off")


def _loss_config(message: Any) -> Mapping[str, float]:
    """Read the options of a loss. Newer clients write every option to `loss_fn_config_v2`, and the
    numbers to `loss_fn_config` too. A string is returned as it is; the loss then rejects it.
    """
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        key: getattr(value, value.WhichOneof("value") or "number")
        for key, value in message.loss_fn_config_v2.items()
    }


def _collect_within_limits(data: Iterable[Datum]) -> list[Datum]:
    datums: list[Datum] = []
    num_elements, num_items, num_tokens = 0, 0, 0
    for datum in data:
        pause_if_due()
        num_tokens += datum.model_input.max_length
        check_count("data", num_tokens, MAX_VALUES, "token ids")
        num_items += 1 + len(datum.model_input.chunks) + len(datum.loss_fn_inputs)
        check_data_items("data", num_items)
        num_elements += sum(dense_element_count(tensor) for tensor in datum.loss_fn_inputs.values())
        check_dense_elements("data", num_elements)
        datums.append(datum)
    return datums


def _datum_from_message(message: Any, path: str) -> Datum:
    check_count(f"{path}.loss_fn_inputs", len(message.loss_fn_inputs), MAX_MAP_ENTRIES, "entries")
    tensors = {
        name: tensor_from_message(tensor, f"{path}.loss_fn_inputs[{name[:40]!r}]")
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(model_input_from_messages(message.model_input, f"{path}.model_input"), tensors)


def _datum_from_json(fields: Fields) -> Datum:
    with fields:
        fields.skip("model_input_spans", "loss_fn_input_spans")
        inputs = fields.object("loss_fn_inputs")
        fields.mapping("loss_fn_inputs")  # checks the number of entries
        tensors = {name: tensor_from_json(inputs.object(name)) for name in inputs}
        return Datum(model_input_from_json(fields.object("model_input")), tensors)


def _batch_key(datum: Mapping[str, TensorData]) -> list[tuple[str, str, list[int]]]:
    """Return what the datums of one record have in common: names, dtypes and trailing shapes of
    their tensors.
    """
    return sorted((name, tensor.dtype, (tensor.shape or [])[1:]) for name, tensor in datum.items())


def _write_batch(batch: Any, tensors: Sequence[TensorData]) -> None:
    arrays = [tensor.to_numpy() for tensor in tensors]
    batch.dtype = PROTO_DTYPES[tensors[0].dtype]
    batch.trailing_shape.extend(arrays[0].shape[1:])
    batch.data = b"".join(array.tobytes() for array in arrays)
    batch.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()


def _read_batch(batch: Any, name: str) -> list[TensorData]:
    values, dtype = tensor_values(batch.data, batch.dtype, name)
    offsets = array_from_bytes(batch.offsets, "<i8", f"{name}.offsets")
    item_bytes = len(batch.data) // max(1, values.size)
    trailing_shape = list(batch.trailing_shape)
    row_elements = math.prod(trailing_shape)
    tensors: list[TensorData] = []
    for start, end in pairwise(offsets.tolist()):
        part = values[start // max(1, item_bytes) : end // max(1, item_bytes)]
        if row_elements < 1 or part.size % row_elements:
            raise UserError(
                f"{name}: {part.size} values do not fill rows of shape {trailing_shape}"
            )
        tensors.append(TensorData(part, dtype, [part.size // row_elements, *trailing_shape]))
    return tensors
