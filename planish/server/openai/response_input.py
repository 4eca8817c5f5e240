"""Translate the body of POST /v1/responses into the chat request with the same prompt.

The items of a conversation become chat messages:

* `instructions`, and the system and developer messages at the start, become one system message.
  Many chat formats allow only one. Their texts are separated by an empty line.
* Reasoning, an assistant's message and function calls that follow each other become one assistant
  message, because the model has sampled them as one message. The ids of items tell which belong
  together. Without such ids, reasoning after text or calls begins a message, and so does text after
  text.

So a conversation has the same prompt here and in a chat. Errors name the place in this request's
body: `rename_error` replaces the chat's names.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planish.server.http.openai_errors import WrongParameterError
from planish.server.openai.chat_prompts import with_message_names
from planish.server.openai.requests import (
    ChatRequest,
    Function,
    JsonSchemaFormat,
    NamedFunction,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    Tool,
)
from planish.server.openai.response_requests import (
    Content,
    ContentPart,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    ImagePart,
    Item,
    JsonSchemaTextFormat,
    MessageItem,
    NamedFunctionTool,
    Part,
    ReasoningItem,
    ResponsesRequest,
)
from planish.wire.pacing import pause_if_due

_ENCODING_PREFIX = "planish.1."
_MAX_NAME = 64


@dataclass(frozen=True)
class FunctionId:
    """The name of a function, and its namespace if it has one."""

    name: str
    namespace: str | None = None

    @property
    def chat_name(self) -> str:
        """The name that the model sees."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"

    def to_json(self) -> dict[str, str]:
        """Return the fields of an item that calls the function."""
        names = {"name": self.name}
        return names if self.namespace is None else {**names, "namespace": self.namespace}


@dataclass(frozen=True)
class ChatTranslation:
    """The chat request that has the same prompt and the same answer as a request of a response."""

    chat: ChatRequest
    places: list[str]
    """For each message of the chat, its place in the request's body."""
    functions: Mapping[str, FunctionId]
    """The offered functions, by the names that the model sees."""


def translate(request: ResponsesRequest) -> ChatTranslation:
    """Return the chat request for `request`. Raise WrongParameterError, which names the item, if
    an item has no meaning at its place.
    """
    conversation = _read_input(request)
    tools = _read_tools(request)
    chat = ChatRequest(
        model=request.model,
        messages=conversation.messages,
        tools=list(tools.values()),
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        reasoning_effort=request.reasoning.effort,
        chat_template_kwargs=request.chat_template_kwargs,
        logprobs=request.includes_logprobs,
        top_logprobs=request.top_logprobs if request.includes_logprobs else None,
        stream=request.stream,
        truncate_max_tokens=request.truncate_max_tokens,
    )
    functions = {function.chat_name: function for function in tools}
    return ChatTranslation(chat, conversation.places, functions)


_PARAMETERS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
"""Parameters of a chat with other names here."""
_CHAT_NAME = re.compile(r"\b(" + "|".join(_PARAMETERS) + r")\b(?!=true)")


def rename_error(error: WrongParameterError, translation: ChatTranslation) -> WrongParameterError:
    """Return the error with the names of the request that the client has sent."""
    places = translation.places
    text = with_message_names(
        str(error), lambda index: places[index] if index < len(places) else "input"
    )
    name = _PARAMETERS.get(error.param, error.param).partition(".")[0]
    renamed = WrongParameterError(name, _CHAT_NAME.sub(lambda one: _PARAMETERS[one[1]], text))
    renamed.code = error.code
    return renamed


_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_[0-9]+")


def item_id(prefix: str, sample: str, index: int) -> str:
    """Return the id of an item. Items of one sample have the same `sample`, 32 hexadecimal digits,
    so that they become one message again when they are sent back.
    """
    return f"{prefix}_{sample}_{index}"


def _sample_of(item: Item) -> str | None:
    """Return the sample that an item belongs to; None if its id does not say so."""
    found = _ITEM_ID.fullmatch(item.id or "")
    return None if found is None else found[1]


