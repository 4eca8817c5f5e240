"""The body of POST /v1/responses, as pydantic types that validate it.

Every kind of item, content and tool that planish does not support has an error with its remedy,
because clients of OpenAI's API use many kinds that need OpenAI's own services.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from planish.server.http.openai_errors import WrongParameterError
from planish.server.openai.requests import (
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    ChatTemplateOptions,
    FunctionName,
    Integer,
    JsonObjectFormat,
    NonEmptyString,
    NoOpParams,
    Request,
    StrictModel,
    TextFormat,
)
from planish.wire.json_pieces import JsonValue

Include = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]

_SEND_ALL = "nothing is stored here; send the whole conversation in input"
_NO_HOSTED_TOOLS = (
    "this server runs no tools itself; leave this tool out, or offer a function in its place"
)
_NO_FILES = "the models here read text and images; send it as input_text"


def _rejects(remedies: Mapping[str, str]) -> Callable[[JsonValue], JsonValue]:
    """Return a validator that removes null values from an object, and rejects an object whose
    `type` has a remedy in `remedies`.
    """

    def check(value: JsonValue) -> JsonValue:
        if not isinstance(value, dict):
            return value
        kind = str(value.get("type"))
        remedy = remedies.get(kind)
        if remedy is not None:
            raise PydanticCustomError(
                "unsupported", "type {kind}: {remedy}", {"kind": kind, "remedy": remedy}
            )
        return {key: one for key, one in value.items() if one is not None}

    return check


def _rejects_values(*values: str, remedy: str) -> BeforeValidator:
    """Return a validator that rejects `values`, which OpenAI's API has, with their remedy."""

    def check(value: Any) -> Any:
        if value in values:
            raise PydanticCustomError("unsupported", "{remedy}", {"remedy": remedy})
        return value

    return BeforeValidator(check)


class Part(StrictModel):
    """A part of the content of a message, or of a function's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    """Describes an earlier answer, and is not used."""
    logprobs: Any = None
    """Describes an earlier answer, and is not used."""
    parsed: Any = None
    """What OpenAI's client has read from the text; not used."""


class RefusalPart(StrictModel):
    """What an assistant said when it refused."""

    type: Literal["refusal"]
    refusal: str


class ImagePart(StrictModel):
    """An image, as a data URL."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


ContentPart = Annotated[
    Part | RefusalPart | ImagePart,
    Field(discriminator="type"),
    BeforeValidator(
        _rejects(
            {
                "input_audio": _NO_FILES,
                "input_file": _NO_FILES,
                "image_url": "send it as input_image, with the data URL as image_url",
            }
        )
    ),
]
Content = str | Annotated[list[ContentPart], Field(fail_fast=True)]


class Item(StrictModel):
    """An item of the conversation. `id` and `status` describe it and are not used."""

    id: str | None = None
    status: str | None = None


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None
    """Describes an assistant's message, and is not used."""


class FunctionCallItem(Item):
    """A call that the assistant has written."""

    type: Literal["function_call"]
    call_id: NonEmptyString
    name: NonEmptyString
    arguments: str
    namespace: str | None = None
    parsed_arguments: Any = None
    """What OpenAI's client has read from the arguments; not used."""


class FunctionOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: NonEmptyString
    output: Content
    name: str | None = None
    namespace: str | None = None


class SummaryPart(StrictModel):
    """A summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningPart(StrictModel):
    """The text of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Item):
    """The reasoning before an assistant's message."""

    type: Literal["reasoning"]
    summary: list[SummaryPart] = Field(default_factory=list[SummaryPart], fail_fast=True)
    content: list[ReasoningPart] = Field(default_factory=list[ReasoningPart], fail_fast=True)
    encrypted_content: str | None = None


_NO_OUTPUT = "no tool of this server writes such an item; leave it out"
_ITEM_REMEDIES = {
    "item_reference": "nothing is stored here; send the item itself (in some clients: store=false)",
    "compaction": "this server compacts no conversations; send the items themselves",
    "compaction_trigger": "this server compacts no conversations; leave it out",
    "additional_tools": "give all tools in tools",
    "custom_tool_call": "offer a function in place of the custom tool, and send a function_call",
    "custom_tool_call_output": "offer a function in place of the custom tool",
    **dict.fromkeys(
        (
            "apply_patch_call",
            "apply_patch_call_output",
            "code_interpreter_call",
            "computer_call",
            "computer_call_output",
            "file_search_call",
            "image_generation_call",
            "local_shell_call",
            "local_shell_call_output",
            "mcp_approval_request",
            "mcp_approval_response",
            "mcp_call",
            "mcp_list_tools",
            "shell_call",
            "shell_call_output",
            "tool_search_call",
            "tool_search_output",
            "web_search_call",
        ),
        _NO_OUTPUT,
    ),
}
InputItem = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem,
    Field(discriminator="type"),
    BeforeValidator(lambda value: _with_type(_rejects(_ITEM_REMEDIES)(value))),
]


def _with_type(value: JsonValue) -> JsonValue:
    """Return an item with its type: an item with a role and without a type is a message."""
    return {"type": "message", **value} if isinstance(value, dict) and "role" in value else value


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="A JSON schema.")] = None
    strict: bool | None = None
    defer_loading: Literal[False] = False


