"""Read the messages and tools of a row in the forms in which people have them.

The result is what a renderer takes (planish/renderers/messages.py): messages with "role" and
"content", with reasoning as "reasoning_content", and with the tools on a first system message. A
key that is not known here stays in its message, so that the renderer rejects it by name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from planish.errors import UserError

Message = dict[str, Any]

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "developer": "system",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
"""Other names of roles: in ShareGPT and its descendants, and in OpenAI's API."""
FUNCTION_CALL = "function_call"
"""The role of a message whose text is a tool call, or a list of them, as JSON."""
SHAREGPT_ROLES = ("user", "assistant", "system", "tool", *ROLES, FUNCTION_CALL)
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
PART_KEYS: Mapping[str, Sequence[str]] = {"text": ("text",), "thinking": ("thinking",)}
"""The types of the parts of a content, with their keys beside "type"."""
IMAGE_PART_KEYS: Mapping[str, Sequence[str]] = {
    "image": ("image", "url", "path", "index"),
    "image_url": ("image_url",),
}
"""The types of parts with images in rows, with their keys beside "type"."""
MESSAGE_LIST = "a list of messages with at least one in it"
WRITTEN_MESSAGES = re.compile(r"""\s*\[?\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
"""Matches the beginning of messages that were written as text: by JSON, or by Python's `str`, as the
CSV writers of pandas and `datasets` do.
"""


class Conversation(list[Message]):
    """The messages of a row, and where the row is (`location`), for error messages."""

    location: str = ""

    def __init__(self, messages: Sequence[Message] = (), location: str = "") -> None:
        super().__init__(messages)
        self.location = location


class PlainText(str):
    """The text of a row without messages. It is trained as it is, without a chat format."""

    location: str = ""


def location_of(messages: object) -> str:
    """Return where the row of a Conversation or PlainText is; "" for messages of no row."""
    return messages.location if isinstance(messages, Conversation | PlainText) else ""


def read_message_list(value: Any, where: str) -> list[Message]:
    """Return a list of messages, which may be given as JSON text."""
    if isinstance(value, str):
        value = _parse(value, where, MESSAGE_LIST)
    return _read_list(value, where, MESSAGE_LIST)


def read_text_or_messages(value: Any, role: str, where: str) -> list[Message]:
    """Return a text as one message of `role`, one message as a list, and a list as it is."""
    if isinstance(value, str):
        if WRITTEN_MESSAGES.match(value):
            raise UserError(
                f"{where} is a text that looks like messages: {value!r:.80}; give a list of messages "
                "(in a .csv file, as JSON), or one message with this text as its content"
            )
        return [{"role": role, "content": value}]
    values = [value] if isinstance(value, Mapping) else value
    return _read_list(values, where, f"a text, or {MESSAGE_LIST}")


def _read_list(value: Any, where: str, expected: str) -> list[Message]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
        raise UserError(f"{where}: give {expected}")
    return [_read_message(message, f"{where}[{index}]") for index, message in enumerate(value)]


def _read_message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: holds a {type(value).__name__}; each message is an object")
    # In a table, every row has every key; a key that a message lacks is null.
    message = {key: field for key, field in value.items() if field is not None or key == "content"}
    if "from" in message or "value" in message:
        message = _from_sharegpt(message, where)
    role = message.get("role")
    if role == FUNCTION_CALL:
        message = _from_function_call(message, where)
    elif isinstance(role, str):
        message["role"] = ROLES.get(role, role)
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        message["tool_calls"] = _parse(calls, f"{where}, tool_calls", "a list")
    check_nested_keys(message, where, {**PART_KEYS, **IMAGE_PART_KEYS})
    _check_arguments(message, where)
    _join_thinking(message, where)
    if ends_unbegun_reasoning(message):
        raise UserError(
            f"{where} has </think> without <think> before it; write <think> at the start of the "
            'content, or give the reasoning as "reasoning_content"'
        )
    _read_weight(message, where)
    return message


def _from_sharegpt(message: Message, where: str) -> Message:
    role, text = message.get("from"), message.get("value")
    if role not in SHAREGPT_ROLES or not isinstance(text, str):
        raise UserError(
            f'{where} has {message!r:.200}; give "from" (one of {", ".join(SHAREGPT_ROLES)}) and '
            '"value"'
        )
    both = [key for key in ("role", "content") if message.get(key) is not None]
    if both:
        raise UserError(f'{where} has "from" and "value", and {both} too; remove one of the two')
    others = {key: field for key, field in message.items() if key not in ("from", "value")}
    return {**others, "role": role, "content": text}


def _from_function_call(message: Message, where: str) -> Message:
    """Return the assistant message of a message whose content is a tool call, or a list of tool
    calls, as JSON text.
    """
    calls = _parse(message.get("content") or "", where, "a tool call as JSON")
    tool_calls = [
        call
        if isinstance(call, Mapping) and "function" in call
        else {"type": "function", "function": call}
        for call in (calls if isinstance(calls, list) else [calls])
    ]
    return {**message, "role": "assistant", "content": "", "tool_calls": tool_calls}


def check_nested_keys(
    message: Mapping[str, Any], where: str, part_keys: Mapping[str, Sequence[str]] = PART_KEYS
) -> None:
    """Raise UserError for a part whose type is not in `part_keys`, and for a key in a part or a tool
    call that no renderer writes. `where` names the message. A key that is null counts as absent.
    """
    for number, part in enumerate(list_of(message, "content")):
        part_where = f"{where}, content[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in IMAGE_PART_KEYS and kind not in part_keys:
            raise UserError(
                f"{part_where} is an image (type {kind!r}), and the model or its renderer reads only "
                "text; images need the renderer of a model with images (docs/reference/models.md)"
            )
        if kind not in part_keys:
            raise UserError(
                f"{part_where} is of type {kind!r}; give {{'type': 'text', 'text': ...}} or "
                "{'type': 'thinking', 'thinking': ...}"
            )
        _check_keys(part, ("type", *part_keys[str(kind)]), part_where)
    for number, call in enumerate(list_of(message, "tool_calls")):
        call_where = f"{where}, tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if function is None:
            _check_keys(call, ("type", "id", "name", "arguments"), call_where)
        else:
            _check_keys(call, ("type", "id", "function"), call_where)
            _check_keys(function, ("name", "arguments"), call_where)
    for number, call in enumerate(list_of(message, "unparsed_tool_calls")):
        _check_keys(call, ("raw_text", "error"), f"{where}, unparsed_tool_calls[{number}]")


def list_of(message: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return the list under a key; () if there is none, or if the value is a text."""
    value = message.get(key)
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _check_keys(value: Any, known: Sequence[Any], where: str) -> None:
    """Raise UserError for a key that is not in `known` and not null. A value that is no object is
    left to the renderer.
    """
    fields = value if isinstance(value, Mapping) else {}
    unknown = [name for name, field in fields.items() if field is not None and name not in known]
    if unknown:
        raise UserError(f"{where} has {unknown}, which planish does not use; remove it")


def _check_arguments(message: Message, where: str) -> None:
    """Raise UserError for the arguments of a tool call that are a text and no JSON object. A format
    would write them as they are, so the model would learn a call that nobody can read.
    """
    for number, call in enumerate(list_of(message, "tool_calls")):
        function = call.get("function") or call if isinstance(call, Mapping) else {}
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str) and arguments:
            call_where = f"{where}, tool_calls[{number}]"
            if not isinstance(_parse(arguments, call_where, "arguments as JSON"), dict):
                raise UserError(
                    f"{call_where}: the arguments {arguments!r:.200} are no JSON object; give an "
                    "object, or its JSON text. A text that was encoded twice is not one"
                )


