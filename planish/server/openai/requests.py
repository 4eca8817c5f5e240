"""The requests of the OpenAI-compatible endpoints, as pydantic types that validate them. GET
/openapi.json returns the schemas of these types.

An unknown parameter is rejected with an error that names it. An unsupported parameter of OpenAI,
vLLM or SGLang is accepted only with a value that does not change the answer. A parameter with the
value null counts as absent. Parameters that only describe the client are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import models_json_schema

from planish.errors import UserError
from planish.server.http.openai_errors import UnsupportedParameterError, WrongParameterError
from planish.types import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_SCORED_TOKENS,
    MAX_STOP_TOKENS,
    Constraint,
    SamplingParams,
)
from planish.wire.fields import Fields, shown
from planish.wire.json_pieces import JsonValue

R = TypeVar("R", bound="RequestBody")

MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_STOPS, MAX_PROMPTS = 128, 20, 16, 1024
MAX_TOOLS = 1024
MAX_OPTION_BYTES = 256 << 10
"""Limit for the JSON of one parameter in bytes. It does not apply to `_TEXT_PARAMETERS`, which
carry the text of the request.
"""
_TEXT_PARAMETERS = ("messages", "tools", "prompt", "tokens", "input", "instructions", "system")
_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for a text completion."""


def _integral_float_to_int(value: Any) -> Any:
    """Return a float such as 3.0 as an integer. Some languages have no integers, so their clients
    may send such floats.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


Integer = Annotated[int, BeforeValidator(_integral_float_to_int)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
LogitBias = dict[
    Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]
]
"""Biases by token id. JSON has only strings as keys."""
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""OpenAI's rule for the names of functions. Every chat format can write such a name as it is."""
NoLimit = Literal[-1]
"""The value of max_tokens with which an answer may fill the context."""
NonEmptyString = Annotated[str, Field(min_length=1)]
NoOpParams = Mapping[str, tuple[tuple[Any, ...], str]]
"""Maps an unsupported parameter to (no-op values, remedy). A no-op value does not change the
answer, so it is accepted. The remedy is a part of the error for any other value.
"""

