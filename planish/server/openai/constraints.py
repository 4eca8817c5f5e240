"""The constraint of a request: `response_format`, `structured_outputs`, the `guided_` parameters,
and the tools that the model must call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planish.errors import UserError
from planish.renderers import Renderer
from planish.renderers.grammars import (
    ANY_TEXT,
    CallableTool,
    answer_rules,
    calls_rules,
    json_rule,
    literal,
    message_grammar,
    schema_text,
)
from planish.server.http.openai_errors import UnsupportedParameterError, WrongParameterError
from planish.server.openai.requests import (
    ChatRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    NamedTool,
    Tool,
)
from planish.types import Constraint
from planish.wire.json_pieces import JsonValue

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class AnswerConstraint:
    """A constraint on the answer's text. It is used alone, or as a part of a larger grammar."""

    parameter: str
    """The request parameter that contains the constraint."""
    make: Callable[[], Constraint]
    """Creates the constraint for an answer without reasoning and tool calls."""
    rule: str | None
    """A Lark expression for the text, to be used in a larger grammar. None if the constraint is
    itself a grammar of several rules.
    """


def text_constraint(request: GenerationRequest) -> Constraint | None:
    """Return the constraint of a text completion, or None if the request has no constraint. Raise
    WrongParameterError if the constraint is invalid.
    """
    answer = _answer_constraint(request)
    return None if answer is None else _make_constraint(answer.parameter, answer.make)


def chat_constraint(
    request: ChatRequest, tools: Sequence[Tool], renderer: Renderer
) -> Constraint | None:
    """Return the constraint of a chat message, or None if the request has no constraint. `tools`
    are the tools offered to the model.

    Calls are constrained to the schemas of the tools if the model must call one, if a tool is
    strict, or if `parallel_tool_calls` is false. Raise WrongParameterError if the request has an
    invalid constraint.
    """
    answer = _answer_constraint(request)
    choice = request.tool_choice
    if constrains_calls(request, tools):
        must_call = _must_call(request)
        callable_tools = _callable_tools(tools, choice if must_call else None)
        text_alternative = None if must_call else _grammar_rule(answer) if answer else ANY_TEXT
        # Allow only one call of a named function, as in vLLM. Otherwise a small model could repeat
        # the call until the context is full.
        allows_several = request.parallel_tool_calls and not isinstance(choice, NamedTool)
        rules = calls_rules(
            renderer, callable_tools, several=allows_several, alternative=text_alternative
        )
        return _make_constraint(
            "tools", lambda: Constraint("lark", message_grammar(renderer, rules))
        )
    if answer is None:
        return None
    if not renderer.format.capabilities.samples_thinking:
        return _make_constraint(answer.parameter, answer.make)
    rules = answer_rules(renderer, _grammar_rule(answer))
    return _make_constraint(
        answer.parameter, lambda: Constraint("lark", message_grammar(renderer, rules))
    )


def constrains_calls(request: ChatRequest, tools: Sequence[Tool]) -> bool:
    """Return whether tool calls are constrained, so that the model cannot write an invalid one."""
    if _must_call(request):
        return True
    is_strict = any(tool.function.strict for tool in tools)
    return bool(tools) and (
        _answer_constraint(request) is not None or not request.parallel_tool_calls or is_strict
    )