def _join_thinking(message: Message, where: str) -> None:
    """Move the reasoning of a message to the key "reasoning_content"."""
    given = {key: message.pop(key) for key in THINKING_KEYS if key in message}
    if len({json.dumps(thinking) for thinking in given.values()}) > 1:
        raise UserError(f"{where} has different texts in {', '.join(given)}; keep one of them")
    if given:
        message["reasoning_content"] = next(iter(given.values()))


def ends_unbegun_reasoning(message: Mapping[str, Any]) -> bool:
    """Return whether an answer has </think> without <think> before it.

    Such answers are samples of models whose prompt ends with <think>. A renderer would write an
    empty block before the reasoning.
    """
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return False
    before, end, _ = content.partition("</think>")
    return bool(end) and "<think>" not in before


def _read_weight(message: Message, where: str) -> None:
    """Check the key "weight". A weight of 1 changes nothing and is removed."""
    weight = message.pop("weight", None)
    if weight is None:
        return
    if isinstance(weight, bool) or weight not in (0, 1):
        raise UserError(f'{where} has "weight": {weight!r}; a message is learned (1) or not (0)')
    if weight == 1 and message.get("role") != "assistant":
        raise UserError(
            f'{where} has "weight": 1 and is no assistant message; to train on it, give '
            '"trainable" true or false on every message, and train_on_what=customized'
        )
    if weight == 0:
        message["weight"] = 0


def read_tools(value: Any, where: str) -> list[Any]:
    """Return the tools of a row: a list of declarations, or its JSON text."""
    tools = _parse(value, where, "a list of tools") if isinstance(value, str) else value
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise UserError(f"{where}: give a list of tools, or its JSON text")
    return [
        _parse(tool, f"{where}[{index}]", "a tool") if isinstance(tool, str) else tool
        for index, tool in enumerate(tools)
    ]


def with_system(messages: list[Message], system: Any, where: str) -> list[Message]:
    """Return messages that begin with the system message `system`. An empty text adds none."""
    if not isinstance(system, str):
        raise UserError(f"{where} is a {type(system).__name__}; give the system message's text")
    if not system:
        return messages
    if messages[0].get("role") != "system":
        return [{"role": "system", "content": system, **_untrained(messages)}, *messages]
    if messages[0].get("content") != system:
        raise UserError(
            f"{where} differs from the system message at the start of the messages; keep one of "
            "them"
        )
    return messages


def with_tools(messages: list[Message], tools: list[Any], where: str) -> list[Message]:
    """Return the messages with `tools` on a system message at their start, as renderers read them."""
    if not tools:
        return messages
    first = messages[0]
    if first.get("role") != "system":
        # With the content None, the renderer writes the default system message of its format. This
        # text is not in the row, so it is not learned.
        return [
            {
                "role": "system",
                "content": None,
                "tools": tools,
                "weight": 0,
                **_untrained(messages),
            },
            *messages,
        ]
    if first.get("tools") not in (None, tools):
        raise UserError(f"{where} differs from the tools of the first message; keep one of them")
    return [{**first, "tools": tools}, *messages[1:]]


def _untrained(messages: Sequence[Message]) -> Message:
    """Return the key "trainable" for a new message if the other messages have it."""
    return {"trainable": False} if any("trainable" in message for message in messages) else {}


def _parse(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: give {expected}; the text is no JSON ({error})") from error
