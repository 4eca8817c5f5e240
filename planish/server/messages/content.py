"""Reads the content blocks of messages. Errors name a block as Anthropic's API does, for example
`messages.2.content.0`.

The signature of a thinking block says how to get its reasoning. If the client asked not to see the
reasoning, the signature contains it. Otherwise the block's text is the reasoning.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from planish.server.http.openai_errors import UnsupportedParameterError, WrongParameterError
from planish.server.messages.requests import ToolParam
from planish.server.openai.chat_prompts import image_part
from planish.server.openai.requests import Function, Tool
from planish.wire.json_pieces import JsonValue

Block = Mapping[str, Any]

SHOWN_SIGNATURE = "planish"
"""The signature of a thinking block whose text is the reasoning."""
_HIDDEN_PREFIX = "planish:"
_MAX_HIDDEN_RATIO = 100
"""Limit for the size of a decoded signature, as a multiple of the size of the signature."""
_KEYS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("source",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "tool_reference": ("tool_name",),
}
"""The keys of each type of block, besides `type` and `cache_control`."""
_REMEDIES = {
    "image": "an image belongs to a user message or to a tool result; remove it",
    "document": "the models here read text and images; give the document as a text block",
    "search_result": "give the result as a text block",
    "container_upload": "this server has no files; give the text",
}


def block_type(block: Block, where: str, allowed: Sequence[str]) -> str:
    """Return the type of a block. Raise an error that names the block if its type is not one of
    `allowed`, or if it has unknown keys.
    """
    kind = str(block.get("type"))
    if kind not in allowed:
        shown = kind[:80]
        if shown in _REMEDIES:
            raise UnsupportedParameterError(f"{where}.type={shown!r}", _REMEDIES[shown])
        raise WrongParameterError(
            "messages", f"{where}.type={shown!r}: give one of {', '.join(allowed)}"
        )
    for key, value in block.items():
        is_known = key in ("type", "cache_control") or key in _KEYS[kind]
        # Blocks of answers have further keys, which are null or empty, and the caller of a tool.
        if not is_known and value and not (key == "caller" and value == {"type": "direct"}):
            raise UnsupportedParameterError(f"{where}.{str(key)[:80]}", "leave it out")
    return kind


def string_of(block: Block, key: str, where: str) -> str:
    """Return a string of a block."""
    value = block.get(key)
    if not isinstance(value, str):
        raise WrongParameterError("messages", f"{where}.{key}: give a string")
    return value


def _image_of(block: Block, where: str) -> dict[str, Any]:
    """Return the image of a block as a part of a message: a source of type base64, or of type url
    with a data URL.
    """
    source: JsonValue = block.get("source")
    fields: Block = source if isinstance(source, Mapping) else {}
    match fields.get("type"):
        case "base64":
            media_type = string_of(fields, "media_type", f"{where}.source")
            url = f"data:{media_type};base64,{string_of(fields, 'data', f'{where}.source')}"
        case "url":
            url = string_of(fields, "url", f"{where}.source")
        case _:
            raise WrongParameterError(
                "messages",
                f"{where}.source: give type base64 with media_type image/png or image/jpeg, and data",
            )
    return image_part(url, where)


def text_of_blocks(content: str | Sequence[Block], where: str) -> str:
    """Return the text of content that may have text blocks only."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, block in enumerate(content):
        place = f"{where}.{number}"
        block_type(block, place, ("text",))
        texts.append(string_of(block, "text", place))
    return "".join(texts)


def hidden_signature(thinking: str) -> str:
    """Return the signature of a thinking block that contains its reasoning."""
    return _HIDDEN_PREFIX + base64.b64encode(zlib.compress(thinking.encode())).decode()


