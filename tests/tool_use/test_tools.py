"""Python functions become tools."""

import asyncio
import pickle
import threading
from typing import Annotated

import pytest

from planish.errors import UserError
from planish.tool_use import (
    FunctionTool,
    Tool,
    ToolInput,
    ToolResult,
    error_tool_result,
    simple_tool_result,
    tool,
)


@tool
def add(a: int, b: Annotated[int, "the second"] = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
    """
    return a + b


@tool
async def greet(name: str) -> str:
    """Greet someone."""
    await asyncio.sleep(0)
    return f"Hello, {name}!"


class Shelf:
    def __init__(self):
        self.books: list[str] = []

    @tool
    def put(self, title: str) -> int:
        """Put a book on the shelf."""
        self.books.append(title)
        return len(self.books)

    @tool
    async def look(self) -> list[str]:
        """Look at the shelf."""
        return self.books


def run(called: Tool, **arguments) -> ToolResult:
    return asyncio.run(called.run(ToolInput(arguments)))


def test_the_specification():
    assert add.to_spec() == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first"},
                "b": {"type": "integer", "description": "the second", "default": 1},
            },
            "required": ["a"],
        },
    }


def test_a_tool_is_still_a_function():
    assert add(2, b=3) == 5
    assert asyncio.run(greet("you")) == "Hello, you!"
    assert Shelf().put("Emma") == 1


def test_sync_and_async():
    assert run(add, a="2", b=3) == ToolResult("5")
    assert run(add, a=2) == ToolResult("3")
    assert run(greet, name="you") == ToolResult("Hello, you!")


def test_methods_share_their_object():
    one, other = Shelf(), Shelf()
    run(one.put, title="Emma")
    assert run(one.put, title="Persuasion").content == "2"
    assert run(one.look).content == '["Emma", "Persuasion"]'
    assert run(other.look).content == "[]"
    assert set(one.put.parameters_schema["properties"]) == {"title"}


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", "text"),
        (None, ""),
        (1.5, "1.5"),
        ({"é": [True]}, '{"é": [true]}'),
        (ToolResult("as it is"), "as it is"),
    ],
)
def test_what_a_function_returns(value, content):
    @tool
    def give() -> object:
        return value

    assert run(give).content == content


def test_results_by_their_known_names():
    assert simple_tool_result("x", should_stop=True, metrics={"m": 1}) == ToolResult(
        "x", stop=True, metrics={"m": 1}
    )
    assert error_tool_result("no") == ToolResult("Error: no", error=True)


def test_wrong_arguments_and_exceptions_come_through():
    @tool
    def fail() -> str:
        raise KeyError("gone")

    with pytest.raises(UserError, match="a is missing"):
        run(add)
    with pytest.raises(KeyError, match="gone"):
        run(fail)


def test_a_blocking_tool_blocks_nobody():
    """Two tools that wait for each other can end only if they run concurrently."""
    barrier = threading.Barrier(2, timeout=60)

    @tool
    def meet() -> str:
        barrier.wait()
        return threading.current_thread().name

    async def both():
        return await asyncio.gather(meet.run(ToolInput({})), meet.run(ToolInput({})))

    first, second = asyncio.run(both())
    assert threading.current_thread().name not in (first.content, second.content)


@pytest.mark.parametrize("error", [StopIteration("end"), SystemExit(3)])
def test_exceptions_that_mean_something_else_elsewhere(error):
    @tool
    def leave() -> str:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        run(leave)


def test_tools_pickle_by_name():
    assert pickle.loads(pickle.dumps(add)) is add
    shelf = Shelf()
    run(shelf.put, title="Emma")
    copy = pickle.loads(pickle.dumps(shelf.put))
    assert run(copy, title="Persuasion").content == "2"
    assert shelf.books == ["Emma"]


def test_only_functions_are_decorated():
    for thing in (Shelf, 3, lambda: None):
        with pytest.raises(UserError, match="decorate a function or a method"):
            tool(thing)  # type: ignore[arg-type]


def test_a_custom_class_is_a_tool():
    class Remote:
        name = "remote"
        description = ""

        @property
        def parameters_schema(self):
            return {"type": "object", "properties": {}}

        async def run(self, input):
            return ToolResult(str(input.arguments))

    assert isinstance(Remote(), Tool)
    assert isinstance(add, Tool)
    assert isinstance(add, FunctionTool)
