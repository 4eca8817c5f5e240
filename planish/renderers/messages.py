"""Messages of a conversation: the dictionaries that users write, and the checked form that formats
read.

`read_messages` turns a conversation into `CheckedMessage`s once, and later code needs no further
checks. A message that a format cannot express raises ValueError, instead of being rendered
incompletely.

The text of a message is not interpreted, with one exception that the chat templates share. If an
assistant's string begins with a complete `<think>...</think>` block, formats with thinking read the
block as a thinking part. Content given as a list of parts is never read in this way.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from planish.datasets.messages import check_nested_keys
from planish.renderers.forms import THINK_BLOCK_FORM, CallForm, ThoughtForm


class TextPart(TypedDict):
    """A part of a message's content that is ordinary text."""

    type: Literal["text"]
    text: str


class ThinkingPart(TypedDict):
    """A part of an assistant message's content that is reasoning."""

    type: Literal["thinking"]
    thinking: str


class ImagePart(TypedDict):
    """An image in the content of a message. Renderers of models without images reject it."""

    type: Literal["image"]
    image: Any
    """The bytes of a PNG or JPEG file, the pathlib.Path of such a file, a PIL image, an ImageChunk or
    a data URL.
    """


ContentPart = TextPart | ThinkingPart | ImagePart
Content = str | list[ContentPart]


class FunctionCall(TypedDict):
    """The name and the arguments of a tool call."""

    name: str
    arguments: str
    """A JSON object as text. A mapping is accepted too, and written as JSON. Renderers that write
    calls as JSON accept any text, for a call that was cut off.
    """


class ToolCall(TypedDict):
    """A tool call of an assistant message, in OpenAI's form."""

    type: NotRequired[Literal["function"]]
    id: NotRequired[str | None]
    function: FunctionCall


class UnparsedToolCall(TypedDict):
    """A tool call that the model wrote and that cannot be parsed."""

    raw_text: str
    """The text of the call as the model wrote it, including its tags."""
    error: str


class ToolSpec(TypedDict):
    """A tool that the model may call."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]
    """A JSON schema."""


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: Content
    tool_calls: NotRequired[list[ToolCall]]
    unparsed_tool_calls: NotRequired[list[UnparsedToolCall]]
    reasoning_content: NotRequired[str]
    """The thinking part as a separate key, as in some datasets."""
    weight: NotRequired[Literal[0, 1]]
    """0: nothing of the message is learned, whatever TrainOnWhat says (but see `trainable`)."""
    trainable: NotRequired[bool]
    """Required on every message with TrainOnWhat.CUSTOMIZED, rejected otherwise."""
    tools: NotRequired[list[ToolSpec]]
    """On a first system message: the tools it offers (see
    Renderer.create_conversation_prefix_with_tools). Its content may be None: then the conversation
    has no system message of its own, and the format writes its default one.
    """
    tool_call_id: NotRequired[str]
    """On a tool result: the id of the call that it answers (read by kimi_k2)."""
    name: NotRequired[str]
    """On a tool result: the name of the function that was called (read by gpt_oss and kimi_k2)."""


RENDERERS_WITH_TOOLS = (
    "qwen3 (Qwen3), chatml (Qwen2.5, SmolLM2), qwen3_5 (Qwen3.5, 3.6), qwen3_8 (Qwen3.8), gpt_oss, "
    "deepseekv3, kimi_k2, kimi_k25, kimi_k26, llama3, nemotron3 or smollm3"
)
"""The renderers whose formats have tools, for error messages. Their models are in parentheses, if
the name does not tell them. Variants such as `qwen3_instruct` begin with one of these names.
"""
MESSAGE_KEYS = tuple(Message.__annotations__)


@dataclass(frozen=True)
class Capabilities:
    """The features of a format, and the tokens that it requires."""

    roles: tuple[str, ...]
    thinking: bool = False
    samples_thinking: bool = False
    """Whether a sampled message may contain reasoning."""
    thought: ThoughtForm = THINK_BLOCK_FORM
    """The form of sampled reasoning."""
    calls: CallForm | None = None
    """The form of tool calls for grammars; None if the format has no tools, or no grammar."""
    has_tools: bool = False
    """Whether the format has tools although `calls` is None."""
    required: tuple[str, ...] = ()
    """Controls that the vocabulary must have as single tokens."""
    extends: bool = True
    """Whether every prompt of a conversation begins with the earlier prompts and their answers."""
    extends_in_turn: bool = True
    """Whether prompts extend each other within one user turn. Such a turn has several prompts if
    the model calls tools: one before each assistant message.
    """

    @property
    def tools(self) -> bool:
        """Whether the format has tools."""
        return self.has_tools or self.calls is not None


class Call(NamedTuple):
    """A tool call."""

    name: str
    arguments: str
    """A JSON object as text; any text if the format writes calls as JSON."""
    id: str = ""


@dataclass(frozen=True)
class CheckedMessage:
    """One message that its format can express."""

    role: str
    text: str
    thinking: str | None = None
    calls: tuple[Call, ...] = ()
    unparsed_calls: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    """Each tool's specification as JSON text."""
    trainable: bool | None = None
    is_learned: bool = True
    """Whether the message may be a training target; False if its weight is 0."""
    name: str = ""
    """On a tool result: the name of the function, if it is given."""
    call_id: str = ""
    """On a tool result: the id of the call, if it is given."""
    is_given: bool = True
    """False for a system message that only offers tools, in a conversation without a system message
    of its own.
    """
    has_inline_thinking: bool = False
    """Whether the thinking was a think block at the start of the content, a string."""


