import tracemalloc

import orjson
import pytest

from planish.errors import UserError
from planish.wire import fields as fields_module
from planish.wire.fields import MAX_CONTAINER_ITEMS, MAX_CONTAINERS, Fields
from planish.wire.json_pieces import parse_in_pieces


def of(**values) -> Fields:
    return Fields.of(orjson.dumps(values))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'"x"', b"3", b"\xff", b'{"a": NaN}', b"[" * 30_000]
)
def test_a_body_is_one_json_object(body):
    with pytest.raises(UserError, match="the body is"):
        Fields.of(body)


@pytest.mark.parametrize("part", [b"[],", b'{"":0},'])
def test_a_body_of_many_small_containers_is_rejected(part):
    def body(count: int) -> bytes:
        return b'{"data":[' + (part * count)[:-1] + b"]}"

    assert (
        len(Fields.of(body(MAX_CONTAINERS - 2)).array("data", MAX_CONTAINER_ITEMS))
        == MAX_CONTAINERS - 2
    )
    with pytest.raises(UserError, match="more than 131,072 objects and lists"):
        Fields.of(body(MAX_CONTAINERS - 1))
    tracemalloc.start()
    with pytest.raises(UserError, match="more than 131,072 objects and lists"):
        Fields.of(body(2_000_000))
    assert tracemalloc.get_traced_memory()[1] < 60 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("value", "in_pieces"),
    [
        ("x" * 500_000, False),
        ("a,[{" * 2_700, False),
        ("a,[{" * 60_000, True),
        ([0] * 8_000 + ["x" * 500_000], False),
        ([0] * 80_000, True),
        ([[{}]] * 20_000, True),
        ("x" * 1_100_000, True),
    ],
)
def test_only_large_bodies_of_many_values_are_parsed_in_pieces(monkeypatch, value, in_pieces):
    """A piece ends at a comma. A long string in the body was searched for commas in vain."""
    parsed_in_pieces = []

    def recorded(*arguments):
        parsed_in_pieces.append(True)
        return parse_in_pieces(*arguments)

    monkeypatch.setattr(fields_module, "parse_in_pieces", recorded)
    assert of(value=value).raw("value") == value
    assert bool(parsed_in_pieces) is in_pieces


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("text", 1),
        ("text", "x" * 200_000),
        ("identifier", "a/b"),
        ("identifier", ".."),
        ("identifier", ""),
        ("identifier", "x" * 300),
        ("integer", "1"),
        ("integer", True),
        ("integer", 1.5),
        ("integer", 1e300),
        ("number", "1"),
        ("number", False),
        ("boolean", 1),
        ("array", {}),
        ("mapping", []),
        ("object", "x"),
        ("strings", {"key": 1}),
    ],
)
def test_a_value_of_another_type_is_named(kind, value):
    with pytest.raises(UserError, match="wanted"):
        getattr(of(wanted=value), kind)("wanted")


@pytest.mark.parametrize("fields", [of(), of(wanted=None)])
def test_a_missing_field_is_named(fields):
    with pytest.raises(UserError, match="wanted is missing"):
        fields.text("wanted")
    assert fields.optional(fields.text, "wanted") is None
    assert fields.optional(fields.text, "wanted", "default") == "default"


def test_bounds_of_an_integer():
    assert of(n=2**63 - 1).integer("n") == 2**63 - 1
    assert of(n=3.0).integer("n") == 3
    for value in (2**63, -1, 10):
        with pytest.raises(UserError, match="n="):
            of(n=value).integer("n", 0, 9)


def test_a_nested_field_is_named_by_its_path():
    with pytest.raises(UserError, match=r"params\.inner\.name is missing"):
        of(params={"inner": {}}).object("params").object("inner").text("name")
    with pytest.raises(UserError, match=r"items\[1\]"):
        list(of(items=[{}, 3]).objects("items"))


def test_an_unknown_field_with_a_value_is_rejected():
    with (
        pytest.raises(UserError, match="new_option='fast' is unknown"),
        of(a=1, new_option="fast") as fields,
    ):
        fields.integer("a")


def test_an_empty_unknown_field_is_accepted():
    with of(a=1, b=None, c=False, d=0, e="", f=[], g={}) as fields:
        fields.integer("a")


def test_the_first_error_is_reported():
    with pytest.raises(UserError, match="a=2"), of(a=2, unknown=1) as fields:
        fields.integer("a", high=1)


def test_a_long_value_is_shortened_in_the_error():
    with pytest.raises(UserError) as caught:
        of(a="x" * 5000).integer("a")
    assert len(str(caught.value)) < 250
