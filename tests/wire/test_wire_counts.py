"""Sizes and counts of a body are checked before they take memory or time."""

from typing import Any

import orjson
import pytest

from planish.errors import UserError
from planish.wire import fields as fields_module
from planish.wire.fields import (
    MAX_DEPTH,
    MAX_LIST_ITEMS,
    MAX_MAP_ENTRIES,
    MAX_STRING_CHARACTERS,
    Fields,
)
from planish.wire.messages import INT64, ForwardBackwardRequestMessage
from planish.wire.tensors import MAX_DIMENSIONS, MAX_TOKENS, tensor_from_json
from planish.wire.training import MAX_FIELDS, forward_backward_from_body, parse_forward_backward


def body_of_depth(depth: int) -> bytes:
    """Return an object with `depth` nested objects and lists, itself included."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_depth():
    Fields.of(body_of_depth(MAX_DEPTH))
    with pytest.raises(UserError, match=f"more than {MAX_DEPTH} levels deep"):
        Fields.of(body_of_depth(MAX_DEPTH + 1))
    flat = orjson.dumps({"a": [[1]] * 1000, "b": {"c": [{}] * 1000}})
    Fields.of(flat)


def test_deep_values_are_errors_of_the_client():
    """They once exhausted the stack while an error was written, and the response was a 500."""
    body = b'{"data": [' + b"[" * 900 + b"]" * 900 + b'], "dtype": "int64"}'
    with pytest.raises(UserError, match="levels deep"):
        tensor_from_json(Fields.of(body))


def test_values_of_a_body(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fields_module, "MAX_VALUES", 10)
    Fields.of(orjson.dumps({"a": [0] * 11}))
    with pytest.raises(UserError, match="more than 10 values"):
        Fields.of(orjson.dumps({"a": [0] * 12}))


@pytest.mark.parametrize(
    ("read", "value", "most"),
    [
        ("text", "x", MAX_STRING_CHARACTERS),
        ("array", [0], MAX_LIST_ITEMS),
        ("strings", None, MAX_LIST_ITEMS),
    ],
)
def test_counts_of_a_field(read: str, value, most: int):
    def body(count: int) -> Fields:
        sized = {f"k{i}": "" for i in range(count)} if value is None else value * count
        return Fields({"a": sized})

    getattr(body(most), read)("a")
    with pytest.raises(UserError, match=f"a has {most + 1:,} .*; give at most {most:,}"):
        getattr(body(most + 1), read)("a")


def test_an_unknown_field_is_named_in_short():
    with pytest.raises(UserError) as refused:
        Fields({"k" * 10_000: 1}).reject_unread()
    assert len(str(refused.value)) < 300


def message() -> Any:
    made = ForwardBackwardRequestMessage(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4)
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.dense = INT64, bytes(8)
    return made


def read(made: Any):
    return forward_backward_from_body(parse_forward_backward(made.SerializeToString()))


def test_dimensions_of_a_message():
    made = message()
    shape = made.data[0].loss_fn_inputs["target_tokens"].shape
    shape.extend([1] * MAX_DIMENSIONS)
    read(made)
    shape.append(1)
    with pytest.raises(UserError, match="9 dimensions; give at most 8"):
        read(made)
    shape.extend([1] * 1000)
    with pytest.raises(UserError, match="more than 8 dimensions"):
        parse_forward_backward(made.SerializeToString())


def test_fields_within_tensors_are_counted(monkeypatch: pytest.MonkeyPatch):
    from planish.wire import training

    made = message()
    made.data[0].loss_fn_inputs["target_tokens"].shape.append(1)
    # model_id, seq_id, data, loss_fn; chunk, entry; key, value; dense, dtype, shape
    monkeypatch.setattr(training, "MAX_FIELDS", 11)
    read(made)
    monkeypatch.setattr(training, "MAX_FIELDS", 10)
    with pytest.raises(UserError, match="more than 10 datums and parts"):
        read(made)
    assert MAX_FIELDS > 1 << 19


def test_options_and_inputs_of_a_message():
    made = message()
    for i in range(MAX_MAP_ENTRIES):
        made.loss_fn_config[f"k{i}"] = 1.0
    read(made)
    made.loss_fn_config["one more"] = 1.0
    with pytest.raises(UserError, match="loss_fn_config has 65 entries; give at most 64"):
        read(made)
    made = message()
    for i in range(MAX_MAP_ENTRIES):
        made.data[0].loss_fn_inputs[f"k{i}"].CopyFrom(made.data[0].loss_fn_inputs["target_tokens"])
    with pytest.raises(UserError, match="loss_fn_inputs has 65 entries; give at most 64"):
        read(made)


def test_tokens_of_a_model_input():
    made = message()
    made.data[0].model_input[0].encoded_text.tokens = bytes(4 * MAX_TOKENS)
    read(made)
    made.data[0].model_input.add().encoded_text.tokens = bytes(4)
    with pytest.raises(UserError, match=r"data\[0\].model_input has 1,048,577 token ids"):
        read(made)