class NamespaceTool(StrictModel):
    """A group of functions. The model sees the names NAMESPACE__FUNCTION."""

    type: Literal["namespace"]
    name: FunctionName
    description: str = ""
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


_CUSTOM_TOOL = "custom tools have no form here; offer a function with one string parameter"
_WEB_SEARCH = (
    'this server searches no web; leave the tool out (in Codex: web_search = "disabled" in '
    "config.toml), or offer a function that searches"
)
_TOOL_REMEDIES = {
    "custom": _CUSTOM_TOOL,
    **dict.fromkeys(
        (
            "web_search",
            "web_search_2025_08_26",
            "web_search_preview",
            "web_search_preview_2025_03_11",
        ),
        _WEB_SEARCH,
    ),
    **dict.fromkeys(
        (
            "apply_patch",
            "code_interpreter",
            "computer",
            "computer_use_preview",
            "file_search",
            "image_generation",
            "local_shell",
            "mcp",
            "programmatic_tool_calling",
            "shell",
            "tool_search",
        ),
        _NO_HOSTED_TOOLS,
    ),
}
ResponseTool = Annotated[
    FunctionTool | NamespaceTool,
    Field(discriminator="type"),
    BeforeValidator(_rejects(_TOOL_REMEDIES)),
]


class NamedFunctionTool(StrictModel):
    """The function that the model must call."""

    type: Literal["function"]
    name: NonEmptyString
    namespace: str | None = None


class JsonSchemaTextFormat(StrictModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextOptions(StrictModel):
    """The form of the answer's text."""

    format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")
    ] = TextFormat(type="text")
    verbosity: Annotated[
        Literal["medium"],
        _rejects_values(
            "low",
            "high",
            remedy="the models here have no such setting; ask for it in the instructions",
        ),
    ] = "medium"


Summary = Annotated[
    Literal["auto", "detailed"],
    _rejects_values(
        "concise",
        remedy="this server does not shorten reasoning; give 'auto', which returns all of it, or "
        "leave it out",
    ),
]


class ReasoningOptions(StrictModel):
    """How the model reasons, and how the reasoning is returned."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    """An older name of `summary`."""


class ResponseStreamOptions(StrictModel):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] = False


_NULL = BeforeValidator(_rejects({}))
"""Removes null values from an object."""
_RESPONSES_NO_OP_PARAMS: NoOpParams = {
    "background": ((False,), "a response is sent when it is complete, or streamed; leave it out"),
    "conversation": ((), _SEND_ALL),
    "context_management": (([],), "shorten the conversation yourself; leave it out"),
    "frequency_penalty": ((0,), "leave it out, or use /v1/chat/completions"),
    "max_completion_tokens": ((), "give max_output_tokens"),
    "max_tokens": ((), "give max_output_tokens"),
    "max_tool_calls": ((), "it limits calls of OpenAI's own tools, and there are none here"),
    "messages": ((), "give input"),
    "n": ((1,), "a response is one answer; use /v1/chat/completions for several"),
    "presence_penalty": ((0,), "leave it out, or use /v1/chat/completions"),
    "previous_response_id": ((), _SEND_ALL),
    "prompt": ((), "give its text in instructions and input"),
    "reasoning_effort": ((), "give reasoning.effort"),
    "response_format": ((), "give text.format"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "stop": (([],), "leave it out, or use /v1/chat/completions"),
    "store": ((False,), f"{_SEND_ALL}, and leave store out or give false"),
    # A conversation that is too long is an error with either value.
    "truncation": (("disabled", "auto"), "leave it out"),
}


class ResponsesRequest(Request):
    """The body of POST /v1/responses."""

    no_op_params: ClassVar[NoOpParams] = _RESPONSES_NO_OP_PARAMS
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1, lt=1 << 31, description="0 or -1: off.")] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    tools: Annotated[
        list[ResponseTool],
        Field(fail_fast=True, max_length=MAX_TOOLS, default_factory=list),
    ]
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool = "auto"
    parallel_tool_calls: bool = True
    text: Annotated[TextOptions, _NULL] = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[Include] = Field(default_factory=list[Include], fail_fast=True)
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] = Field(default_factory=dict, fail_fast=True)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: ChatTemplateOptions = ChatTemplateOptions()
    truncate_max_tokens: Annotated[
        bool | None,
        Field(
            description="Lower max_output_tokens to what the context leaves, instead of rejecting "
            "the request. The default is an option of the server."
        ),
    ] = None

    @property
    def summary(self) -> str | None:
        """The kind of summary of the reasoning that the request asks for."""
        return self.reasoning.summary or self.reasoning.generate_summary

    @property
    def includes_logprobs(self) -> bool:
        """Whether the text has logprobs."""
        return "message.output_text.logprobs" in self.include

    def check(self) -> None:
        """Raise WrongParameterError if a parameter needs another one that is not given."""
        if self.stream_options is not None and not self.stream:
            raise WrongParameterError("stream_options", "stream_options needs stream=true")
        if self.top_logprobs and not self.includes_logprobs:
            raise WrongParameterError(
                "top_logprobs", "top_logprobs needs include=['message.output_text.logprobs']"
            )
