"""The requests of the Messages API, as pydantic types that validate them. GET /openapi.json returns
the schemas of these types. `content.py` checks the content blocks of messages.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from planish.server.http.openai_errors import UnsupportedParameterError, WrongParameterError
from planish.server.openai.requests import (
    MAX_STOPS,
    MAX_TOOLS,
    Integer,
    NonEmptyString,
    NoOpParams,
    Request,
    StrictModel,
)

_NO_OP_PARAMS: NoOpParams = {
    "container": ((), "this server runs no code; leave it out"),
    "diagnostics": ((), "leave it out"),
    "inference_geo": ((), "the model runs on this server; leave it out"),
    "mcp_servers": (([],), "this server calls no other servers; call the tools in the client"),
    "output_format": ((), "give output_config.format"),
    "service_tier": (("auto", "standard_only"), "there is one tier; leave it out"),
    "speed": (("standard",), "there is one speed; leave it out"),
    "thread": ((), "this server keeps no conversations; send all messages"),
}

CacheControl = Annotated[
    dict[str, Any],
    Field(description="Changes nothing: prefixes of prompts are cached in any case."),
]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
JsonObjects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class MessageParam(StrictModel):
    """A message: a text, or a list of content blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | JsonObjects


class ToolParam(StrictModel):
    """A tool that the client runs."""

    # Further keys are checked after the type, because each type of tool has keys of its own.
    model_config = ConfigDict(strict=True, extra="allow")
    type: str | None = None
    name: ToolName
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, Field(description="A JSON schema.")] = None
    strict: bool | None = None
    defer_loading: Annotated[
        bool | None,
        Field(description="Describe the tool only after a tool_reference block names it."),
    ] = None
    input_examples: JsonObjects | None = None
    eager_input_streaming: Annotated[
        bool | None, Field(description="Changes nothing: a call is sent when it is complete.")
    ] = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None = None
    cache_control: CacheControl | None = None


class ToolChoice(StrictModel):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False


class Thinking(StrictModel):
    """Whether the model writes reasoning, and whether the answer shows it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[
        Integer | None,
        Field(description="Changes nothing: max_tokens limits reasoning and answer."),
    ] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """The effort of the reasoning, and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(StrictModel):
    """A change of the conversation. Only the edit that changes nothing is supported."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(StrictModel):
    """Changes that the server makes to the conversation."""

    edits: list[ContextEdit] = Field(default=[], fail_fast=True)


class CountTokensRequest(Request):
    """The body of POST /v1/messages/count_tokens."""

    no_op_params: ClassVar[NoOpParams] = _NO_OP_PARAMS
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1)]
    system: str | JsonObjects = ""
    tools: list[ToolParam] = Field(default=[], fail_fast=True, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None

    def check(self) -> None:
        """Raise UnsupportedParameterError or WrongParameterError if the tools are invalid."""
        for number, tool in enumerate(self.tools):
            where = f"tools.{number}"
            if tool.type not in (None, "custom"):
                raise UnsupportedParameterError(
                    f"{where}.type={tool.type[:80]!r}",
                    "this server runs no tools and knows none of Anthropic's; define the tool with "
                    "name, description and input_schema, and run it in the client",
                )
            unknown = next((key for key, value in (tool.model_extra or {}).items() if value), None)
            if unknown is not None:
                raise UnsupportedParameterError(f"{where}.{unknown[:80]}", "leave it out")
            if tool.input_schema is None:
                raise WrongParameterError("tools", f"{where}.input_schema is missing")
        names = [tool.name for tool in self.tools]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise WrongParameterError(
                "tools", f"tools: two tools have the name {repeated!r}; rename one"
            )
        if (self.tool_choice.name is not None) != (self.tool_choice.type == "tool"):
            raise WrongParameterError(
                "tool_choice", "tool_choice: give name if, and only if, type is 'tool'"
            )


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[Integer, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=0, lt=1 << 31, description="0: off.")] = 0
    stop_sequences: list[NonEmptyString] = Field(default=[], max_length=MAX_STOPS)
    stream: bool = False
