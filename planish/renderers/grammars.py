r"""Grammars of assistant messages, for constrained sampling in a renderer's chat format.

A grammar is a text in the Lark dialect of `llguidance`. Its rule `content` matches the text or the
tool calls of the message. If the renderer supports thinking, a think block may come before
`content`. A tag of the chat format, such as `<tool_call>`, is a single token if the vocabulary
contains it, and ordinary text otherwise. Prompts are written by the same rule.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.errors import UnsupportedError
from planish.renderers.codec import Control
from planish.renderers.messages import MODELS_WITH_TOOLS
from planish.renderers.renderer import Renderer
from planish.renderers.tool_calls import CALL, CALL_END, call_opening

ANY_TEXT = r"/(.|\n)*/"
"""The Lark expression for unconstrained text."""
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON is written in one line, with at most one space after each comma and colon. The engine uses
the same options for JSON constraints. If any white space were allowed, a model could write only
white space up to `max_tokens`.
"""
_THINK, _THINK_END = Control("<think>"), Control("</think>")


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
    if not renderer.format.abilities.samples_thinking:
        return f"start: content\n{rules}"
    begin, end = _mark(renderer, _THINK), _mark(renderer, _THINK_END)
    if end.startswith("<"):
        thought = f"thought: {ANY_TEXT} {end}\n"
    else:
        thought = f"thought[suffix={end}]: {ANY_TEXT}\n"
    return f'start: (think "\\n\\n")? content\nthink: {begin} thought\n{thought}{rules}'


def calls_rules(
    renderer: Renderer,
    tools: Sequence[CallableTool],
    *,
    several: bool = True,
    instead: str | None = None,
) -> str:
    """Return the rule `content` for one tool call, or with `several` for one or more.

    If `instead` is None, the message must consist of calls. If `instead` is ANY_TEXT, the message
    is any text, which may end with calls. If `instead` is another Lark expression, the message is
    either calls or a match of that expression. UnsupportedError if the chat format has no tools.
    """
    if not renderer.format.abilities.tools:
        raise UnsupportedError(
            f"renderer {renderer.name} has no form for tool calls; use {MODELS_WITH_TOOLS}"
        )
    opening, closing = _mark(renderer, CALL), _mark(renderer, CALL_END)
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        # Arguments must be a JSON object even if the schema does not state a type.
        schema = {"type": "object", **tool.parameters}
        arguments = json_rule(schema, tool.strict)
        rules.append(
            f"call_{number}: {literal(call_opening(tool.name))} {arguments} {literal('}' + chr(10))}"
        )
    more = f' ("\\n" {opening} call {closing})*' if several else ""
    calls = f"call {closing}{more}"
    if instead is None:
        content = f"content: {opening} {calls}"
    elif instead != ANY_TEXT:
        content = f"content: {opening} {calls} | {instead}"
    elif opening.startswith("<"):
        content = f"content: TEXT | TEXT {opening} {calls}\nTEXT: {ANY_TEXT}"
    else:
        content = f"content: TEXT | lead {calls}\nlead[lazy]: TEXT {opening}\nTEXT: {ANY_TEXT}"
    return "\n".join([content, *rules])


def _mark(renderer: Renderer, mark: Control) -> str:
    """Return the Lark expression for a tag: its token id if it is a single token, else its text."""
    id_ = renderer.codec.control_id(mark.text)
    return literal(mark.text) if id_ is None else f"<[{id_}]>"
