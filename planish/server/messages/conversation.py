"""Translates a request of the Messages API into one of the chat endpoint, so that both endpoints
build the same prompts.

    system                 a system message at the start
    user, several in a row one user message
    tool_result            messages of role tool, in the order of the calls that they answer, because
                           most chat formats pair results and calls by their order
    tool_use               tool calls, with the text of the sampled arguments (tool_inputs.py)
    thinking               the reasoning of the assistant message
    assistant at the end   a message that the model continues
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from planish.server.http.openai_errors import WrongParameterError
from planish.server.messages.content import (
    Block,
    block_type,
    chat_tool,
    joined,
    part_of,
    referenced_tools,
    result_content,
    string_of,
    text_of_blocks,
    thinking_of,
)
from planish.server.messages.requests import CountTokensRequest, MessageParam, MessagesRequest
from planish.server.messages.tool_inputs import read_call
from planish.server.openai.requests import (
    ChatRequest,
    JsonSchemaFormat,
    NamedFunction,
    NamedSchema,
    NamedTool,
    Tool,
)
from planish.wire.json_pieces import JsonValue
from planish.wire.pacing import pause_if_due

BILLING_HEADER = "x-anthropic-billing-header:"
"""Claude Code sends a header of HTTP as the first block of the system prompt. It may change with
every request, so it would keep the prompt from being cached.
"""
PlacedBlock = tuple[str, Block]
"""A block with its place in the request, such as `messages.2.content.0`."""


@dataclass(frozen=True)
class Conversation:
    """A translated request."""

    request: CountTokensRequest
    chat: ChatRequest
    places: Sequence[str]
    """The place in the request of each message of `chat`, such as `messages.2`."""
    unlisted_tools: frozenset[str]
    """Tools that the system message does not describe (`defer_loading`)."""

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer contains the text of the reasoning."""
        thinking = self.request.thinking
        return thinking is None or thinking.display != "omitted"

    @property
    def stop_sequences(self) -> Sequence[str]:
        """The stop sequences of the request."""
        return self.request.stop_sequences if isinstance(self.request, MessagesRequest) else ()


def translate(request: CountTokensRequest) -> Conversation:
    """Return the request in the form of the chat endpoint. Raise WrongParameterError or
    UnsupportedParameterError, which name the place of the fault, if the messages are invalid.
    """
    tools = {tool.name: chat_tool(tool) for tool in request.tools}
    deferred = {tool.name for tool in request.tools if tool.defer_loading}
    translation = _Translation(tools)
    translation.add_system(request)
    for role, group in groupby(enumerate(request.messages), lambda entry: entry[1].role):
        translation.add_group(role, list(group))
    translation.check_no_pending_calls()
    hidden = deferred - translation.referenced
    options = _sampling_options(request) if isinstance(request, MessagesRequest) else {}
    chat = ChatRequest.model_construct(
        model=request.model,
        messages=translation.messages,
        tools=[tool for name, tool in tools.items() if name not in hidden],
        continue_final_message=request.messages[-1].role == "assistant",
        **_tool_choice(request),
        **_response_format(request),
        **options,
    )
    return Conversation(request, chat, translation.places, frozenset(deferred))


def _sampling_options(request: MessagesRequest) -> dict[str, Any]:
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
        "stream": request.stream,
        # Agents ask for more tokens than the context leaves. The stop reason tells if it ended.
        "truncate_max_tokens": True,
    }


