"""The protobuf messages of the protocol, built from a table when the module is loaded.

The wire has field numbers and types, but no names of packages or files, so these messages are the
SDK's. A generated module would be tied to certain releases of the protobuf runtime; a table is not.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PROTOBUF = "application/x-protobuf"
"""The media type of a body."""
_PACKAGE = "planish.wire"

# "name": "type field = number; ...". `T? f` is an optional field, `T* f` a repeated one, `{T} f` a
# map from strings to T, and `T|group f` a member of a oneof.
_MESSAGES = {
    "SampleResponse": "SampledSequence* sequences = 1; bytes? prompt_logprobs = 2; TopkLogprobs? topk_prompt_logprobs = 3; "
    "int32 prompt_cache_hit_tokens = 4; Tensor? target_prompt_logprobs = 5; PromptAltTokens? "
    "prompt_alt_tokens = 6",
    "PromptAltTokens": "Tensor tokens = 1; Tensor logprobs = 2",
    "SampledSequence": "StopReason stop_reason = 1; bytes tokens = 2; bytes? logprobs = 3; TopkLogprobs? topk_sampled_logprobs = 4",
    "TopkLogprobs": "bytes token_ids = 1; bytes logprobs = 2; uint32 k = 3; uint32 length = 4",
    "SparseCsr": "bytes values = 1; bytes crow_indices = 2; bytes col_indices = 3",
    "Tensor": "bytes|encoding dense = 1; SparseCsr|encoding sparse_csr = 2; DType dtype = 3; int64* shape = 4",
    "BatchedTensor": "bytes data = 1; bytes offsets = 2; DType dtype = 3; int64* trailing_shape = 4",
    "ArrayRecord": "string type_tag = 1; {BatchedTensor} fields = 2; int64 num_datums = 3",
    "ForwardBackwardOutput": "string loss_fn_output_type = 1; ArrayRecord* loss_fn_outputs = 2; {double} metrics = 3",
    "ForwardBackwardRequest": "string model_id = 1; int32 seq_id = 2; Datum* data = 3; string loss_fn = 4; "
    "{double} loss_fn_config = 5; bool forward_only = 6; {LossConfigValue} loss_fn_config_v2 = 7",
    "LossConfigValue": "double|value number = 1; string|value text = 2",
    "Datum": "Chunk* model_input = 1; {Tensor} loss_fn_inputs = 2; ProvenanceSpan* model_input_spans = 3; "
    "ProvenanceSpan* loss_fn_input_spans = 4",
    "ProvenanceSpan": "TokenSpan|span prompt_tokens = 1; TokenSpan|span sampled_tokens = 2",
    "TokenSpan": "string sequence_id = 1; int64 offset = 2; int64 length = 3",
    "Chunk": "EncodedTextChunk|chunk encoded_text = 1; ImageChunk|chunk image = 2; DmelChunk|chunk dmel = 3",
    "EncodedTextChunk": "bytes tokens = 1",
    "ImageChunk": "bytes data = 1; string format = 2; int32? expected_tokens = 3",
    "DmelChunk": "bytes dmel = 1",
}
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
_SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "int32", "int64", "string", "uint32")
}


def _add_field(message: DescriptorProto, declaration: str) -> None:
    kind, name, _, number = declaration.split()
    field = message.field.add(
        name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL
    )
    kind, _, group = kind.partition("|")
    if kind.startswith("{"):
        entry = message.nested_type.add(
            name="".join(part.title() for part in name.split("_")) + "Entry"
        )
        entry.options.map_entry = True
        _add_field(entry, "string key = 1")
        _add_field(entry, f"{kind[1:-1]} value = 2")
        field.label = FieldDescriptorProto.LABEL_REPEATED
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.endswith("*"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind.endswith("?"):
        field.proto3_optional = True
        group = f"_{name}"
    if group:
        field.oneof_index = _oneof(message, group)
    _set_type(field, kind.rstrip("*?"))


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = (
        FieldDescriptorProto.TYPE_ENUM if kind in _ENUMS else FieldDescriptorProto.TYPE_MESSAGE
    )
    field.type_name = f".{_PACKAGE}.{kind}"


def _oneof(message: DescriptorProto, group: str) -> int:
    names = [oneof.name for oneof in message.oneof_decl]
    if group not in names:
        message.oneof_decl.add(name=group)
        names.append(group)
    return names.index(group)


def _build() -> DescriptorPool:
    file = FileDescriptorProto(name="planish/wire.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for declaration in fields.split(";"):
            _add_field(message, declaration)
    pool = DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _build()


def message_class(name: str) -> Any:
    """Return the class of a message in the table. Type checkers do not know its attributes."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


SampleResponseMessage = message_class("SampleResponse")
ForwardBackwardRequestMessage = message_class("ForwardBackwardRequest")
ForwardBackwardOutputMessage = message_class("ForwardBackwardOutput")
TensorMessage = message_class("Tensor")

STOP, LENGTH = range(2)
FLOAT32, INT64, INT32, BFLOAT16 = range(1, 5)
