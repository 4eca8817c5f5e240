"""Convert messages of the verifiers library to those of planish's renderers, and the policy's
answers back.

Messages of verifiers are pydantic objects with the fields of OpenAI's API. This module only reads
their attributes, so it does not import verifiers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from planish.errors import UnsupportedError
from planish.renderers import Message, ToolSpec, get_text_content
from planish.renderers.chatml import with_thought
from planish.renderers.messages import get_thinking_content


def read_message(source: Any) -> Message:
    """Convert a message of verifiers. Raise UnsupportedError for content other than text and images,
    and for an image of the assistant.
    """
    role = "user" if source.role == "text" else source.role
    content = _content(source.content)
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        calls = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in getattr(source, "tool_calls", None) or ()
        ]
        reasoning = getattr(source, "reasoning_content", None)
        if not isinstance(content, str):
            raise UnsupportedError("a message of the assistant has an image, which no model writes")
        return _assistant_message(content, reasoning, calls)
    if role == "tool":
        message["tool_call_id"] = source.tool_call_id
    return cast(Message, message)


def read_tool(tool: Any) -> ToolSpec:
    """Convert a tool of verifiers."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }


def answer_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a parsed answer of the policy to the fields of verifiers' assistant message.

    Tool calls that cannot be parsed are appended to the text, so that the environment sees them.
    """
    unparsed = [call["raw_text"] for call in message.get("unparsed_tool_calls", ())]
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    return {
        "content": "\n".join(filter(None, [get_text_content(message), *unparsed])),
        "reasoning_content": get_thinking_content(message) or None,
        "tool_calls": calls or None,
    }


def read_answer(fields: Mapping[str, Any]) -> Message:
    """Return the message that `read_message` reads from the fields of `answer_fields`."""
    return _assistant_message(
        fields["content"], fields["reasoning_content"], fields["tool_calls"] or ()
    )


def _assistant_message(
    text: str, reasoning: str | None, calls: Sequence[Mapping[str, Any]]
) -> Message:
    message = with_thought({"role": "assistant", "content": text}, reasoning)
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return cast(Message, message)


def check_sampling(arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if an environment sets sampling arguments. The options of the run
    determine temperature, length and seeds.
    """
    options = {
        name: value
        for name, value in arguments.items()
        if value not in (None, {}, []) and (name, value) != ("n", 1)
    }
    if options:
        raise UnsupportedError(
            f"the environment sets sampling arguments, {json.dumps(options, default=str)}; give "
            "them to the run, and leave them out of the environment"
        )


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return the text of a content; if it has images, a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for part in content:
        fields = part if isinstance(part, Mapping) else part.model_dump()
        kind = fields.get("type")
        if kind not in ("text", "image_url"):
            raise UnsupportedError(
                f"a message has content of type {kind!r}; models of planish read text and images"
            )
        value = fields["text"] if kind == "text" else fields["image_url"]["url"]
        kind = "text" if kind == "text" else "image"
        parts.append({"type": kind, kind: value})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)
