"""The syntaxes in which models of different families write tool calls.

A chat template shows only how it writes calls. `template_traits` renders a call with the template,
and the syntax that reads the same call from the output is the one of the model.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.renderers.codec import Control, Piece
from planish.renderers.forms import CallForm, Pattern
from planish.renderers.gemma4_calls import QUOTE, read_gemma4_call
from planish.renderers.messages import Call
from planish.renderers.python_calls import read_python_calls
from planish.renderers.tagged_parser import CallTags, ReadList
from planish.renderers.tool_calls import (
    CALL,
    CALL_END,
    QWEN_CALLS,
    as_text,
    call_fields,
    find_piece,
    read_calls,
    read_json_call,
    read_named_call,
)
from planish.renderers.xml_calls import XML_CALLS, read_xml_call

_Read = tuple[dict[str, Any] | None, str | None]
_ReadAll = tuple[list[dict[str, Any]] | None, str | None]


@dataclass(frozen=True)
class CallSyntax:
    """How a model writes tool calls."""

    name: str
    tags: CallTags | None
    """The tags of calls. None if a message with calls consists of the calls, without tags."""
    read_bare: ReadList | None = field(default=None, repr=False)
    """Reads the text of a message without tags."""
    starts: tuple[str, ...] = ()
    """How a message without tags that has calls begins."""
    form: CallForm | None = None
    """The form for grammars; None if no grammar describes these calls."""

    @property
    def all_tags(self) -> tuple[str, ...]:
        """The texts of all tags."""
        if self.tags is None:
            return ()
        tags = self.tags
        ends = () if tags.end is None else (tags.end,)
        return tuple(tag.text for tag in (tags.begin, *ends, *tags.inner_tags, *tags.section_tags))

    def write(self, call: Call) -> str:
        """Return the text of a call with a JSON object as arguments, in the form for grammars."""
        assert self.form is not None
        before = [piece for piece in self.form.before_arguments if not isinstance(piece, Pattern)]
        return as_text([*self.form.begin, call.name, *before, call.arguments, *self.form.end])

    def read(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Parse the text and the calls of a sampled message. Returns a dictionary with `content`
        and, if there are any, `tool_calls` and `unparsed_tool_calls`. Never raises.
        """
        if self.tags is None:
            return self._read_bare(as_text(pieces))
        tags = self.tags
        pieces = [piece for piece in pieces if piece not in tags.section_tags]
        if tags.read_list is None and tags.end is not None:
            reader = None if tags.read is read_json_call else tags.read
            return read_calls(pieces, reader, tags.begin, tags.end)
        return _read_lists(pieces, tags)

    def _read_bare(self, text: str) -> dict[str, Any]:
        assert self.read_bare is not None
        if not text.strip().startswith(self.starts):
            return {"content": text}
        calls, _ = self.read_bare(text.strip())
        return {"content": text} if calls is None else {"content": "", "tool_calls": calls}


def _read_lists(pieces: Sequence[Piece], tags: CallTags) -> dict[str, Any]:
    """Parse a message whose tags contain several calls, or whose calls have no end tag."""
    assert tags.read_list is not None
    start = find_piece(pieces, tags.begin)
    texts = [as_text(pieces[:start])]
    if start < len(pieces):
        texts = [texts[0].rstrip("\n")]
    calls: list[dict[str, Any]] = []
    unparsed: list[dict[str, str]] = []
    while start < len(pieces):
        ends = (tags.begin,) if tags.end is None else (tags.begin, tags.end)
        end = find_piece(pieces, *ends, start=start + 1)
        is_closed = tags.end is None or (end < len(pieces) and pieces[end] == tags.end)
        inner = as_text(pieces[start + 1 : end])
        found, error = tags.read_list(inner) if is_closed else (None, "the calls are not closed")
        if found is None:
            closing = tags.end.text if tags.end is not None and is_closed else ""
            unparsed.append({"raw_text": tags.begin.text + inner + closing, "error": str(error)})
        calls += found or []
        after = end + 1 if tags.end is not None and is_closed else end
        start = find_piece(pieces, tags.begin, start=after)
        texts.append(as_text(pieces[after:start]).strip())
    return {
        "content": "\n".join([*texts[:1], *filter(None, texts[1:])]),
        **call_fields(calls, unparsed),
    }


def _all(results: Sequence[_Read]) -> _ReadAll:
    calls = [call for call, _ in results if call is not None]
    if len(calls) < len(results) or not calls:
        return None, next((error for _, error in results if error), "there is no call")
    return calls, None


def _read_json_object(value: Any) -> _Read:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, "not a JSON object with a name"
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return read_named_call(value["name"], arguments, _id_of(value))
    text = json.dumps(arguments, ensure_ascii=False)
    return read_named_call(value["name"], text, _id_of(value))


def _id_of(value: dict[str, Any]) -> str | None:
    return value["id"] if isinstance(value.get("id"), str) else None


