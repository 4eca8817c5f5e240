"""What a tool is, and how a Python function becomes one.

A `Tool` has a name, a description, a JSON schema of its parameters, and a `run`. `@tool` makes one
from a typed function or method; a class of your own with these four members is one as well (a tool
whose schema comes from elsewhere, say). A tool made from a function can still be called as that
function.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Protocol, overload, runtime_checkable

from planish.errors import UserError
from planish.renderers import ToolSpec
from planish.rl.types import Metrics
from planish.tool_use.blocking import call
from planish.tool_use.parameters import read_docstring, read_parameters


@dataclass(frozen=True)
class ToolInput:
    """One call."""

    arguments: Mapping[str, Any]
    """As the model wrote them."""
    call_id: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """What a call gives."""

    content: str = ""
    """For the model to read."""
    stop: bool = False
    """End the episode, with the stop reason tool_stopped."""
    error: bool = False
    """Counted in the metric tool_errors."""
    metrics: Metrics = field(default_factory=dict)
    """Added to the turn's; of several calls in a turn, the sum."""


def simple_tool_result(
    content: str, *, should_stop: bool = False, metrics: Metrics | None = None
) -> ToolResult:
    """ToolResult(content), under the name that tools of the public cookbooks use."""
    return ToolResult(content, stop=should_stop, metrics=metrics or {})


def error_tool_result(error_msg: str, *, should_stop: bool = False) -> ToolResult:
    """A result that tells the model of an error, and is counted as one."""
    return ToolResult(f"Error: {error_msg}", stop=should_stop, error=True)


@runtime_checkable
class Tool(Protocol):
    """Anything that a model can call."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters_schema(self) -> dict[str, Any]:
        """A JSON schema of type object."""
        ...

    async def run(self, input: ToolInput) -> ToolResult:
        """Run one call. What it raises is told to the model as an error; it does not end the
        episode.
        """
        ...


def tool_spec(tool: Tool) -> ToolSpec:
    """A tool as renderers offer it to a model."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters_schema,
    }


class FunctionTool:
    """A function or method as a tool; made by `@tool`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not isinstance(function, FunctionType) or not function.__name__.isidentifier():
            raise UserError(
                f"@tool on {function!r}: it needs a name that a model can write; decorate a function or a method"
            )
        documentation = read_docstring(function.__doc__)
        self.name: str = function.__name__
        self.description = documentation.description
        self._parameters = read_parameters(function, documentation.parameters)
        self._function = function
        self._instance: Any = None
        self.__module__ = function.__module__
        self.__qualname__ = function.__qualname__
        self.__doc__ = function.__doc__

    @property
    def parameters_schema(self) -> dict[str, Any]:
        return self._parameters.schema

    def to_spec(self) -> ToolSpec:
        return tool_spec(self)

    async def run(self, input: ToolInput) -> ToolResult:
        """Check the arguments and call the function. A plain function runs in a thread of its own,
        so that it may block.

        It returns a ToolResult, a text, or anything that JSON can hold.
        """
        arguments = self._parameters.read(input.arguments)
        value = await call(functools.partial(self._callable(), **arguments))
        if isinstance(value, ToolResult):
            return value
        return ToolResult(_as_text(value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable()(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> "FunctionTool": ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> "FunctionTool": ...
    def __get__(self, instance: object | None, owner: type | None = None) -> "FunctionTool":
        if instance is None:
            return self
        bound = object.__new__(FunctionTool)
        bound.__dict__ |= {**self.__dict__, "_instance": instance}
        return bound

    def __reduce__(self) -> Any:
        # By name, as functions pickle: the module's attribute of that name is this tool, not the
        # function in it.
        if self._instance is not None:
            return getattr, (self._instance, self.name)
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<tool {self.__qualname__}>"

    def _callable(self) -> Callable[..., Any]:
        return (
            self._function if self._instance is None else MethodType(self._function, self._instance)
        )


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def tool(function: Callable[..., Any]) -> FunctionTool:
    """A typed function or method as a tool: its name, its docstring, its annotations are what the
    model is told.

        @tool
        def add(a: int, b: Annotated[int, "the second number"]) -> int:
            '''Add two numbers.'''
            return a + b

    UserError at once if a parameter has no type that can be written as JSON.
    """
    return FunctionTool(function)