def encode_reasoning(text: str) -> str:
    """Return the `encrypted_content` of a reasoning item. The text is encoded, and not encrypted,
    because it belongs to the client.
    """
    return _ENCODING_PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def _decode_reasoning(encoded: str, place: str) -> str:
    try:
        if not encoded.startswith(_ENCODING_PREFIX):
            raise ValueError
        body = encoded.removeprefix(_ENCODING_PREFIX).encode()
        return base64.b64decode(body, altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise WrongParameterError(
            "input",
            f"{place}.encrypted_content is not from a planish server; remove the item, or send the "
            "reasoning in content",
        ) from None


@dataclass
class _Conversation:
    """The chat messages of the items so far."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    places: list[str] = field(default_factory=list[str])
    names_by_call_id: dict[str, str] = field(default_factory=dict[str, str])
    """The functions of all calls so far."""
    is_assistant_open: bool = False
    """Whether the last message is the assistant's and the next item may belong to it."""
    sample: str | None = None
    """The sample of the last message, if the ids of its items say so."""

    def add(self, place: str, message: dict[str, Any]) -> None:
        """Add a message."""
        self.messages.append(message)
        self.places.append(place)
        self.is_assistant_open = message["role"] == "assistant"

    def add_system(self, place: str, text: str) -> None:
        """Add text to the system message at the start, or begin this message."""
        if self.messages:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.add(place, {"role": "system", "content": text})

    def assistant(self, place: str, item: Item, continues: bool) -> dict[str, Any]:
        """Return the last message if it is the assistant's and `item` belongs to it. Otherwise
        begin an assistant's message. `continues`: whether the item belongs to it by its type, if
        its id does not tell.
        """
        sample = _sample_of(item)
        if sample is not None and self.sample is not None:
            continues = sample == self.sample
        if not (self.is_assistant_open and continues):
            self.add(place, {"role": "assistant", "content": ""})
            self.sample = sample
        return self.messages[-1]

    @property
    def has_text(self) -> bool:
        """Whether the last message has text."""
        return bool(self.messages and self.messages[-1]["content"])

    @property
    def has_calls(self) -> bool:
        """Whether the last message has calls."""
        return bool(self.messages and self.messages[-1].get("tool_calls"))


def _read_input(request: ResponsesRequest) -> _Conversation:
    conversation = _Conversation()
    if request.instructions is not None:
        conversation.add_system("instructions", request.instructions)
    if isinstance(request.input, str):
        conversation.add("input", {"role": "user", "content": request.input})
        return conversation
    is_start = True
    for index, item in enumerate(request.input):
        pause_if_due()
        place = f"input[{index}]"
        is_system = isinstance(item, MessageItem) and item.role in ("system", "developer")
        is_start = is_start and is_system
        match item:
            case MessageItem() if is_start:
                conversation.add_system(place, _text(item.content, place))
            case MessageItem(role="assistant"):
                _add_answer(conversation, place, item)
            case MessageItem():
                role = "system" if is_system else item.role
                conversation.add(place, {"role": role, "content": _content(item.content)})
            case ReasoningItem():
                _add_reasoning(conversation, place, item)
            case FunctionCallItem():
                _add_call(conversation, place, item)
            case FunctionOutputItem():
                _add_output(conversation, place, item)
    return conversation


def _add_answer(conversation: _Conversation, place: str, item: MessageItem) -> None:
    # A model may write text after its calls. Text after text is another message.
    continues = not conversation.has_text or conversation.has_calls
    message = conversation.assistant(place, item, continues)
    content = _content(item.content)
    message["content"] = (
        [*_parts(message["content"]), *_parts(content)] if message["content"] else content
    )


def _add_reasoning(conversation: _Conversation, place: str, item: ReasoningItem) -> None:
    if item.content:
        text = "".join(part.text for part in item.content)
    elif item.encrypted_content:
        text = _decode_reasoning(item.encrypted_content, place)
    else:
        text = "\n\n".join(part.text for part in item.summary)
    if text:
        continues = not conversation.has_text and not conversation.has_calls
        message = conversation.assistant(place, item, continues)
        message["reasoning_content"] = message.get("reasoning_content", "") + text


def _add_call(conversation: _Conversation, place: str, item: FunctionCallItem) -> None:
    message = conversation.assistant(place, item, continues=True)
    name = FunctionId(item.name, item.namespace).chat_name
    conversation.names_by_call_id[item.call_id] = name
    function = {"name": name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    message.setdefault("tool_calls", []).append(call)


def _add_output(conversation: _Conversation, place: str, item: FunctionOutputItem) -> None:
    name = conversation.names_by_call_id.get(item.call_id)
    if name is None:
        raise WrongParameterError(
            "input",
            f"{place}.call_id={item.call_id[:80]!r}: no function_call before it has this call_id; "
            "send the function_call too, because nothing is stored here",
        )
    content = _content(item.output)
    message = {"role": "tool", "tool_call_id": item.call_id, "name": name, "content": content}
    conversation.add(place, message)


def _content(content: Content) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else list(map(_chat_part, content)) or ""


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: Content, place: str) -> str:
    """Return the text of a system message at the start."""
    if isinstance(content, str):
        return content
    parts = list(map(_chat_part, content))
    if any(part["type"] != "text" for part in parts):
        raise WrongParameterError(
            "input", f"{place} is a system message with an image; send the image as a user"
        )
    return "".join(part["text"] for part in parts)


def _chat_part(part: ContentPart) -> dict[str, Any]:
    """Return a part in the form of the chat endpoint."""
    if isinstance(part, ImagePart):
        image = {"url": part.image_url, "detail": part.detail}
        return {"type": "image_url", "image_url": image}
    return {"type": "text", "text": part.text if isinstance(part, Part) else part.refusal}


def _read_tools(request: ResponsesRequest) -> dict[FunctionId, Tool]:
    """Return the tools of the chat by the function that they are. Raise WrongParameterError if two
    have the same name.
    """
    tools: dict[FunctionId, Tool] = {}
    for index, tool in enumerate(request.tools):
        place = f"tools[{index}]"
        if isinstance(tool, FunctionTool):
            _add_tool(tools, place, FunctionId(tool.name), tool, tool.description)
            continue
        for number, function in enumerate(tool.tools):
            description = "\n".join(filter(None, (tool.description, function.description)))
            function_id = FunctionId(function.name, tool.name)
            function_place = f"{place}.tools[{number}]"
            _add_tool(tools, function_place, function_id, function, description or None)
    return tools


def _add_tool(
    tools: dict[FunctionId, Tool],
    place: str,
    function_id: FunctionId,
    tool: FunctionTool,
    description: str | None,
) -> None:
    name = function_id.chat_name
    if len(name) > _MAX_NAME:
        raise WrongParameterError(
            "tools",
            f"{place}.name: the model sees the name {name!r}, which is longer than {_MAX_NAME} "
            "characters; shorten the name of the function or of its namespace",
        )
    if any(other.chat_name == name for other in tools):
        raise WrongParameterError(
            "tools", f"{place}.name: two tools have the name {name!r}; rename one of them"
        )
    function = Function(
        name=name, description=description, parameters=tool.parameters, strict=tool.strict
    )
    tools[function_id] = Tool(type="function", function=function)


def _tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if not isinstance(choice, NamedFunctionTool):
        return choice
    name = FunctionId(choice.name, choice.namespace).chat_name
    return NamedTool(type="function", function=NamedFunction(name=name))


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    text_format = request.text.format
    if not isinstance(text_format, JsonSchemaTextFormat):
        return text_format
    schema = text_format.model_dump(by_alias=True, exclude={"type"})
    return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema.model_validate(schema))