def read_json_list(text: str) -> _ReadAll:
    """Read one JSON object with a name and arguments, or a list of such objects."""
    try:
        value = json.loads(text.strip())
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"
    return _all([_read_json_object(one) for one in (value if isinstance(value, list) else [value])])


def read_llama_call(text: str) -> _ReadAll:
    """Read the calls of Llama 3: JSON objects with a name and parameters, separated by `;`."""
    decoder = json.JSONDecoder()
    results: list[_Read] = []
    at = 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            if not isinstance(value, dict) or "parameters" not in value:
                return None, "not a JSON object with name and parameters"
            results.append(_read_json_object(value))
            rest = text[at:].lstrip()
            if rest and not rest.startswith(";"):
                return None, "there is text after the call"
            at = len(text) - len(rest.removeprefix(";").lstrip())
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"
    return _all(results)


_MISTRAL_CALL = re.compile(
    r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]([^\[\]]*))?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL
)


def _read_mistral(text: str) -> _ReadAll:
    if text.lstrip().startswith("["):
        return read_json_list(text)
    call = _MISTRAL_CALL.fullmatch(text)
    if call is None:
        return None, "neither a JSON list nor a name with arguments"
    name, id_, arguments = call.groups()
    return _all([read_named_call(name, arguments, id_ or None)])


_GLM_NAME = re.compile(r"\s*([^<\s]+)\s*")
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)


def _read_glm_call(text: str) -> _Read:
    name = _GLM_NAME.match(text)
    if name is None:
        return None, "it has no name"
    arguments: dict[str, Any] = {}
    at = name.end()
    while at < len(text):
        argument = _GLM_ARGUMENT.match(text, at)
        if argument is None:
            return None, "it has text outside of <arg_key> and <arg_value>"
        arguments[argument.group(1)] = _value_of(argument.group(2))
        at = argument.end()
    return read_named_call(name.group(1), json.dumps(arguments, ensure_ascii=False))


def _value_of(text: str) -> object:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


_FENCED_CALL = re.compile(
    r"\s*(?:function)?<｜tool▁sep｜>\s*([^\n`{]+?)\s*\n?```json\n(.*?)\n```\s*", re.DOTALL
)


def _read_fenced_call(text: str) -> _Read:
    call = _FENCED_CALL.fullmatch(text)
    return read_named_call(*call.groups()) if call else (None, "it has no ```json block")


def _listed(name: str, begin: str, end: str | None, read: ReadList, *inner: str) -> CallSyntax:
    tags = CallTags(
        Control(begin),
        None if end is None else Control(end),
        open=None,
        read_list=read,
        inner_tags=tuple(map(Control, inner)),
    )
    return CallSyntax(name, tags)


LLAMA_CALLS = CallForm(
    begin=('{"name": "',), before_arguments=('", "parameters": ',), end=("}",), between=None
)
_DEEPSEEK_SECTION = (Control("<｜tool▁calls▁begin｜>"), Control("<｜tool▁calls▁end｜>"))
SYNTAXES: tuple[CallSyntax, ...] = (
    CallSyntax("json", CallTags(), form=QWEN_CALLS),
    CallSyntax("xml", CallTags(CALL, CALL_END, read_xml_call, None), form=XML_CALLS),
    CallSyntax("arg_key", CallTags(CALL, CALL_END, _read_glm_call, None)),
    CallSyntax(
        "seed xml",
        CallTags(Control("<seed:tool_call>"), Control("</seed:tool_call>"), read_xml_call, None),
    ),
    CallSyntax(
        "fenced json",
        CallTags(
            Control("<｜tool▁call▁begin｜>"),
            Control("<｜tool▁call▁end｜>"),
            _read_fenced_call,
            None,
            (Control("<｜tool▁sep｜>"),),
            _DEEPSEEK_SECTION,
        ),
    ),
    CallSyntax(
        "gemma4",
        CallTags(
            Control("<|tool_call>"),
            Control("<tool_call|>"),
            read_gemma4_call,
            None,
            (Control(QUOTE),),
        ),
    ),
    _listed("json list", "<|tool_call|>", "<|/tool_call|>", read_json_list),
    _listed("open json list", "<|tool_call|>", None, read_json_list),
    _listed("mistral", "[TOOL_CALLS]", None, _read_mistral, "[CALL_ID]", "[ARGS]"),
    _listed("python list", "<|tool_call_start|>", "<|tool_call_end|>", read_python_calls),
    _listed("python lines", "<function_calls>", "</function_calls>", read_python_calls),
    _listed("toolcall", "<TOOLCALL>", "</TOOLCALL>", read_json_list),
    _listed("python tag", "<|python_tag|>", None, read_llama_call),
    CallSyntax("bare json", None, read_llama_call, ("{",), LLAMA_CALLS),
    CallSyntax("bare python list", None, read_python_calls, ("[",)),
)
"""The known syntaxes, the more specific ones first."""
