"""The protobuf messages have the SDK's numbers, types, labels and names."""

import pytest
from tinker.proto import tinker_public_pb2 as theirs

from planish.wire import messages

# Two messages of theirs have the same fields, and are one of ours.
RENAMED = {"TokenSpan": "SampledProvenanceSpan"}
SAME = {"PromptProvenanceSpan": "TokenSpan", "SampledProvenanceSpan": "TokenSpan"}


def fields(descriptor, name):
    found = {}
    for field in descriptor.fields:
        kind = field.message_type or field.enum_type
        type_name = kind and SAME.get(kind.name, kind.name)
        group = field.containing_oneof and field.containing_oneof.name
        entry = fields(kind, name) if kind and kind.name.endswith("Entry") else None
        found[field.number] = (
            field.name,
            field.type,
            field.is_repeated,
            field.has_presence,
            type_name,
            group,
            entry,
        )
    return found


@pytest.mark.parametrize("name", messages._MESSAGES)
def test_a_message_has_the_fields_of_the_sdk(name: str):
    ours = messages.message_class(name).DESCRIPTOR
    assert fields(ours, name) == fields(getattr(theirs, RENAMED.get(name, name)).DESCRIPTOR, name)


def test_enum_numbers_equal_those_of_the_sdk():
    assert (messages.STOP, messages.LENGTH) == (theirs.STOP_REASON_STOP, theirs.STOP_REASON_LENGTH)
    ours = (messages.FLOAT32, messages.INT64, messages.INT32, messages.BFLOAT16)
    assert ours == (
        theirs.DTYPE_FLOAT32,
        theirs.DTYPE_INT64,
        theirs.DTYPE_INT32,
        theirs.DTYPE_BFLOAT16,
    )
