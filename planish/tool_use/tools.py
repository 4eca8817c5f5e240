"""The interface of a tool, and `@tool`, which makes a tool from a Python function.

A `Tool` has a name, a description, a JSON schema of its parameters, and a method `run`. `@tool`
makes one from a typed function or method, which can still be called as before. Any class with these
four members is a tool too, for instance if its schema comes from another source.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Protocol, overload, runtime_checkable

from planish.errors import UserError
from planish.processes.blocking import call_function
from planish.renderers import ToolSpec
from planish.rl.types import Metrics
from planish.tool_use.parameters import read_docstring, read_parameters


@dataclass(frozen=True)
class ToolInput:
    """The input of one call."""

    arguments: Mapping[str, Any]
    """The arguments as the model wrote them, not validated."""
    call_id: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """The result of one call."""

    content: str = ""
    """The text that the model reads."""
    stop: bool = False
    """Whether the episode ends, with the stop reason tool_stopped."""
    error: bool = False
    """Whether the call counts in the metric tool_errors."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the turn. The values of several calls in a turn are added."""


def simple_tool_result(
    content: str, *, should_stop: bool = False, metrics: Metrics | None = None
) -> ToolResult:
    """Return a ToolResult with one text, `content`. With `should_stop` the episode ends after it.
    The name is that of the public cookbooks.
    """
    return ToolResult(content, stop=should_stop, metrics=metrics or {})


def error_tool_result(error_msg: str, *, should_stop: bool = False) -> ToolResult:
    """Return a result that shows the model an error and counts in the metric tool_errors. With
    `should_stop` the episode ends after it.
    """
    return ToolResult(f"Error: {error_msg}", stop=should_stop, error=True)


@runtime_checkable
class Tool(Protocol):
    """The interface of a tool that a model can call."""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        ...

    @property
    def description(self) -> str:
        """What the tool does, for the model to read."""
        ...

    @property
    def parameters_schema(self) -> dict[str, Any]:
        """The JSON schema of the parameters, of type object."""
        ...

    async def run(self, input: ToolInput) -> ToolResult:
        """Run one call. An exception does not end the episode; the model reads it as an error."""
        ...


def tool_spec(tool: Tool) -> ToolSpec:
    """Return a tool's specification in the form that renderers take."""
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
                f"@tool on {function!r}: it needs a name that a model can write; decorate a "
                "function or a method"
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
        """Return the JSON schema of the arguments, made from the signature of the function."""
        return self._parameters.schema

    def to_spec(self) -> ToolSpec:
        """Return the name, the description and the arguments, as renderers take them."""
        return tool_spec(self)

    async def run(self, input: ToolInput) -> ToolResult:
        """Check the arguments and call the function, which may return a ToolResult, a string, or
        any other value that JSON can hold.

        A plain function runs in its own thread, so it may block.
        """
        arguments = self._parameters.read(input.arguments)
        value = await call_function(functools.partial(self._callable(), **arguments))
        return value if isinstance(value, ToolResult) else ToolResult(_as_text(value))

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
        # Pickle the tool by its name, as Python pickles functions. The function itself cannot be
        # pickled, because the module's attribute of that name is this tool.
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
    """Make a tool from a typed function or method. The model reads its name, docstring and
    annotations.

        @tool
        def add(a: int, b: Annotated[int, "the second number"]) -> int:
            '''Add two numbers.'''
            return a + b

    The decorator raises UserError if a parameter has no type that can be written as JSON.
    """
    return FunctionTool(function)