_IGNORED_PARAMETERS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "rid",
    "client_metadata",
)
_PLAIN_TEXT_REMEDY = "this server has no other form for the text of an answer; leave it out"
_SAMPLING_NO_OP_PARAMS: NoOpParams = {
    "bad_words": (([],), "give logit_bias to exclude tokens"),
    "length_penalty": ((1,), "there is no beam search; leave it out"),
    "use_beam_search": ((False,), "there is no beam search; leave it out"),
    "best_of": ((1,), "every choice is returned; leave it out"),
    "store": ((False,), "nothing is stored; leave it out or give false"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "priority": ((0,), "all requests have one priority; leave it out"),
    "include_stop_str_in_output": ((False,), _PLAIN_TEXT_REMEDY),
    "skip_special_tokens": ((True,), _PLAIN_TEXT_REMEDY),
    "spaces_between_special_tokens": ((True,), _PLAIN_TEXT_REMEDY),
    "no_stop_trim": ((False,), _PLAIN_TEXT_REMEDY),
    "return_tokens_as_token_ids": ((False,), "give return_token_ids"),
    "return_hidden_states": ((False,), "hidden states are not returned; leave it out"),
    "prompt_logprobs": ((), "give echo and logprobs to /v1/completions"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    "guided_decoding_backend": (("auto", "guidance"), "the backend is llguidance; leave it out"),
    "guided_whitespace_pattern": ((), "leave it out"),
    "structural_tag": ((), "give tools, or a grammar in structured_outputs"),
    "mm_processor_kwargs": (({},), "the models here read text; leave it out"),
    "vllm_xargs": (({},), "leave it out"),
}
_CHAT_NO_OP_PARAMS: NoOpParams = {
    "modalities": ((["text"],), "the models here write text; leave it out"),
    "audio": ((), "the models here write text; leave it out"),
    "prediction": ((), "leave it out"),
    "verbosity": (("medium",), "ask for it in the messages"),
    "web_search_options": ((), "offer a tool that searches"),
    "functions": (([],), "give tools"),
    "function_call": (("none", "auto"), "give tool_choice"),
    "echo": ((False,), "give the text to /v1/completions"),
    "add_special_tokens": ((False,), "the chat format adds them; leave it out"),
    "documents": (([],), "put documents into the messages"),
    "chat_template": ((), "the model's renderer writes the messages; leave it out"),
    "include_reasoning": ((True,), "reasoning is returned beside the content; leave it out"),
    "separate_reasoning": ((True,), "reasoning is returned beside the content; leave it out"),
    "stream_reasoning": ((True,), "reasoning is streamed as well; leave it out"),
    "thinking_token_budget": ((), "give max_completion_tokens"),
}
_COMPLETION_NO_OP_PARAMS: NoOpParams = {
    "suffix": (("",), "the models here continue a prompt; leave it out"),
    "add_special_tokens": ((True,), "give the prompt as token ids"),
    "prompt_embeds": ((), "give a prompt"),
}


class StrictModel(BaseModel):
    """An object in a request. Unknown keys are rejected."""

    model_config = ConfigDict(strict=True, extra="forbid")


class RequestBody(StrictModel):
    """The body of a request."""

    no_op_params: ClassVar[NoOpParams] = {}

    def check(self) -> None:
        """Raise WrongParameterError if two parameters contradict each other."""


class Request(RequestBody):
    """The body of a request to a model."""

    model: Annotated[str, Field(description="A base model's name, or a checkpoint's path.")]


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class TextFormat(StrictModel):
    """Text that is not constrained."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON schema of `response_format`."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
JsonSchema = dict[str, Any] | str
GuidedChoices = Annotated[list[NonEmptyString], Field(fail_fast=True, min_length=1)]


class StructuredOutputs(StrictModel):
    """A constraint on the answer's text, with vLLM's parameter names."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: GuidedChoices | None = None
    grammar: Annotated[str | None, Field(description="A Lark grammar of llguidance.")] = None


class GenerationRequest(Request):
    """The options that chat and text completions share."""

    no_op_params: ClassVar[NoOpParams] = _SAMPLING_NO_OP_PARAMS
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1, lt=1 << 31, description="0 or -1: off.")] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: NonEmptyString | Annotated[list[NonEmptyString], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS // 2)] = []
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[LogitBias, Field(fail_fast=True, max_length=MAX_LOGIT_BIASES)] = {}
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_ALLOWED_TOKENS)] = []
    logprob_token_ids: Annotated[
        Annotated[TokenIds, Field(min_length=1, max_length=MAX_SCORED_TOKENS)] | None,
        Field(
            description="Tokens whose logprobs are returned at each sampled position, in place of "
            "the likeliest. Needs logprobs."
        ),
    ] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: GuidedChoices | None = None
    guided_grammar: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    ignore_eos: bool = False
    truncate_max_tokens: Annotated[
        bool | None,
        Field(
            description="Lower max_tokens to what the context leaves, instead of rejecting the "
            "request. The default is an option of the server."
        ),
    ] = None
    text_parameter: ClassVar[str]
    """The parameter with the text of the request."""

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum number of tokens to sample. None: sample to the end of the context."""
        raise NotImplementedError

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of top tokens per position whose logprobs are returned. None: no logprobs. 0:
        only the logprobs of the sampled tokens.
        """
        raise NotImplementedError

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings at which the text ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(
        self,
        extra_stop_ids: Iterable[int],
        extra_stop_strings: Sequence[str],
        constraint: Constraint | None,
    ) -> SamplingParams:
        """Return the sampling parameters. `extra_stop_ids` and `extra_stop_strings` are added to
        the stop tokens and stop strings of the request; the ids only without `ignore_eos`. Raise
        WrongParameterError if a parameter is invalid.
        """
        try:
            return SamplingParams(
                max_tokens=None if self.max_new_tokens is None else max(1, self.max_new_tokens),
                seed=self.seed,
                stop=[*extra_stop_strings, *self.stop_strings],
                stop_token_ids=sorted(
                    {*(() if self.ignore_eos else extra_stop_ids), *self.stop_token_ids}
                ),
                temperature=self.temperature,
                top_k=self.top_k or -1,
                top_p=self.top_p,
                min_p=self.min_p,
                min_tokens=self.min_tokens,
                repetition_penalty=self.repetition_penalty,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                constraint=constraint,
                logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
                allowed_token_ids=self.allowed_token_ids,
            )
        except UserError as error:
            found = re.search(r"SamplingParams\.(\w+)", str(error))
            name = "" if found is None else found[1]
            raise WrongParameterError(name, str(error).replace("SamplingParams.", "")) from None

    def check(self) -> None:
        """Raise WrongParameterError if a parameter needs another one that is not given."""
        if self.stream_options is not None and not self.stream:
            raise WrongParameterError("stream_options", "stream_options needs stream=true")
        if self.logprob_token_ids is not None and self.num_top_logprobs is None:
            raise WrongParameterError(
                "logprob_token_ids", "logprob_token_ids needs logprobs (true in a chat, else 0)"
            )


