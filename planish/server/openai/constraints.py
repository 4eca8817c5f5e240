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
from planish.server.http.context import UnsupportedParameterError, WrongParameterError
from planish.server.openai.requests import (
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    SampleRequest,
    Schema,
    Tool,
)
from planish.types import Constraint

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Answer:
    """A constraint on the answer's text. It is used alone, or as a part of a larger grammar."""

    parameter: str
    """The request parameter that contains the constraint."""
    constraint: Callable[[], Constraint]
    """Creates the constraint for an answer without reasoning and tool calls."""
    rule: str | None
    """A Lark expression for the text, to be used in a larger grammar. None if the constraint is
    itself a grammar of several rules.
    """


def text_constraint(request: SampleRequest) -> Constraint | None:
    """Return the constraint of a text completion, or None if the request has no constraint. Raise
    WrongParameterError if the constraint is invalid.
    """
    answer = _answer(request)
    return None if answer is None else _checked(answer.parameter, answer.constraint)


def chat_constraint(
    request: ChatRequest, tools: Sequence[Tool], renderer: Renderer
) -> Constraint | None:
    """Return the constraint of a chat message, or None if the request has no constraint. `tools`
    are the tools offered to the model.

    Calls are constrained to the schemas of the tools if the model must call one, if a tool is
    strict, or if `parallel_tool_calls` is false. Raise WrongParameterError if the request has an
    invalid constraint.
    """
    answer = _answer(request)
    choice = request.tool_choice
    if constrains_calls(request, tools):
        must_call = _must_call(request)
        callable_tools = _callable(tools, choice if must_call else None)
        instead = None if must_call else _rule(answer) if answer else ANY_TEXT
        # Allow only one call of a named function, as in vLLM. Otherwise a small model could repeat
        # the call until the context is full.
        several = request.parallel_tool_calls and not isinstance(choice, NamedTool)
        rules = calls_rules(renderer, callable_tools, several=several, instead=instead)
        return _checked("tools", lambda: Constraint("lark", message_grammar(renderer, rules)))
    if answer is None:
        return None
    if not renderer.format.abilities.samples_thinking:
        return _checked(answer.parameter, answer.constraint)
    rules = answer_rules(renderer, _rule(answer))
    return _checked(answer.parameter, lambda: Constraint("lark", message_grammar(renderer, rules)))


def constrains_calls(request: ChatRequest, tools: Sequence[Tool]) -> bool:
    """Return whether tool calls are constrained, so that the model cannot write an invalid one."""
    if _must_call(request):
        return True
    is_strict = any(tool.function.strict for tool in tools)
    return bool(tools) and (
        _answer(request) is not None or not request.parallel_tool_calls or is_strict
    )


def _must_call(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def named(error: UserError, request: SampleRequest) -> UserError:
    """Return the error to send for an engine's `error`. If the engine rejected the constraint, the
    returned WrongParameterError names the request parameter that contains the constraint.
    """
    if not str(error).startswith("SamplingParams.constraint"):
        return error
    answer = _answer(request)
    name = answer.parameter if answer else "tools"
    return WrongParameterError(name, str(error).replace("SamplingParams.constraint", name))


def _callable(tools: Sequence[Tool], choice: object) -> list[CallableTool]:
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


def _rule(answer: Answer) -> str:
    if answer.rule is None:
        raise UnsupportedParameterError(
            answer.parameter,
            "a grammar cannot be combined with tools or with reasoning; leave tools out, and give "
            'chat_template_kwargs={"enable_thinking": false}',
        )
    return answer.rule


def _checked(parameter: str, make: Callable[[], Constraint]) -> Constraint:
    try:
        return make()
    except UserError as error:
        raise WrongParameterError(
            parameter, str(error).replace("Constraint.text", parameter)
        ) from None


def _answer(request: SampleRequest) -> Answer | None:
    """Return the request's constraint on the answer's text, or None if it has none. Raise
    WrongParameterError if two parameters constrain the text.
    """
    found = [*_format(request), *_structured(request), *_guided(request)]
    if len(found) > 1:
        raise WrongParameterError(
            found[1].parameter,
            f"{found[0].parameter} and {found[1].parameter} both constrain the answer; give one",
        )
    return found[0] if found else None


def _format(request: SampleRequest) -> list[Answer]:
    match request.response_format:
        case JsonObjectFormat():
            return [_json("response_format", _ANY_OBJECT)]
        case JsonSchemaFormat(json_schema=named):
            return [_json("response_format", named.schema_, bool(named.strict))]
    return []


def _structured(request: SampleRequest) -> list[Answer]:
    given = request.structured_outputs
    if given is None:
        return []
    name = "structured_outputs"
    found = _all_of(name, given.json_, given.regex, given.choice, given.grammar)
    if given.json_object:
        found.append(_json(name, _ANY_OBJECT))
    if not found:
        raise WrongParameterError(
            name, f"{name} is empty; give json, json_object, regex, choice or grammar"
        )
    return found


def _guided(request: SampleRequest) -> list[Answer]:
    return [
        *_all_of("guided_json", request.guided_json, None, None, None),
        *_all_of("guided_regex", None, request.guided_regex, None, None),
        *_all_of("guided_choice", None, None, request.guided_choice, None),
        *_all_of("guided_grammar", None, None, None, request.guided_grammar),
    ]


def _all_of(
    name: str,
    schema: Schema | None,
    regex: str | None,
    choices: list[str] | None,
    grammar: str | None,
) -> list[Answer]:
    found = []
    if schema is not None:
        found.append(_json(name, _parsed(name, schema)))
    if regex is not None:
        slashes = regex.replace("\\/", "/").replace("/", "\\/")
        found.append(Answer(name, lambda: Constraint("regex", regex), f"/{slashes}/"))
    if choices is not None:
        rule = f"({' | '.join(map(literal, choices))})"
        found.append(Answer(name, lambda: Constraint("choice", choices=choices), rule))
    if grammar is not None:
        found.append(Answer(name, lambda: Constraint("lark", grammar), None))
    return found


def _json(name: str, schema: dict[str, Any], strict: bool = False) -> Answer:
    text = schema_text(schema, strict)
    return Answer(name, lambda: Constraint("json_schema", text), json_rule(schema, strict))


def _parsed(name: str, schema: Schema) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise WrongParameterError(name, f"{name} is not a JSON schema; give an object")
    return parsed
