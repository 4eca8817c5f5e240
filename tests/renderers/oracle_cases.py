"""Conversations for comparing renderers with their oracles, and the family of each renderer."""

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "The first."},
                "b": {"type": "string", "enum": ["one", "two"]},
                "c": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            },
            "required": ["a", "b"],
        },
    },
    {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
]
CALLS = [
    {"name": "add", "arguments": {"a": 1, "b": "two", "c": [1, 2]}, "id": "functions.add:0"},
    {"name": "now", "arguments": {}, "id": "functions.now:1"},
]
QUESTION = "What is 6 times 7?"
UNICODE = "東京 🙂 Größe\n\n\n  indented: naïve"

Conversation = list[dict[str, Any]]
"""Messages with the keys role, content and, if needed, thinking, calls, name and call_id."""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> Any:
    return {
        "role": "assistant",
        "content": content,
        **({"thinking": thinking} if thinking else {}),
        **({"calls": calls} if calls else {}),
    }


def tool(content: str, call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "content": content, "name": call["name"], "call_id": call["id"]}


SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: dict[str, Conversation] = {
    "question": [user(QUESTION)],
    "system": [SYSTEM, user(UNICODE)],
    "empty system": [{"role": "system", "content": ""}, user(QUESTION)],
    "answer": [SYSTEM, user(QUESTION), assistant("It is 42.")],
    "reasoned answer": [user(QUESTION), assistant("It is 42.", "6 * 7\n\nis 42")],
    "second question": [user(QUESTION), assistant("It is 42."), user(UNICODE)],
    "second question after reasoning": [
        SYSTEM,
        user(QUESTION),
        assistant("It is 42.", "6 * 7 is 42"),
        user(UNICODE),
    ],
    "second answer": [
        user(QUESTION),
        assistant("It is 42.", "6 * 7 is 42"),
        user(UNICODE),
        assistant("Yes.", "Hm.\nYes."),
    ],
    "second answer without reasoning": [
        user(QUESTION),
        assistant("It is 42."),
        user(UNICODE),
        assistant("Yes."),
    ],
}
TOOL_CONVERSATIONS: dict[str, Conversation] = {
    "tools": [user("Add.")],
    "tools and system": [SYSTEM, user("Add.")],
    "tools and empty system": [{"role": "system", "content": ""}, user("Add.")],
    "call": [user("Add."), assistant("", calls=CALLS[:1])],
    "call with text": [user("Add."), assistant("One moment.", calls=CALLS[:1])],
    "reasoned call": [user("Add."), assistant("One moment.", "I add.", calls=CALLS[:1])],
    "result": [user("Add."), assistant("", calls=CALLS[:1]), tool("13", CALLS[0])],
    "result after reasoning": [
        user("Add."),
        assistant("Wait.", "I add.", calls=CALLS[:1]),
        tool("13", CALLS[0]),
    ],
    "answer to results": [
        user("Add."),
        assistant("Wait.", calls=CALLS),
        tool("13", CALLS[0]),
        tool("noon", CALLS[1]),
        assistant("13, at noon."),
    ],
    "reasoned answer to results": [
        user("Add."),
        assistant("", "Both.", calls=CALLS),
        tool("13", CALLS[0]),
        tool("noon", CALLS[1]),
        assistant("13, at noon.", "Done."),
    ],
    "question after results": [
        user("Add."),
        assistant("Wait.", "Both.", calls=CALLS),
        tool("13", CALLS[0]),
        tool("noon", CALLS[1]),
        assistant("13, at noon.", "Done."),
        user("Thanks."),
    ],
}

FAMILIES = {
    "qwen3_5": "qwen",
    "qwen3_8": "qwen",
    "nemotron3": "qwen",
    "deepseekv3": "deepseek",
    "kimi": "kimi",
    "gpt_oss": "gpt_oss",
    "mistral": "mistral",
}
"""The beginning of a renderer's name -> the family of its tokenizer in `family_tokenizer`."""


def is_of_a_family(renderer: str) -> bool:
    """Return whether `renderer` is of one of FAMILIES."""
    return renderer.startswith(tuple(FAMILIES))


def family_of(renderer: str) -> str:
    """Return the family of a renderer's tokenizer."""
    return next(family for start, family in FAMILIES.items() if renderer.startswith(start))


def planish_messages(conversation: Conversation) -> Conversation:
    """Return a conversation as planish and the cookbook take it, apart from the calls' types."""
    messages = []
    for message in conversation:
        made = {key: message[key] for key in ("role", "content", "name") if key in message}
        if "thinking" in message:
            text = [{"type": "text", "text": made["content"]}] if made["content"] else []
            made["content"] = [{"type": "thinking", "thinking": message["thinking"]}, *text]
        if "call_id" in message:
            made["tool_call_id"] = message["call_id"]
        if "calls" in message:
            made["tool_calls"] = [
                {
                    "type": "function",
                    "id": call["id"],
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in message["calls"]
            ]
        messages.append(made)
    return messages


def template_messages(conversation: Conversation) -> Conversation:
    """Return a conversation as chat templates take it: reasoning is a key of its own."""
    messages = planish_messages(conversation)
    for message, given in zip(messages, conversation, strict=True):
        message["content"] = given["content"]
        if "thinking" in given:
            message["reasoning_content"] = given["thinking"]
    return messages


def with_tools(renderer: Any, messages: Conversation, tools: list[Any] = TOOLS) -> list[Any]:
    """Return the messages with the renderer's messages that offer `tools` at the start."""
    has_system = messages[0]["role"] == "system"
    system = messages[0]["content"] if has_system else ""
    prefix = renderer.create_conversation_prefix_with_tools(tools, system)
    if has_system and not system and "tools" in prefix[0]:
        # With "", the function says that there is no system message. The cookbook, whose messages
        # contain the tools as text, cannot express an empty one.
        prefix[0]["content"] = ""
    return [*prefix, *messages[has_system:]]
