r"""Grammars of assistant messages, for constrained sampling in a renderer's chat format.

A grammar is a text in the Lark dialect of `llguidance`. Its rule `content` matches the text or the
tool calls of the message. If the renderer supports thinking, reasoning may come before `content`.
If the prompt opens the think block, the reasoning is required. A tag of the chat format, such as
`<tool_call>`, is a single token if the vocabulary contains it, and ordinary text otherwise. Prompts
contain the tags in the same form.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.errors import UnsupportedError
from planish.renderers.codec import Control, Piece
from planish.renderers.forms import Pattern
from planish.renderers.messages import RENDERERS_WITH_TOOLS
from planish.renderers.renderer import Renderer

ANY_TEXT = r"/(.|\n)*/"
"""The Lark expression for unconstrained text."""
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON is written in one line, with at most one space after each comma and colon. The engine uses
the same options for JSON constraints. If white space of any length were allowed, a model could
write nothing but white space until `max_tokens`.
"""


@dataclass(frozen=True)
class CallableTool:
    """A tool that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of the tool's arguments."""
    strict: bool = False
    """Whether to reject a schema that has an unknown keyword. Otherwise the keyword is ignored."""


def json_rule(schema: Mapping[str, Any], strict: bool) -> str:
    """Return the Lark expression for JSON that `schema` accepts. Without `strict`, schema keywords
    that llguidance does not know are ignored.
    """
    return f"%json {schema_text(schema, strict)}"


def schema_text(schema: Mapping[str, Any], strict: bool) -> str:
    """Return a JSON schema as text, with llguidance's options for white space and keywords."""
    return json.dumps({**schema, "x-guidance": {**_JSON_OPTIONS, "lenient": not strict}})


def literal(text: str) -> str:
    """Return the Lark expression that matches exactly `text`."""
    return json.dumps(text, ensure_ascii=False)


def message_grammar(renderer: Renderer, rules: str) -> str:
    """Return the grammar of a message. `rules` are Lark rules, one of which defines `content`."""
    capabilities = renderer.format.capabilities
    if not capabilities.samples_thinking:
        return f"start: content\n{rules}"
    first, *rest = capabilities.thought.end
    end = _lark(renderer, [first])
    if end.startswith("<"):
        thought = f"thought: {ANY_TEXT} {end}\n"
    else:
        thought = f"thought[suffix={end}]: {ANY_TEXT}\n"
    after_thought = _lark(renderer, rest)
    if not capabilities.thought.begin:
        return f"start: thought {after_thought} content\n{thought}{rules}"
    begin = _lark(renderer, capabilities.thought.begin)
    return f"start: (think {after_thought})? content\nthink: {begin} thought\n{thought}{rules}"


def answer_rules(renderer: Renderer, rule: str) -> str:
    """Return the rule `content` for an answer that matches the Lark expression `rule`."""
    calls = renderer.format.capabilities.calls
    return f"content: {_lark(renderer, calls.answer if calls else ())} {rule}\n"


def calls_rules(
    renderer: Renderer,
    tools: Sequence[CallableTool],
    *,
    several: bool = True,
    alternative: str | None = None,
) -> str:
    """Return the rule `content` for a message with tool calls.

    `several`: whether the message may have more than one call.

    If `alternative` is None, the message must consist of calls. If `alternative` is ANY_TEXT, the
    message is any text, which may end with calls. If `alternative` is another Lark expression, the
    message is either calls or a match of that expression. Raises UnsupportedError if the chat
    format has no tools.
    """
    form = renderer.format.capabilities.calls
    if form is None and renderer.format.capabilities.has_tools:
        raise UnsupportedError(
            f"renderer {renderer.name} has tools, but no grammar describes the calls of its chat "
            "template; let tool calls be unconstrained (tool_choice 'auto', parallel calls, no "
            "strict tools, no response_format)"
        )
    if form is None:
        raise UnsupportedError(
            f"renderer {renderer.name} has no form for tool calls; use {RENDERERS_WITH_TOOLS}"
        )
    # The first piece of the first call marks the end of the text before it.
    first, *opening = [*form.opening, *form.begin]
    first_mark, begin = _lark(renderer, [first]), _lark(renderer, form.begin)
    first_call = f"{_lark(renderer, opening)} call"
    further_calls = ""
    if several and form.between is not None:
        further_calls = f" ({_lark(renderer, form.between)} {begin} call)*"
    calls = f"{first_call}{further_calls} {_lark(renderer, form.closing)}"
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        rules.append(
            f"call_{number}: {literal(tool.name)} {_lark(renderer, form.before_arguments)} "
            f"arguments_{number} {_lark(renderer, form.end)}"
        )
        # Arguments must be a JSON object even if the schema does not state a type.
        schema = {"type": "object", **tool.parameters}
        if form.xml:
            rules.append(f"arguments_{number}: {_xml_arguments(schema, tool.strict)}")
        else:
            rules.append(f"arguments_{number}: {json_rule(schema, tool.strict)}")
    if form.xml:
        rules.append(f"xml_text[suffix={literal(_XML_END)}]: {ANY_TEXT}")
    lead = _lark(renderer, form.lead)
    if alternative is None:
        content = f"content: {lead} {first_mark} {calls}"
    elif alternative != ANY_TEXT or form.answer:
        content = (
            f"content: {lead} {first_mark} {calls} | {_lark(renderer, form.answer)} {alternative}"
        )
    elif first_mark.startswith("<"):
        content = f"content: TEXT | TEXT {first_mark} {calls}\nTEXT: {ANY_TEXT}"
    else:
        content = f"content: TEXT | lead {calls}\nlead[lazy]: TEXT {first_mark}\nTEXT: {ANY_TEXT}"
    return "\n".join([content, *rules])


_XML_END = "\n</parameter>\n"


def _xml_arguments(schema: Mapping[str, Any], strict: bool) -> str:
    """Return the Lark expression for the arguments as XML elements, in the schema's order."""
    properties = schema.get("properties") or {}
    if not properties:
        # By default, a schema without properties accepts any object.
        is_open = schema.get("additionalProperties", True) is not False
        return r'("<parameter=" /[^<>\n]+/ ">\n" xml_text)*' if is_open else '""'
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    arguments = []
    for name, value in properties.items():
        is_text = isinstance(value, Mapping) and value.get("type") == "string"
        if is_text and "enum" in value:
            options = " | ".join(literal(str(option)) for option in value["enum"])
            text = f"({options}) {literal(_XML_END)}"
        elif is_text:
            text = "xml_text"
        else:
            rule = json_rule({**definitions, **value} if isinstance(value, Mapping) else {}, strict)
            text = f"{rule} {literal(_XML_END)}"
        argument = f"{literal(f'<parameter={name}>' + chr(10))} {text}"
        arguments.append(argument if name in schema.get("required", ()) else f"({argument})?")
    return " ".join(arguments)


def _lark(renderer: Renderer, pieces: Sequence[Piece | Pattern]) -> str:
    """Return the Lark expression for pieces. A control is its token id if it is a single token,
    and its text otherwise.
    """
    expressions: list[str] = []
    for piece in pieces:
        if isinstance(piece, Pattern):
            expressions.append(f"/{piece.regex}/")
        elif isinstance(piece, Control):
            id_ = renderer.codec.control_id(piece.text)
            expressions.append(literal(piece.text) if id_ is None else f"<[{id_}]>")
        else:
            expressions.append(literal(piece))
    return " ".join(expressions)