def get_text_content(message: Mapping[str, Any]) -> str:
    """Return the text of a message, without its thinking parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if part["type"] == "text")


def get_thinking_content(message: Mapping[str, Any]) -> str:
    """Return the reasoning in a parsed message's content; "" if there is none."""
    content = message["content"]
    parts = [] if isinstance(content, str) else content
    return "".join(part["thinking"] for part in parts if part["type"] == "thinking")


def last_user_index(messages: Sequence[CheckedMessage]) -> int:
    """Return the index of the last user message; -1 if there is none."""
    return max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)


def read_messages(
    messages: Sequence[Mapping[str, Any]], capabilities: Capabilities, renderer: str
) -> list[CheckedMessage]:
    """Return the conversation in checked form. `capabilities` are those of the format `renderer`.
    Raise a ValueError that names the message, its fault and the remedy.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages is a {type(messages).__name__}; give a list of dictionaries with role and "
            "content"
        )
    if not messages:
        raise ValueError(
            "messages is empty; give at least one message, such as {'role': 'user', 'content': "
            "'...'}"
        )
    return [
        _read(message, f"messages[{index}]", index, capabilities, renderer)
        for index, message in enumerate(messages)
    ]


def _read(
    message: Any, where: str, index: int, capabilities: Capabilities, renderer: str
) -> CheckedMessage:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{where} is a {type(message).__name__}; give a dictionary with role and content"
        )
    unknown = [key for key in message if key not in MESSAGE_KEYS and message[key] is not None]
    if unknown:
        raise ValueError(
            f"{where} has unknown keys {unknown}; remove them (known: {', '.join(MESSAGE_KEYS)})"
        )
    role = message.get("role")
    if role not in capabilities.roles:
        raise ValueError(
            f"{where}['role']={role!r}: renderer {renderer} knows the roles "
            f"{', '.join(capabilities.roles)}"
        )
    check_nested_keys(message, where)
    text, thinking = _read_content(message, where, capabilities)
    if thinking is not None and role != "assistant":
        raise ValueError(
            f"{where} is of role {role!r} and has a thinking part; only assistant messages think: "
            "remove it"
        )
    if thinking is not None and not capabilities.thinking:
        raise ValueError(
            f"{where} has a thinking part, which renderer {renderer} cannot write; remove it or "
            "use qwen3"
        )
    calls, unparsed = _read_calls(message, where, role, capabilities, renderer)
    tools = _read_tools(message, where, index, capabilities, renderer)
    name, call_id = (_read_optional_text(message, key, where) for key in ("name", "tool_call_id"))
    if role != "tool" and (name or call_id):
        key = "name" if name else "tool_call_id"
        raise ValueError(
            f"{where} is of role {role!r} and has {key!r}, which only a tool result may have: "
            "remove it"
        )
    texts = (text, thinking or "", *chain.from_iterable(calls), *unparsed, *tools, name, call_id)
    for written in texts:
        check_characters(written, where)
    trainable = message.get("trainable")
    if trainable is not None and not isinstance(trainable, bool):
        raise ValueError(f"{where}['trainable']={trainable!r}; give True or False")
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{where}['weight']={weight!r}; give 0 or 1")
    if trainable and not weight:
        raise ValueError(f"{where} has weight 0 and trainable True; remove one of the two")
    is_inline = isinstance(message.get("content"), str) and message.get("reasoning_content") is None
    return CheckedMessage(
        role,
        text,
        thinking,
        calls,
        unparsed,
        tools,
        trainable,
        weight == 1,
        name,
        call_id,
        is_given=message.get("content") is not None or not tools,
        has_inline_thinking=thinking is not None and is_inline,
    )


def _read_optional_text(message: Mapping[str, Any], key: str, where: str) -> str:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}[{key!r}] is a {type(value).__name__}; give a string")
    return value or ""


def check_characters(text: str, where: str) -> None:
    """Raise ValueError if `text` contains a lone surrogate. `where` names the text in the error."""
    half = half_character(text)
    if half is not None:
        raise ValueError(
            f"{where} holds {half!r}, half of a character (a lone surrogate), which no tokenizer "
            "can read; remove it, or put a question mark in its place with "
            "text.encode(errors='replace').decode()"
        )


def half_character(text: str) -> str | None:
    """Return the first lone surrogate of `text`, or None. JSON can spell one, as in "\\ud83d"."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _read_content(
    message: Mapping[str, Any], where: str, capabilities: Capabilities
) -> tuple[str, str | None]:
    content = message.get("content")
    if content is None and any(map(message.get, ("tool_calls", "unparsed_tool_calls", "tools"))):
        content = ""
    if content is None:
        raise ValueError(
            f"{where} has no content; give a string (an empty one is allowed) or a list of parts"
        )
    thinking = message.get("reasoning_content")
    if thinking is not None and not isinstance(thinking, str):
        raise ValueError(
            f"{where}['reasoning_content'] is a {type(thinking).__name__}; give a string"
        )
    if isinstance(content, str):
        if thinking is None and capabilities.thinking and message["role"] == "assistant":
            return split_thinking(content)
        return content, thinking
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise ValueError(
            f"{where}['content'] is a {type(content).__name__}; give a string or a list of parts"
        )
    texts: list[str] = []
    thoughts: list[str] = [] if thinking is None else [thinking]
    for number, part in enumerate(content):
        kind = part["type"]
        if not isinstance(part.get(kind), str):
            raise ValueError(
                f"{where}, content[{number}] lacks its text; give {kind!r} as a string"
            )
        if kind == "thinking" and texts:
            raise ValueError(
                f"{where}, content[{number}]: thinking comes before the text; put the thinking "
                "parts first"
            )
        (texts if kind == "text" else thoughts).append(part[kind])
    return "".join(texts), ("".join(thoughts) if thoughts else None)