class Function(StrictModel):
    """A function that the model may call. Further keys are shown to the model."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="A JSON schema.")] = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(StrictModel):
    """The name of a function."""

    name: FunctionName


class NamedTool(StrictModel):
    """The tool that the model must use."""

    type: Literal["function"]
    function: NamedFunction


Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ChatTemplateOptions(StrictModel):
    """The options of Qwen3's chat template."""

    enable_thinking: bool | None = None


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    no_op_params: ClassVar[NoOpParams] = {**_SAMPLING_NO_OP_PARAMS, **_CHAT_NO_OP_PARAMS}
    messages: Messages
    text_parameter: ClassVar[str] = "messages"
    max_completion_tokens: NoLimit | Annotated[Integer, Field(ge=1)] | None = None
    max_tokens: NoLimit | Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: ChatTemplateOptions = ChatTemplateOptions()
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool, Field(description="Continue the last message, which is the assistant's.")
    ] = False

    @property
    def max_new_tokens(self) -> int | None:
        """`max_completion_tokens`, or else the older `max_tokens`."""
        limit = self.max_completion_tokens or self.max_tokens
        return None if limit == -1 else limit

    @property
    def num_top_logprobs(self) -> int | None:
        """`top_logprobs`, by default 0, if `logprobs` is true. Otherwise None."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raise WrongParameterError if two parameters contradict each other."""
        super().check()
        check_continuation(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise WrongParameterError("top_logprobs", "top_logprobs needs logprobs=true")


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    no_op_params: ClassVar[NoOpParams] = {
        **_SAMPLING_NO_OP_PARAMS,
        **_COMPLETION_NO_OP_PARAMS,
    }
    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[
            list[str | TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
        ]
    )
    text_parameter: ClassVar[str] = "prompt"
    max_tokens: NoLimit | Annotated[Integer, Field(ge=0)] = _DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False

    @property
    def max_new_tokens(self) -> int | None:
        """`max_tokens`, by default 16."""
        return None if self.max_tokens == -1 else self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """`logprobs`."""
        return self.logprobs


class TokenizeRequest(Request):
    """The body of POST /tokenize: a prompt, or the messages of a chat."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    no_op_params: ClassVar[NoOpParams] = {
        name: _CHAT_NO_OP_PARAMS[name] for name in ("chat_template",)
    }
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = []
    chat_template_kwargs: ChatTemplateOptions = ChatTemplateOptions()
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False

    def check(self) -> None:
        """Raise WrongParameterError if two parameters contradict each other."""
        super().check()
        check_continuation(self)


class DetokenizeRequest(Request):
    """The body of POST /detokenize."""

    tokens: TokenIds


def check_continuation(request: ChatRequest | TokenizeRequest) -> None:
    """Raise WrongParameterError unless the prompt ends either with the header of a new message or
    with the last message, which the model continues.
    """
    if request.add_generation_prompt is False and not request.continue_final_message:
        raise WrongParameterError(
            "add_generation_prompt",
            "add_generation_prompt=false needs continue_final_message=true: an answer either "
            "begins a message or continues the last one",
        )
    if request.add_generation_prompt and request.continue_final_message:
        raise WrongParameterError(
            "continue_final_message",
            "continue_final_message=true contradicts add_generation_prompt=true; leave one of them "
            "out",
        )


def read_request(request_type: type[R], fields: Fields) -> R:
    """Return the body of a request. Raise UnsupportedParameterError or WrongParameterError, which
    name the parameter, if it is invalid.
    """
    parameters: dict[str, Any] = {}
    for name in fields:
        value = fields.raw(name)
        if value is None or (name in _IGNORED_PARAMETERS and name not in request_type.model_fields):
            continue
        if name in request_type.no_op_params:
            allowed, remedy = request_type.no_op_params[name]
            if not any(
                type(value) in _json_types(allowed_value) and value == allowed_value
                for allowed_value in allowed
            ):
                raise UnsupportedParameterError(name, remedy)
        elif name not in request_type.model_fields:
            raise UnsupportedParameterError(name[:100], "leave it out")
        elif name not in _TEXT_PARAMETERS and len(orjson.dumps(value)) > MAX_OPTION_BYTES:
            raise WrongParameterError(
                name, f"{name} is larger than {MAX_OPTION_BYTES >> 10} KiB; shorten it"
            )
        else:
            parameters[name] = value
    try:
        request = request_type.model_validate(parameters)
    except ValidationError as error:
        raise _validation_error(parameters, error) from None
    request.check()
    return request


def _json_types(value: object) -> tuple[type, ...]:
    """Return the Python types that a JSON value equal to `value` may have. A comparison with == is
    not enough, because True == 1 in Python.
    """
    return (int, float) if type(value) is int else (type(value),)


def _validation_error(values: Mapping[str, Any], error: ValidationError) -> WrongParameterError:
    """Return the error for the fault that pydantic found. pydantic's path to a fault also contains
    names of union branches. Only the steps that exist in the body are shown.

    If a value fits no branch of a union, pydantic reports the faults of all branches. The fault of
    the branch that the client most probably meant is returned: the one deepest in the body, and
    among these one that is not about the type of the value.
    """
    # Lists end at their first fault, so only an object with unknown keys has many. A list of them
    # would take seconds, in which no other request runs.
    if error.error_count() > 1_000:
        return WrongParameterError(
            max(values, key=lambda name: len(orjson.dumps(values[name]))),
            f"an object in the body has {error.error_count():,} unknown keys; leave them out",
        )
    faults = error.errors(include_url=False, include_context=False)
    located = [
        (*_locate(values, one["loc"]), one)
        for one in faults
        if one["loc"][0] == faults[0]["loc"][0]
    ]
    path, depth, value, fault = min(
        located, key=lambda one: (-one[1], one[3]["type"].endswith(_BRANCH_FAULTS))
    )
    name = str(fault["loc"][0])
    if fault["type"] == "missing":
        missing = path if depth == 0 else f"{path}.{fault['loc'][-1]}"
        return WrongParameterError(name, f"{missing} is missing")
    text = fault["msg"][0].lower() + fault["msg"][1:]
    return WrongParameterError(name, f"{path}={shown(value)}: {text}")


_BRANCH_FAULTS = ("_type", "literal_error", "union_tag_invalid")
"""The ends of the names of faults that say that a value belongs to another branch of a union."""


def _locate(values: Mapping[str, Any], location: tuple[int | str, ...]) -> tuple[str, int, Any]:
    """Return the path of a fault in the body, the number of its steps after the parameter's name,
    and the value there.
    """
    path, depth = str(location[0]), 0
    value: JsonValue = values.get(path)
    for step in location[1:]:
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value, depth = f"{path}[{step}]", value[step], depth + 1
        elif isinstance(step, str) and isinstance(value, dict) and step in value:
            path, value, depth = f"{path}.{step[:100]}", value[step], depth + 1
    return path, depth, value


def request_schemas(request_types: Sequence[type[RequestBody]]) -> dict[str, Any]:
    """Map the names of request types and of their parts to JSON schemas, for OpenAPI 3.1."""
    _, document = models_json_schema(
        [(request_type, "validation") for request_type in request_types],
        ref_template="#/components/schemas/{model}",
    )
    components = document["$defs"]
    for request_type in request_types:
        schema = components[request_type.__name__]
        properties = schema["properties"]
        properties |= {
            name: {"enum": [*values]} for name, (values, _) in request_type.no_op_params.items()
        }
        properties |= {name: {} for name in _IGNORED_PARAMETERS if name not in properties}
        for name, property_schema in properties.items():
            if name not in schema.get("required", ()):
                properties[name] = {"anyOf": [property_schema, {"type": "null"}]}
        schema["additionalProperties"] = {"type": "null"}
    return components
