"""Tool calls as the Qwen families write them: JSON between `<tool_call>` tags, and results between
`<tool_response>` tags.

Arguments are kept as the text of a JSON object, so that a parsed call renders to the same text. A
call that is not valid JSON of this form becomes an entry of `unparsed_tool_calls` with its text and
the error. Parsing never raises, whatever the model wrote.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from planish.renderers.codec import Control, Piece, split_text
from planish.renderers.forms import CallForm
from planish.renderers.messages import Call, CheckedMessage, half_character

CALL, CALL_END = Control("<tool_call>"), Control("</tool_call>")
RESPONSE, RESPONSE_END = Control("<tool_response>"), Control("</tool_response>")
CALL_TAGS = (CALL.text, CALL_END.text)
QWEN_CALLS = CallForm(
    begin=(CALL, '\n{"name": "'),
    before_arguments=('", "arguments": ',),
    end=("}\n", CALL_END),
    between=("\n",),
)

# The exact wording of the chat templates, because the models were trained on it.
TOOLS_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_CONCLUSION: tuple[Piece, ...] = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within ",
    CALL,
    CALL_END,
    " XML tags:\n",
    CALL,
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    CALL_END,
)

# Calls of this form keep the text of their arguments unchanged.
VERBATIM_CALL = re.compile(r'\s*\{"name": "[^"\\]+", "arguments": (\{.*\})\}\s*', re.DOTALL)


def tools_pieces(system: str | None, tools: Sequence[str]) -> tuple[Piece, ...]:
    """Return the text of a system message that offers `tools`, each a JSON text. `system` is the
    text before them; None = there is none.
    """
    lead = f"{system}\n\n" if system is not None else ""
    return (lead + TOOLS_INTRODUCTION, *(f"\n{tool}" for tool in tools), *TOOLS_CONCLUSION)


def call_pieces(message: CheckedMessage) -> list[Piece]:
    """Return the tool calls that follow an assistant message's text. Unparsed calls come last, in
    the model's own wording.
    """
    calls: list[Sequence[Piece]] = [
        (CALL, f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n', CALL_END)
        for call in message.calls
    ]
    calls += [raw_call_pieces(raw, CALL, CALL_END) for raw in message.unparsed_calls]
    pieces: list[Piece] = []
    for number, call in enumerate(calls):
        pieces += ["\n" if number or message.text else "", *call]
    return pieces


def raw_call_pieces(
    raw: str, begin: Control, end: Control, marks: Sequence[str] = ()
) -> list[Piece]:
    """Return a call in the model's own wording, with its tags and `marks` as control tokens."""
    inner = raw.removeprefix(begin.text)
    closing = [end] if inner.endswith(end.text) else []
    return [begin, *split_text(inner.removesuffix(end.text), marks), *closing]


def response_pieces(text: str) -> tuple[Piece, ...]:
    """Return the text of a tool result between its tags."""
    return (RESPONSE, f"\n{text}\n", RESPONSE_END)


def as_text(pieces: Sequence[Piece]) -> str:
    """Return the text of pieces, with the text of each control."""
    return "".join(piece.text if isinstance(piece, Control) else piece for piece in pieces)


def find_piece(pieces: Sequence[Piece], *wanted: Control, start: int = 0) -> int:
    """Return the index of the first piece, from `start` on, that is one of `wanted`.

    Return len(pieces) if there is none.
    """
    return next((at for at in range(start, len(pieces)) if pieces[at] in wanted), len(pieces))


_REST_OF_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*\\?')
"""The rest of a JSON string, without the quotation mark at its end."""


def _find_call_end(pieces: Sequence[Piece], tags: Sequence[Control], start: int) -> int:
    """Return the index of the first of `tags`, from `start` on, that is outside of the strings of a
    JSON text. Return len(pieces) if there is none.

    A string cannot contain a line break. So where a quotation mark is missing, the tag after the
    next line break ends the call, and what follows is read as usual.
    """
    first_tag: int | None = None
    in_string = False
    for index in range(start, len(pieces)):
        piece = pieces[index]
        if isinstance(piece, Control) and piece in tags:
            if not in_string:
                return index
            first_tag = index if first_tag is None else first_tag
            continue
        text, position = as_text([piece]), 0
        while position < len(text):
            if not in_string:
                quote = text.find('"', position)
                in_string, position = quote >= 0, quote + 1 if quote >= 0 else len(text)
                continue
            found = _REST_OF_STRING.match(text, position)
            assert found is not None
            position = found.end()
            if position < len(text):
                if text[position] != '"':  # a line break or another control character
                    return (
                        first_tag
                        if first_tag is not None
                        else find_piece(pieces, *tags, start=index)
                    )
                in_string, position = False, position + 1
    return len(pieces)


ReadCall = Callable[[str], tuple[dict[str, Any] | None, str | None]]
"""Reads the text of a call between its tags. Returns (call, None) or (None, error)."""


