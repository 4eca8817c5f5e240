"""Function signatures become JSON schemas, and the arguments that models write are checked."""

import dataclasses
import enum
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, Field

from planish.errors import UserError
from planish.tool_use.parameters import read_docstring, read_parameters


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Node(BaseModel):
    children: list["Node"] = []


def everything(
    text: str,
    count: int,
    share: float,
    flag: bool,
    words: list[str],
    table: dict[str, int],
    mode: Literal["fast", "slow"],
    unit: Unit,
    place: Point,
    limit: Optional[int] = None,  # noqa: UP045
    either: int | str = 3,
    anything: Any = None,
):
    pass


GOOD = {
    "text": "t",
    "count": 1,
    "share": 0.5,
    "flag": True,
    "words": ["a"],
    "table": {"a": 1},
    "mode": "fast",
    "unit": "ft",
    "place": {"x": 1},
}


def test_schema_of_each_type():
    schema = read_parameters(everything, {}).schema
    assert schema["type"] == "object"
    assert schema["required"] == list(GOOD)
    assert schema["properties"] == {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "words": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "object", "additionalProperties": {"type": "integer"}},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
        "unit": {"type": "string", "enum": ["m", "ft"]},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.0}},
            "required": ["x"],
        },
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 3},
        "anything": {"default": None},
    }


def test_arguments_become_what_the_function_wants():
    read = read_parameters(everything, {}).read(GOOD)
    assert read == {**GOOD, "unit": Unit.FOOT, "place": Point(1, 0.0)}


@pytest.mark.parametrize(
    ("name", "written", "read"),
    [
        ("count", "3", 3),
        ("count", 3.0, 3),
        ("share", "0.5", 0.5),
        ("share", 2, 2.0),
        ("text", 3, "3"),
        ("flag", "true", True),
        ("flag", 0, False),
        ("words", [1, "b"], ["1", "b"]),
        ("limit", None, None),
        ("either", "x", "x"),
        ("anything", {"a": [1]}, {"a": [1]}),
    ],
)
def test_clear_meanings_are_converted(name, written, read):
    value = read_parameters(everything, {}).read({**GOOD, name: written})[name]
    assert value == read
    assert type(value) is type(read)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"count": "three"}, 'count="three": Input should be a valid integer'),
        ({"count": 1.5}, "count=1.5: Input should be a valid integer"),
        ({"mode": "middling"}, "mode=\"middling\": Input should be 'fast' or 'slow'"),
        ({"unit": "inch"}, "Input should be 'm' or 'ft'"),
        ({"words": "a"}, 'words="a": Input should be a valid list'),
        ({"place": {}}, "place.x is missing"),
        ({"colour": "red"}, "colour is unknown"),
        ({"count": None}, "count=null"),
        ({"text": ["x" * 1000]}, "xxx...: Input should be a valid string"),
    ],
)
def test_what_does_not_fit_is_named(change, complaint):
    with pytest.raises(UserError) as told:
        read_parameters(everything, {}).read({**GOOD, **change})
    assert complaint in str(told.value)
    assert len(str(told.value)) < 500
    assert "The parameters are: text, count" in str(told.value)


def test_all_argument_errors_are_reported_together():
    with pytest.raises(UserError, match=r"text is missing; count is missing.*nope is unknown"):
        read_parameters(everything, {}).read({"nope": 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
PARAMETERS = read_parameters(everything, {})


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*GOOD, "limit", "other"]), JSON))
def test_nothing_that_a_model_writes_raises_anything_else(arguments):
    with suppress(UserError):
        read = PARAMETERS.read({**GOOD, **arguments})
        assert set(read) == {*GOOD, *arguments}


def test_descriptions():
    def area(
        width: Annotated[float, "in metres"],
        height: Annotated[float, Field(description="also in metres", gt=0)],
        depth: float = 1.0,
        name: str = "it",
    ):
        """Compute."""

    parameters = read_parameters(area, {"depth": "how deep", "width": "not this"})
    properties = parameters.schema["properties"]
    assert [properties[name].get("description") for name in properties] == [
        "in metres",
        "also in metres",
        "how deep",
        None,
    ]
    with pytest.raises(UserError, match="height=-1: Input should be greater than 0"):
        parameters.read({"width": 1, "height": -1})


def test_any_name_will_do():
    def store(schema: str, copy: int, json: str, model_config: str, dict: str = ""):
        pass

    read = {"schema": "a", "copy": 1, "json": "b", "model_config": "c"}
    assert read_parameters(store, {}).read(read) == read


def test_no_parameters():
    def now():
        pass

    parameters = read_parameters(now, {})
    assert parameters.schema == {"type": "object", "properties": {}}
    assert parameters.read({}) == {}
    with pytest.raises(UserError, match="x is unknown. The parameters are: none"):
        parameters.read({"x": 1})


def no_type(x):
    pass


def no_json(x: Callable[[int], int]):
    pass


def no_class(x: pytest.Item):
    pass


def variable(*x: int):
    pass


def keywords(**x: int):
    pass


def recursive(x: Node):
    pass


@pytest.mark.parametrize("function", [no_type, no_json, no_class, variable, keywords, recursive])
def test_functions_that_are_no_tools(function):
    with pytest.raises(UserError, match=f"tool {function.__name__}: "):
        read_parameters(function, {})


def test_unresolvable_annotation():
    def local(x: "NotHere"):  # type: ignore[name-defined]  # noqa: F821
        pass

    with pytest.raises(UserError, match="annotation cannot be resolved"):
        read_parameters(local, {})


GOOGLE = """Add numbers.

    Slowly: one after the other.

    Args:
        a: the first
            of the two
        b (int, optional): the second: a number

    Returns:
        c: the sum
    """
SPHINX = """Add numbers.

    Slowly: one after the other.

    :param a: the first
        of the two
    :param int b: the second: a number
    :returns: the sum
    :rtype: int
    """


@pytest.mark.parametrize("text", [GOOGLE, SPHINX])
def test_docstrings(text):
    read = read_docstring(text)
    assert read.description == "Add numbers.\n\nSlowly: one after the other."
    assert read.parameters == {"a": "the first of the two", "b": "the second: a number"}


def test_examples_are_for_the_model_too():
    read = read_docstring(
        "Add.\n\nArgs:\n    a: first\n\nExample:\n    add(a=1)\n\nRaises:\n    never: really"
    )
    assert read.description == "Add.\n\nExample:\n    add(a=1)"
    assert read.parameters == {"a": "first"}


def test_no_docstring():
    assert read_docstring(None).description == ""
    assert read_docstring("Only this.").parameters == {}
