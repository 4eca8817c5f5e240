"""A call that a client sends back as an object keeps the text that the model wrote."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from planish.server.messages.tool_inputs import (
    MAX_DIFFERENCE_CHARACTERS,
    call_id,
    input_json,
    parse_arguments,
    read_call,
)

TEXTS = (
    '{"a": 1, "b": "x"}',
    '{"a":1,"b":"x"}',
    "{}",
    "{ }",
    '{"a": 1.0, "b": 1e5, "c": -0.0}',
    '{"colour": "\\u00e9", "plain": "é"}',
    '{"big": 123456789012345678901234567890}',
    '{"b": 1, "2": 2, "1": 3}',
    '{"a": 1, "a": 2}',
    '{"a": [1, {"b": null}], "path": "C:\\\\x\\/y"}',
    '{\n  "a": true,\n  "b": {"c": false}\n}',
    '{"cut": "off he',
    '{"cut": ',
    '{"x": NaN, "y": -Infinity}',
    '{"half": "\\ud83d"}',
    "",
)


def as_python(text: str) -> Any:
    """Return the object that Anthropic's Python client sends back."""
    return orjson.loads(json.dumps(parse_arguments(input_json(text))))


def as_javascript(value: Any) -> Any:
    """Return the object that a client in JavaScript sends back: numbers are floats, and keys that
    are numbers come first.
    """
    if isinstance(value, dict):
        numbers = sorted((key for key in value if re.fullmatch("[0-9]+", key)), key=int)
        others = [key for key in value if key not in numbers]
        return {key: as_javascript(value[key]) for key in [*numbers, *others]}
    if isinstance(value, list):
        return [as_javascript(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < 1e21 else number
    return value


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("id_of_model", [None, "functions.add:0", "functions.mcp__zed__x:3"])
def test_the_text_of_a_call_survives_the_client(text, id_of_model):
    id_ = call_id(text, id_of_model)
    for value in (as_python(text), as_javascript(as_python(text))):
        base, arguments = read_call(id_, value)
        assert arguments == (text or "{}")
        assert base == id_of_model if id_of_model else re.fullmatch(r"toolu_[0-9a-f]{24}", base)
    if id_of_model is None:
        assert re.fullmatch(r"[a-zA-Z0-9_-]+", id_)


def test_the_usual_form_needs_no_longer_id():
    assert len(call_id('{"a": 1, "b": [true, "é"]}', None)) == len("toolu_") + 24


@settings(max_examples=15, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
            max_leaves=8,
        ),
        max_size=4,
    ),
    st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]),
    st.booleans(),
)
def test_any_text_survives(value, separators, ascii_only):
    text = json.dumps(value, separators=separators, ensure_ascii=ascii_only)
    for returned in (as_python(text), as_javascript(as_python(text))):
        assert read_call(call_id(text, None), returned)[1] == text


def test_a_changed_object_is_written_as_it_is():
    id_ = call_id('{"a":1}', None)
    assert read_call(id_, {"a": 2}) == (id_, '{"a": 2}')
    assert read_call("call_1__zAAAA", {"é": [1.5]}) == ("call_1__zAAAA", '{"é": [1.5]}')


def test_an_id_has_a_limit():
    text = json.dumps({str(number): number * 0.37 for number in range(5_000)})
    id_ = call_id(text, None)
    assert len(id_) <= MAX_DIFFERENCE_CHARACTERS + 40
    # No limit of ours is reached by the compact form of a long text.
    text = json.dumps({"content": "line of a file\n" * 5_000}, separators=(",", ":"))
    assert read_call(call_id(text, None), as_python(text))[1] == text


def test_every_client_can_parse_the_input():
    for text in TEXTS:
        orjson.loads(json.dumps(parse_arguments(input_json(text)), allow_nan=False))
    assert json.loads(input_json('{"x": NaN}')) == {"x": None}
