"""The node of a conversation: data for programs, and the HTML elements of a page.

The data is {"type": "conversation", "messages": [{"role", "content", ...}]}. Content is a string if
all parts of a message are text; otherwise, such as with thinking, it is a list of parts. Messages
are copied when they are logged, because environments keep appending to their lists. The HTML
elements are made only when a page is written.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planish.logtree.nodes import Node, details_node, plain

CONVERSATION = "conversation"


def conversation_data(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data for programs: all keys of all messages as plain JSON."""
    return {"type": CONVERSATION, "messages": [_message(message) for message in messages]}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: plain(value) for key, value in message.items() if value is not None}
    if isinstance(known.get("content"), list):
        known["content"] = [_without_image_data(part) for part in known["content"]]
    return {**known, "role": str(known.get("role", "")), "content": _content(known.get("content"))}


def _without_image_data(part: Any) -> Any:
    """Return a part with the length of an image's data URL in the place of the data URL."""
    image = part.get("image") if isinstance(part, dict) else None
    if not isinstance(image, str) or not image.startswith("data:"):
        return part
    return {**part, "image": f"<data URL of {len(image):,} characters>"}


def _content(content: Any) -> str | list[Any]:
    if isinstance(content, list):
        texts = [
            part.get("text")
            for part in content
            if isinstance(part, dict) and part.get("type") == "text"
        ]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        return "".join(map(str, texts)) if whole else content
    return "" if content is None else str(content)


def conversation_node(messages: Sequence[Mapping[str, Any]]) -> Node:
    """Return the node that logs the messages."""
    return Node("div", {"class": "lt-conversation"}, data=conversation_data(messages))


def message_nodes(data: Mapping[str, Any]) -> list[Node]:
    """Return the HTML elements of a conversation's data, one per message."""
    return [_message_node(message) for message in data["messages"]]


def _message_node(message: Mapping[str, Any]) -> Node:
    kind = re.sub(r"[^a-z0-9_-]", "-", message["role"].lower())
    of = [message[key] for key in ("name", "tool_call_id") if message.get(key)]
    title = " · ".join(map(str, (message["role"], *of)))
    content = message["content"]
    thinking = {"type": "thinking", "thinking": message.get("reasoning_content")}
    parts = [
        *([thinking] if thinking["thinking"] else []),
        *([{"type": "text", "text": content}] if isinstance(content, str) else content),
        *({"type": "tool_call", **call} for call in _mappings(message, "tool_calls")),
        *(
            {"type": "unparsed_tool_call", **call}
            for call in _mappings(message, "unparsed_tool_calls")
        ),
    ]
    body = Node("div", {"class": "lt-message-content"}, [_part(part) for part in parts])
    role = Node("div", {"class": "lt-message-role"}, [title])
    return Node("div", {"class": f"lt-message lt-message-{kind}"}, [role, body])


def _mappings(message: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return [item for item in message.get(key) or [] if isinstance(item, Mapping)]


def _part(part: Any) -> Node:
    kind = part.get("type") if isinstance(part, Mapping) else None
    draw = _PARTS.get(kind) if isinstance(kind, str) else None
    if draw is None:  # an image, or a kind that this page does not know: shown as it is
        return Node("pre", {"class": "lt-other"}, [json.dumps(part, indent=1, ensure_ascii=False)])
    return draw(part)


def _text(part: Mapping[str, Any]) -> Node:
    return Node("div", {"class": "lt-text", "dir": "auto"}, [str(part.get("text") or "")])


def _thinking(part: Mapping[str, Any]) -> Node:
    body = Node("div", {"class": "lt-text", "dir": "auto"}, [str(part.get("thinking") or "")])
    return details_node("Thinking", body, css_class="lt-thinking", open="")


def _call(part: Mapping[str, Any]) -> Node:
    call = part.get("tool_call", part)
    function = call.get("function") if isinstance(call, Mapping) else None
    called = function if isinstance(function, Mapping) else part
    arguments = called.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, indent=1, ensure_ascii=False)
    name = Node("span", {"class": "lt-tool-name"}, [str(called.get("name", "tool"))])
    return Node("div", {"class": "lt-tool-call"}, [name, Node("pre", {"dir": "auto"}, [arguments])])


def _unparsed_call(part: Mapping[str, Any]) -> Node:
    error = Node("div", {"class": "lt-error"}, [f"not a tool call: {part.get('error', '')}"])
    raw = Node("pre", {"dir": "auto"}, [str(part.get("raw_text", ""))])
    return Node("div", {"class": "lt-tool-call"}, [error, raw])


_PARTS: dict[str, Callable[[Mapping[str, Any]], Node]] = {
    "text": _text,
    "thinking": _thinking,
    "tool_call": _call,
    "unparsed_tool_call": _unparsed_call,
}
