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
    """Convert a message of verifiers. Raise UnsupportedError for content other than text."""
    role = "user" if source.role == "text" else source.role
    message: dict[str, Any] = {"role": role, "content": _text(source.content)}
    if role == "assistant":
        calls = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in getattr(source, "tool_calls", None) or ()
        ]
        reasoning = getattr(source, "reasoning_content", None)
        return _assistant_message(message["content"], reasoning, calls)
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


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        fields = part if isinstance(part, Mapping) else part.model_dump()
        if fields.get("type") != "text":
            raise UnsupportedError(
                f"a message has content of type {fields.get('type')!r}; models of planish read "
                "only text"
            )
        texts.append(fields["text"])
    return "".join(texts)