def thinking_of(block: Block, where: str) -> str:
    """Return the reasoning of a block of type thinking or redacted_thinking."""
    if block["type"] == "redacted_thinking":
        sealed = string_of(block, "data", where)
    else:
        thinking = string_of(block, "thinking", where)
        if thinking:
            return thinking
        sealed = string_of(block, "signature", where)
    if sealed == SHOWN_SIGNATURE:
        return ""
    try:
        if not sealed.startswith(_HIDDEN_PREFIX):
            raise ValueError
        data = base64.b64decode(sealed.removeprefix(_HIDDEN_PREFIX), validate=True)
        decompressor = zlib.decompressobj()
        text = decompressor.decompress(data, _MAX_HIDDEN_RATIO * len(data))
        if not decompressor.eof:
            raise ValueError
        return text.decode()
    except (ValueError, zlib.error):
        raise WrongParameterError(
            "messages",
            f"{where}: Invalid `signature` in `{block['type']}` block: this server did not write "
            "it, so the reasoning cannot be read; remove the block",
        ) from None


def joined(parts: Sequence[dict[str, Any]]) -> str | Sequence[dict[str, Any]]:
    """Return the content of a message with these parts: their text, unless there is an image."""
    return (
        parts
        if any(part["type"] == "image" for part in parts)
        else "".join(part["text"] for part in parts)
    )


def part_of(block: Block, where: str) -> dict[str, Any]:
    """Return the part of a message for a block of type text or image."""
    return (
        _image_of(block, where)
        if block["type"] == "image"
        else _text_part(string_of(block, "text", where))
    )


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def result_content(
    block: Block, where: str, tools: Mapping[str, Tool]
) -> str | Sequence[dict[str, Any]]:
    """Return the content of a tool_result block. `tools` are the tools that a tool_reference may
    name. The chat formats have no field for an error, so the text says it.
    """
    content: JsonValue = block.get("content") or ""
    if isinstance(content, str):
        parts = [_text_part(content)]
    elif isinstance(content, list):
        parts = _result_parts(content, f"{where}.content", tools)
    else:
        raise WrongParameterError("messages", f"{where}.content: give a string or a list of blocks")
    is_error = block.get("is_error") or False
    if not isinstance(is_error, bool):
        raise WrongParameterError("messages", f"{where}.is_error: give true or false")
    return joined([_text_part("Error: "), *parts] if is_error else parts)


def _result_parts(
    content: Sequence[JsonValue], where: str, tools: Mapping[str, Tool]
) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    specifications: list[str] = []
    for number, part in enumerate(content):
        place = f"{where}.{number}"
        if not isinstance(part, dict):
            raise WrongParameterError("messages", f"{place}: give an object with a type")
        if block_type(part, place, ("text", "image", "tool_reference")) != "tool_reference":
            parts.append(part_of(part, place))
            continue
        name = string_of(part, "tool_name", place)
        if name not in tools:
            raise WrongParameterError(
                "messages", f"{place}.tool_name={name[:80]!r} is not in tools; add the tool"
            )
        specifications.append(_specification(tools[name]))
    if specifications:
        parts.append(_text_part("\n".join(["<functions>", *specifications, "</functions>"])))
    return parts


def referenced_tools(block: Block) -> list[str]:
    """Return the names that the tool_reference blocks of a tool_result name."""
    content: JsonValue = block.get("content")
    parts: list[JsonValue] = content if isinstance(content, list) else []
    return [
        str(part.get("tool_name"))
        for part in parts
        if isinstance(part, dict) and part.get("type") == "tool_reference"
    ]


def _specification(tool: Tool) -> str:
    function = tool.function.model_dump(exclude={"strict"}, exclude_none=True)
    return f"<function>{json.dumps(function, ensure_ascii=False)}</function>"


def chat_tool(tool: ToolParam) -> Tool:
    """Return a tool in the form of the chat endpoint."""
    examples: dict[str, Any] = (
        {"input_examples": tool.input_examples} if tool.input_examples else {}
    )
    # Anthropic's names may be longer than OpenAI's, so this type does not check them again.
    function = Function.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
        **examples,
    )
    return Tool.model_construct(type="function", function=function)
