"""Messages and tools of a chat request, as planish's renderers take them. What a format cannot
express, the renderer refuses by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planish.errors import UserError
from planish.renderers import Renderer
from planish.server.openai_errors import UnsupportedParameterError, WrongParameterError
from planish.server.openai_options import optional
from planish.types import ModelInput
from planish.wire.fields import Fields

# What clients send along when they give an answer back.
_OF_ANSWERS = ("refusal", "audio", "annotations", "function_call")


def build_prompt(fields: Fields, renderer: Renderer) -> ModelInput:
    """The prompt for `messages` and `tools`. WrongParameterError names what cannot be rendered."""
    messages = [
        _message(one, f"messages[{index}]") for index, one in enumerate(_list(fields, "messages"))
    ]
    if not messages:
        raise WrongParameterError("messages", "messages is empty; give at least one")
    tools = _tools(fields)
    try:
        if tools:
            has_system = messages[0].get("role") == "system"
            system = messages.pop(0).get("content") if has_system else ""
            messages = [
                *renderer.create_conversation_prefix_with_tools(tools, _text(system)),
                *messages,
            ]
        return renderer.build_generation_prompt(messages)
    except ValueError as error:
        raise WrongParameterError(
            "tools" if tools and "tool" in str(error) else "messages", str(error)
        ) from None


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise WrongParameterError(
            "messages", f"{where} is no object; give {{'role': ..., 'content': ...}}"
        )
    message = {
        key: value
        for key, value in given.items()
        if not (key in _OF_ANSWERS and not value) and value is not None
    }
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("role") != "tool":
        message.pop("name", None)  # of a participant; no format here writes it
    thought = message.pop("reasoning_content", None)
    if thought:
        message["content"] = [
            {"type": "thinking", "thinking": thought},
            *_parts(message.get("content", "")),
        ]
    return message


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools that are offered; none if `tool_choice` says so."""
    choice = fields.raw("tool_choice")
    tools = [_tool(one, f"tools[{index}]") for index, one in enumerate(_list(fields, "tools"))]
    if choice not in (None, "auto", "none"):
        raise UnsupportedParameterError(
            "tool_choice", "the model decides by itself; give 'auto' or 'none'"
        )
    return [] if choice == "none" else tools


def _tool(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or given.get("type") != "function":
        raise WrongParameterError(
            "tools", f"{where}: give {{'type': 'function', 'function': {{'name': ...}}}}"
        )
    if function.get("strict"):
        raise UnsupportedParameterError(
            "strict", f"calls are not constrained; leave it out of {where}"
        )
    return {key: value for key, value in function.items() if key != "strict"}


def _list(fields: Fields, name: str) -> list[Any]:
    return optional(fields, fields.array, name, [])


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        raise UserError("the system message before tools must be text")
    return "".join(str(part.get("text")) for part in content)
