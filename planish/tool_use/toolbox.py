"""Run the tool calls of one message.

A mistake of the model or a failure of a tool does not end an episode. An unknown name, wrong
arguments, an exception or a timeout becomes the text of a tool message, and the model can continue.
A result that is too long is cut in the middle, with a line that says so.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.errors import UserError
from planish.processes.interruption import exits_as_errors, gather_or_cancel
from planish.renderers import Message, ToolCall, UnparsedToolCall
from planish.renderers.codec import whole_characters
from planish.rl.limits import TOOL_EXECUTIONS, ToolExecution
from planish.rl.types import Metrics
from planish.tool_use.tools import Tool, ToolInput, ToolResult, error_tool_result


@dataclass(frozen=True)
class CallResult:
    """The result of one call, as a message."""

    tool: str | None
    """Name of the called tool; None if there is no such tool or the call could not be parsed."""
    message: Message
    is_error: bool
    stop: bool = False
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class Toolbox:
    """The tools of an episode, and the options for running them. Raises UserError for a bad
    option.
    """

    tools: Sequence[Tool]
    execution: ToolExecution = "parallel"
    """With "sequential", calls run one after the other, and none after a call that stops the
    episode.
    """
    timeout_seconds: float | None = 60.0
    """Time limit of one call; None for no limit."""
    max_result_chars: int = 16384

    def __post_init__(self) -> None:
        names = Counter(tool.name for tool in self.tools)
        duplicates = sorted(name for name, count in names.items() if count > 1)
        if duplicates:
            raise UserError(f"tools: several have the name {', '.join(duplicates)}; rename one")
        if self.execution not in TOOL_EXECUTIONS:
            raise UserError(
                f"tool_execution={self.execution!r}: give {' or '.join(TOOL_EXECUTIONS)}"
            )
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise UserError(
                f"tool_timeout_seconds={self.timeout_seconds!r}: give seconds above 0, or None for "
                "no limit"
            )
        if self.max_result_chars < 100:
            raise UserError(f"max_result_chars={self.max_result_chars!r}: give at least 100")

    async def run(self, calls: Sequence[ToolCall]) -> list[CallResult]:
        """Run the calls and return their results in order. With sequential execution, calls after
        one that stopped the episode have no result.

        Raises a UserError that names a tool which does not return a ToolResult with text.
        """
        if self.execution == "parallel":
            return await gather_or_cancel(self._run_call(call) for call in calls)
        results: list[CallResult] = []
        for call in calls:
            results.append(await self._run_call(call))
            if results[-1].stop:
                break
        return results

    def answer_unparsed(self, call: UnparsedToolCall) -> CallResult:
        """Return the error message that answers a call that could not be parsed."""
        text = (
            f"Error: the tool call could not be read: {call['error']}. Write a JSON object with a "
            "name and arguments, and close it."
        )
        return CallResult(None, {"role": "tool", "content": text}, is_error=True)

    async def _run_call(self, call: ToolCall) -> CallResult:
        name = call["function"]["name"]
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            tool_names = ", ".join(tool.name for tool in self.tools) or "none"
            result = error_tool_result(f"there is no tool {name!r}. The tools are: {tool_names}")
        else:
            result = checked_result(await self._run(tool, call), tool)
        content = shorten(whole_characters(result.content), self.max_result_chars)
        message: Message = {"role": "tool", "content": content, "name": name}
        call_id = call.get("id")
        if call_id:
            message["tool_call_id"] = call_id
        return CallResult(
            tool.name if tool else None, message, result.error, result.stop, result.metrics
        )

    async def _run(self, tool: Tool, call: ToolCall) -> ToolResult:
        timeout = asyncio.timeout(self.timeout_seconds)
        try:
            arguments = read_arguments(call["function"]["arguments"])
            async with timeout:
                with exits_as_errors():
                    return await tool.run(ToolInput(arguments, call.get("id")))
        except Exception as error:
            if timeout.expired():
                return error_tool_result(
                    f"{tool.name} returned no result within {self.timeout_seconds:g} seconds"
                )
            error_type = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            return error_tool_result(f"{tool.name}: {error_type}{error}")


def checked_result(result: Any, tool: Tool) -> ToolResult:
    """Return a tool's `result`. Raises UserError if it is not a ToolResult with text."""
    if not isinstance(result, ToolResult):
        raise UserError(
            f"the tool {tool.name} returned a {type(result).__name__}; its run must return a "
            "ToolResult"
        )
    if not isinstance(result.content, str):
        raise UserError(
            f"the tool {tool.name} returned ToolResult({result.content!r}); its content must be "
            "text"
        )
    return result


def read_arguments(arguments: Any) -> dict[str, Any]:
    """Parse the arguments of a call, the text of a JSON object. For any other text, raise a
    UserError that is written for the model.
    """
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise UserError(f"the arguments are not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError("the arguments are not a JSON object, such as {}")
    return value


def shorten(text: str, max_chars: int) -> str:
    """Return `text` with at most `max_chars` of its characters. If the middle is cut out, a line
    in its place says how much.
    """
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 2, max_chars // 2
    return (
        f"{text[:head]}\n[... {len(text) - max_chars} of {len(text)} characters left out "
        f"...]\n{text[len(text) - tail :]}"
    )
