"""Running the tool calls of one message.

Nothing that a model writes and nothing that a tool does ends an episode by accident: an unknown
name, wrong arguments, an exception, a tool that takes too long, all become the text of a tool
message, from which the model can go on. A result that is too long is cut in the middle, and the cut
says so.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.errors import UserError
from planish.processes.interruption import only_errors
from planish.renderers import Message, ToolCall, UnparsedToolCall
from planish.renderers.codec import whole_characters
from planish.rl.limits import TOOL_EXECUTIONS, ToolExecution
from planish.rl.rollout.group_rollout import first_of_group
from planish.rl.types import Metrics
from planish.tool_use.tools import Tool, ToolInput, ToolResult, error_tool_result


@dataclass(frozen=True)
class CallResult:
    """The answer to one call."""

    tool: str | None
    """Name of the tool that was called; None if there is no such tool, or nobody can read which."""
    message: Message
    is_error: bool
    stop: bool = False
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class Toolbox:
    """The tools of an episode and how they are run."""

    tools: Sequence[Tool]
    execution: ToolExecution = "parallel"
    """sequential: one after the other, and none after one that stops the episode."""
    timeout_seconds: float | None = 60.0
    """Of one call."""
    max_result_chars: int = 16384

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"tools: there are two of the name {', '.join(twice)}; rename one")
        if self.execution not in TOOL_EXECUTIONS:
            raise UserError(
                f"tool_execution={self.execution!r}: give {' or '.join(TOOL_EXECUTIONS)}"
            )
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise UserError(
                f"tool_timeout_seconds={self.timeout_seconds!r}: give seconds above 0, or None for no limit"
            )
        if self.max_result_chars < 100:
            raise UserError(f"max_result_chars={self.max_result_chars!r}: give at least 100")

    async def run(self, calls: Sequence[ToolCall]) -> list[CallResult]:
        """Answers in the order of the calls; fewer than calls where one of a sequence stopped the
        episode.

        UserError names a tool that gives no ToolResult of text.
        """
        if self.execution == "parallel":
            with first_of_group():
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._answer(call)) for call in calls]
            return [task.result() for task in tasks]
        results: list[CallResult] = []
        for call in calls:
            results.append(await self._answer(call))
            if results[-1].stop:
                break
        return results

    def answer_unparsed(self, call: UnparsedToolCall) -> CallResult:
        """The answer to a call that cannot be read."""
        text = (
            f"Error: the tool call could not be read: {call['error']}. Write a JSON object with a name and arguments, and "
            "close it."
        )
        return CallResult(None, {"role": "tool", "content": text}, is_error=True)

    async def _answer(self, call: ToolCall) -> CallResult:
        name = call["function"]["name"]
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            known = ", ".join(tool.name for tool in self.tools) or "none"
            result = error_tool_result(f"there is no tool {name!r}. The tools are: {known}")
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
        clock = asyncio.timeout(self.timeout_seconds)
        try:
            arguments = read_arguments(call["function"]["arguments"])
            async with clock:
                with only_errors():
                    return await tool.run(ToolInput(arguments, call.get("id")))
        except Exception as error:
            if clock.expired():
                return error_tool_result(
                    f"{tool.name} gave no result within {self.timeout_seconds:g} seconds"
                )
            reason = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            return error_tool_result(f"{tool.name}: {reason}")


def checked_result(result: Any, tool: Tool) -> ToolResult:
    """What a tool's `run` gave; UserError if a model cannot be given it."""
    if not isinstance(result, ToolResult):
        raise UserError(
            f"the tool {tool.name} gave a {type(result).__name__}; its run is to give a ToolResult"
        )
    if not isinstance(result.content, str):
        raise UserError(
            f"the tool {tool.name} gave ToolResult({result.content!r}); its content is to be text"
        )
    return result


def read_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call, which are a JSON object's text; UserError, written for the model, if
    they are not.
    """
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise UserError(f"the arguments are not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError("the arguments are not a JSON object, such as {}")
    return value


def shorten(text: str, most: int) -> str:
    """`text` in at most `most` characters and a line that says what is left out of its middle."""
    if len(text) <= most:
        return text
    head, tail = most - most // 2, most // 2
    return f"{text[:head]}\n[... {len(text) - most} of {len(text)} characters left out ...]\n{text[len(text) - tail :]}"