def _tool_choice(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    named = NamedTool.model_construct(
        type="function", function=NamedFunction.model_construct(name=choice.name or "")
    )
    choices = {"auto": "auto", "any": "required", "tool": named, "none": "none"}
    return {
        "tool_choice": choices[choice.type],
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _response_format(request: CountTokensRequest) -> dict[str, Any]:
    output = request.output_config.format
    if output is None:
        return {}
    named = NamedSchema.model_validate({"schema": output.schema_})
    return {"response_format": JsonSchemaFormat(type="json_schema", json_schema=named)}


@dataclass(frozen=True)
class _PendingCall:
    """A call whose result must follow."""

    id: str
    """The id in the prompt."""
    name: str
    place: str
    """The place of its block in the request."""


@dataclass
class _Translation:
    """The messages that were translated so far."""

    tools: Mapping[str, Tool]
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    places: list[str] = field(default_factory=list[str])
    referenced: set[str] = field(default_factory=set[str])
    """The names of tools in tool_reference blocks."""
    _pending: dict[str, _PendingCall] = field(default_factory=dict[str, _PendingCall])
    """Calls without a result, by the id in the request."""

    def add_system(self, request: CountTokensRequest) -> None:
        """Add the system prompt, if there is one."""
        system = request.system
        if not isinstance(system, str):
            system = [
                {**block, "text": ""} if _is_billing_header(block) else block for block in system
            ]
        system = text_of_blocks(system, "system")
        if system:
            self._add("system", {"role": "system", "content": system})

    def add_group(
        self,
        role: str,
        group: Sequence[tuple[int, MessageParam]],
    ) -> None:
        """Add consecutive messages of one role, with their numbers in the request."""
        if role == "system":
            for number, message in group:
                text = text_of_blocks(message.content, f"messages.{number}.content")
                self._add(f"messages.{number}", {"role": "system", "content": text})
            return
        blocks = [block for number, message in group for block in _blocks(number, message)]
        place = f"messages.{group[0][0]}"
        if role == "assistant":
            self.check_no_pending_calls()
            self._add_assistant(place, blocks)
        else:
            self._add_user(place, blocks)

    def check_no_pending_calls(self) -> None:
        """Raise WrongParameterError if a call has no result."""
        if self._pending:
            first = next(iter(self._pending.values()))
            raise WrongParameterError(
                "messages",
                f"{first.place}: `tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {', '.join(self._pending)[:200]}. Each `tool_use` block must "
                "have a corresponding `tool_result` block in the next message",
            )

    def _add(self, place: str, message: dict[str, Any]) -> None:
        pause_if_due()
        self.places.append(place)
        self.messages.append(message)

    def _add_assistant(self, place: str, blocks: Sequence[PlacedBlock]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        allowed = ("text", "thinking", "redacted_thinking", "tool_use")
        for where, block in blocks:
            match block_type(block, where, allowed):
                case "text":
                    texts.append(string_of(block, "text", where))
                case "tool_use":
                    calls.append(self._read_tool_use(where, block))
                case _:
                    thoughts.append(thinking_of(block, where))
        thinking = "".join(thoughts)
        content = [{"type": "thinking", "thinking": thinking}] if thinking else []
        content.append({"type": "text", "text": "".join(texts)})
        message = {"role": "assistant", "content": content}
        self._add(place, {**message, "tool_calls": calls} if calls else message)

    def _read_tool_use(self, where: str, block: Block) -> dict[str, Any]:
        id_, name = string_of(block, "id", where), string_of(block, "name", where)
        value: JsonValue = block.get("input")
        if not isinstance(value, dict):
            raise WrongParameterError("messages", f"{where}.input: give an object")
        if id_ in self._pending:
            raise WrongParameterError("messages", f"{where}.id: `tool_use` ids must be unique")
        prompt_id, arguments = read_call(id_, value)
        self._pending[id_] = _PendingCall(prompt_id, name, where)
        function = {"name": name, "arguments": arguments}
        return {"type": "function", "id": prompt_id, "function": function}

    def _add_user(self, place: str, blocks: Sequence[PlacedBlock]) -> None:
        parts: list[dict[str, Any]] = []
        results: dict[str, str | Sequence[dict[str, Any]]] = {}
        for where, block in blocks:
            if block_type(block, where, ("text", "image", "tool_result")) != "tool_result":
                parts.append(part_of(block, where))
                continue
            if parts:
                raise WrongParameterError(
                    "messages", f"{where}: tool_result blocks must come before text blocks"
                )
            id_ = string_of(block, "tool_use_id", where)
            if id_ in results:
                raise WrongParameterError(
                    "messages",
                    f"{where}: each tool_use must have a single result. Found multiple "
                    f"`tool_result` blocks with id: {id_[:200]}",
                )
            if id_ not in self._pending:
                raise WrongParameterError(
                    "messages",
                    f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: "
                    f"{id_[:200]}. Each `tool_result` block must have a corresponding `tool_use` "
                    "block in the previous message",
                )
            self.referenced.update(referenced_tools(block))
            results[id_] = result_content(block, where, self.tools)
        pending, self._pending = self._pending, {}
        for id_, call in pending.items():
            if id_ not in results:
                self._pending[id_] = call
                continue
            result = {"tool_call_id": call.id, "name": call.name, "content": results[id_]}
            self._add(place, {"role": "tool", **result})
        self.check_no_pending_calls()
        if parts or not results:
            self._add(place, {"role": "user", "content": joined(parts)})


def _is_billing_header(block: Block) -> bool:
    return str(block.get("text", "")).startswith(BILLING_HEADER)


def _blocks(number: int, message: MessageParam) -> Iterator[PlacedBlock]:
    """Yield the blocks of a message with their places."""
    if isinstance(message.content, str):
        yield f"messages.{number}.content", {"type": "text", "text": message.content}
        return
    for index, block in enumerate(message.content):
        yield f"messages.{number}.content.{index}", block