def read_calls(
    pieces: Sequence[Piece],
    read_call: ReadCall | None = None,
    begin: Control = CALL,
    end: Control = CALL_END,
) -> dict[str, Any]:
    """Parse the text and the tool calls of a sampled message. Returns a dictionary with `content`
    and, if there are any, `tool_calls` and `unparsed_tool_calls`. Without `read_call`, calls are
    JSON, and tags inside of its strings are text.
    """
    start = find_piece(pieces, begin)
    if start == len(pieces):
        return {"content": as_text(pieces)}
    # The line break before the first call belongs to the call. White space between calls has no
    # meaning.
    texts = [as_text(pieces[:start]).removesuffix("\n")]
    calls: list[dict[str, Any]] = []
    unparsed: list[dict[str, str]] = []
    while start < len(pieces):
        if read_call is None:
            call_end = _find_call_end(pieces, (begin, end), start + 1)
        else:
            call_end = find_piece(pieces, begin, end, start=start + 1)
        inner = as_text(pieces[start + 1 : call_end])
        is_closed = call_end < len(pieces) and pieces[call_end] == end
        call, error = (
            (read_call or read_json_call)(inner) if is_closed else (None, "the call is not closed")
        )
        if call is not None:
            calls.append(call)
        else:
            raw = begin.text + inner + (end.text if is_closed else "")
            unparsed.append({"raw_text": raw, "error": str(error)})
        next_position = call_end + 1 if is_closed else call_end
        start = find_piece(pieces, begin, start=next_position)
        texts.append(as_text(pieces[next_position:start]).strip())
    return {
        "content": "\n".join([*texts[:1], *filter(None, texts[1:])]),
        **call_fields(calls, unparsed),
    }


def call_fields(
    calls: list[dict[str, Any]], unparsed: list[dict[str, str]]
) -> dict[str, list[Any]]:
    """Return the fields of a message for its calls. Empty lists are left out."""
    fields = {"tool_calls": calls, "unparsed_tool_calls": unparsed}
    return {name: value for name, value in fields.items() if value}


def read_named_call(
    name: str, arguments: str, id_: str | None = None
) -> tuple[dict[str, Any] | None, str | None]:
    """Return (call, None) for a function's name and the text of its arguments.

    Return (None, error) if the name needs escaping or the text is not a JSON object.
    """
    arguments = arguments.strip()
    value, error = _parse_json(arguments)
    if error is not None:
        return None, error
    if not name or half_character(name) or json.dumps(name, ensure_ascii=False) != f'"{name}"':
        return None, f"the name {name!r} is empty or needs escaping"
    if not isinstance(value, dict):
        return None, "the arguments are not a JSON object"
    named: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return named if id_ is None else {**named, "id": id_}, None


def has_calls(message: CheckedMessage) -> bool:
    """Return whether an assistant message calls tools."""
    return bool(message.calls or message.unparsed_calls)


def last_answer_index(messages: Sequence[CheckedMessage]) -> int:
    """Return the index of the last assistant message without tool calls; -1 if there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "assistant" and not has_calls(messages[index]):
            return index
    return -1


def answered_call(messages: Sequence[CheckedMessage], index: int) -> Call | None:
    """Return the call that the tool result messages[index] answers, or None if there is none.

    Among the calls of the last assistant message, this is the call with the result's id. If no call
    has that id, it is the call at the same position as the result.
    """
    first_result = index
    while first_result and messages[first_result - 1].role == "tool":
        first_result -= 1
    calls = messages[first_result - 1].calls if first_result else ()
    call_id = messages[index].call_id
    by_id = next((call for call in calls if call_id and call.id == call_id), None)
    if by_id is not None or index - first_result >= len(calls):
        return by_id
    return calls[index - first_result]


def read_json_call(inner: str) -> tuple[dict[str, Any] | None, str | None]:
    """Read the text of a JSON call between its tags. Returns (call, None) or (None, error)."""
    call, error = _parse_json(inner)
    if error is not None:
        return None, error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None, "not a JSON object with a name"
    arguments = call.get("arguments", {})
    text = json.dumps(arguments, ensure_ascii=False)
    plain = VERBATIM_CALL.fullmatch(inner)
    if plain and set(call) == {"name", "arguments"}:
        # If the call repeats a key, the pattern may match more than the arguments.
        is_verbatim = _parse_json(plain.group(1)) == (arguments, None)
        text = plain.group(1) if is_verbatim else text
    return read_named_call(call["name"], text)


def _parse_json(text: str) -> tuple[Any, str | None]:
    """Return (value, None), or (None, error) if the text is not JSON or has half a character."""
    try:
        value = json.loads(text)
        half = half_character(json.dumps(value, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"
    if half is not None:
        return None, f"{half!r} is half of a character"
    return value, None