THINK_BLOCK = re.compile(r"\s*<think>(.*?)</think>\n*(.*)", re.DOTALL)


def split_thinking(text: str) -> tuple[str, str | None]:
    """Split a think block off the start of a string and return (rest, thinking).

    Return (text, None) if the string does not begin with a complete think block.
    """
    block = THINK_BLOCK.fullmatch(text)
    if block is None:
        return text, None
    return block.group(2), block.group(1).strip("\n")


def _read_calls(
    message: Mapping[str, Any], where: str, role: str, capabilities: Capabilities, renderer: str
) -> tuple[tuple[Call, ...], tuple[str, ...]]:
    calls, unparsed = message.get("tool_calls") or (), message.get("unparsed_tool_calls") or ()
    if not calls and not unparsed:
        return (), ()
    if not capabilities.tools:
        raise ValueError(
            f"{where} has tool calls, which renderer {renderer} cannot write; use "
            f"{RENDERERS_WITH_TOOLS}"
        )
    if role != "assistant":
        raise ValueError(
            f"{where} is of role {role!r} and has tool calls; only assistant messages call tools: "
            "remove them"
        )
    xml_renderer = renderer if capabilities.calls is not None and capabilities.calls.xml else None
    read = tuple(
        _read_call(call, f"{where}['tool_calls'][{number}]", xml_renderer)
        for number, call in enumerate(calls)
    )
    for number, call in enumerate(unparsed):
        if not isinstance(call, Mapping) or not isinstance(call.get("raw_text"), str):
            raise ValueError(
                f"{where}['unparsed_tool_calls'][{number}] lacks raw_text; give {{'raw_text': ..., "
                f"'error': ...}}"
            )
    return read, tuple(call["raw_text"] for call in unparsed)