def _must_call(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def error_for_client(error: UserError, request: GenerationRequest) -> UserError:
    """Return the error to send for an engine's `error`. If the engine rejected the constraint, the
    returned WrongParameterError names the request parameter that contains the constraint.
    """
    if not str(error).startswith("SamplingParams.constraint"):
        return error
    answer = _answer_constraint(request)
    name = answer.parameter if answer else "tools"
    return WrongParameterError(name, str(error).replace("SamplingParams.constraint", name))


def _callable_tools(tools: Sequence[Tool], choice: object) -> list[CallableTool]:
    """Return the tools that the model may call: all, or only the one that `choice` names."""
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [one for one in functions if one.name == choice.function.name]
        if not functions:
            raise WrongParameterError(
                "tool_choice",
                f"tool_choice names {choice.function.name[:80]!r}, which is not in tools; name one "
                "of them",
            )
    if not functions:
        raise WrongParameterError("tool_choice", "tool_choice needs tools; give at least one")
    return [CallableTool(one.name, one.parameters or {}, bool(one.strict)) for one in functions]


def _grammar_rule(answer: AnswerConstraint) -> str:
    if answer.rule is None:
        raise UnsupportedParameterError(
            answer.parameter,
            "a grammar cannot be combined with tools or with reasoning; leave tools out, and give "
            'chat_template_kwargs={"enable_thinking": false}',
        )
    return answer.rule


def _make_constraint(parameter: str, make: Callable[[], Constraint]) -> Constraint:
    try:
        return make()
    except UserError as error:
        raise WrongParameterError(
            parameter, str(error).replace("Constraint.text", parameter)
        ) from None


def _answer_constraint(request: GenerationRequest) -> AnswerConstraint | None:
    """Return the request's constraint on the answer's text, or None if it has none. Raise
    WrongParameterError if two parameters constrain the text.
    """
    constraints = [
        *_from_response_format(request),
        *_from_structured_outputs(request),
        *_from_guided_parameters(request),
    ]
    if len(constraints) > 1:
        raise WrongParameterError(
            constraints[1].parameter,
            f"{constraints[0].parameter} and {constraints[1].parameter} both constrain the "
            "answer; give one",
        )
    return constraints[0] if constraints else None


def _from_response_format(request: GenerationRequest) -> list[AnswerConstraint]:
    match request.response_format:
        case JsonObjectFormat():
            return [_json_constraint("response_format", _ANY_OBJECT)]
        case JsonSchemaFormat(json_schema=named):
            return [_json_constraint("response_format", named.schema_, bool(named.strict))]
        case _:
            return []


def _from_structured_outputs(request: GenerationRequest) -> list[AnswerConstraint]:
    outputs = request.structured_outputs
    if outputs is None:
        return []
    name = "structured_outputs"
    constraints = _from_values(name, outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
    if outputs.json_object:
        constraints.append(_json_constraint(name, _ANY_OBJECT))
    if not constraints:
        raise WrongParameterError(
            name, f"{name} is empty; give json, json_object, regex, choice or grammar"
        )
    return constraints


def _from_guided_parameters(request: GenerationRequest) -> list[AnswerConstraint]:
    return [
        *_from_values("guided_json", request.guided_json, None, None, None),
        *_from_values("guided_regex", None, request.guided_regex, None, None),
        *_from_values("guided_choice", None, None, request.guided_choice, None),
        *_from_values("guided_grammar", None, None, None, request.guided_grammar),
    ]


def _from_values(
    parameter: str,
    schema: JsonSchema | None,
    regex: str | None,
    choices: list[str] | None,
    grammar: str | None,
) -> list[AnswerConstraint]:
    constraints: list[AnswerConstraint] = []
    if schema is not None:
        constraints.append(_json_constraint(parameter, _parse_schema(parameter, schema)))
    if regex is not None:
        escaped_regex = regex.replace("\\/", "/").replace("/", "\\/")
        constraints.append(
            AnswerConstraint(parameter, lambda: Constraint("regex", regex), f"/{escaped_regex}/")
        )
    if choices is not None:
        rule = f"({' | '.join(map(literal, choices))})"
        constraints.append(
            AnswerConstraint(parameter, lambda: Constraint("choice", choices=choices), rule)
        )
    if grammar is not None:
        constraints.append(AnswerConstraint(parameter, lambda: Constraint("lark", grammar), None))
    return constraints


def _json_constraint(
    parameter: str, schema: dict[str, Any], strict: bool = False
) -> AnswerConstraint:
    text = schema_text(schema, strict)
    return AnswerConstraint(
        parameter, lambda: Constraint("json_schema", text), json_rule(schema, strict)
    )


def _parse_schema(parameter: str, schema: JsonSchema) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        parsed: JsonValue = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise WrongParameterError(parameter, f"{parameter} is not a JSON schema; give an object")
    return parsed