def _read_call(call: Any, where: str, xml_renderer: str | None) -> Call:
    """Return a tool call. `xml_renderer` is the renderer's name if it writes each argument as an
    XML element. All other renderers write the text of the arguments unchanged, so a call that
    `max_tokens` cut off can be sent back.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError(
            f"{where}: give {{'type': 'function', 'function': {{'name': ..., 'arguments': "
            f"'{{...}}'}}}}"
        )
    _check_function_name(name, where)
    arguments = function.get("arguments")
    id_ = _read_optional_text(call, "id", where)
    if isinstance(arguments, Mapping):
        return Call(name, json.dumps(dict(arguments), ensure_ascii=False), id_)
    if not isinstance(arguments, str):
        raise ValueError(
            f"{where}: arguments={arguments!r} is not a JSON object; give one as text, such as "
            f"'{{\"x\": 1}}'"
        )
    if not arguments.strip():
        return Call(name, "{}", id_)
    if xml_renderer is not None and not _is_object(arguments):
        raise ValueError(
            f"{where}: arguments={arguments!r} is not a JSON object, and renderer {xml_renderer} "
            f"writes each argument as an XML element; give an object as text, such as "
            f"'{{\"x\": 1}}', or remove a call that max_tokens cut off"
        )
    return Call(name, arguments, id_)


def _check_function_name(name: str, where: str) -> None:
    """Raise ValueError unless a name can be written between quotation marks as it is. The chat
    templates and the grammars of calls write it so.
    """
    if not name or json.dumps(name, ensure_ascii=False) != f'"{name}"':
        raise ValueError(
            f"{where}: the function name {name!r} is empty or needs escaping in JSON; rename the "
            "function"
        )


def _is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _read_tools(
    message: Mapping[str, Any], where: str, index: int, capabilities: Capabilities, renderer: str
) -> tuple[str, ...]:
    tools = message.get("tools") or ()
    if not tools:
        return ()
    if not capabilities.tools:
        raise ValueError(
            f"{where} offers tools, which renderer {renderer} cannot write; use "
            f"{RENDERERS_WITH_TOOLS}"
        )
    if message["role"] != "system" or index != 0:
        raise ValueError(
            f"{where} offers tools; only a system message at the start of the conversation may"
        )
    return tuple(
        tool_json(tool, f"{where}['tools'][{number}]") for number, tool in enumerate(tools)
    )


def tool_json(tool: Any, where: str) -> str:
    """Return a tool's specification as the chat templates write it: {"type": "function",
    "function": {...}}. A specification in this form keeps its keys and their order. Raises
    ValueError for another form; `where` begins the message.
    """
    spec = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str) or not spec["name"]:
        raise ValueError(
            f"{where}: give {{'name': ..., 'description': ..., 'parameters': {{JSON schema}}}}"
        )
    _check_function_name(spec["name"], where)
    try:
        wrapper = tool if "function" in tool else {"type": "function"}
        return json.dumps({**wrapper, "function": dict(spec)}, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(
            f"{where}: the specification is not plain JSON ({error}); use dictionaries, lists and "
            "strings"
        ) from None
