"""Tool calls as the Qwen families write them: JSON between `<tool_call>` tags, and results between
`<tool_response>` tags.

Arguments are kept as the text of a JSON object, so that a parsed call renders to the same text. A
call that is not valid JSON of this form becomes an entry of `unparsed_tool_calls` with its text and
the error. Parsing never raises, whatever the model wrote.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from planish.renderers.codec import Control, Piece
from planish.renderers.messages import Checked, half_character

CALL, CALL_END = Control("<tool_call>"), Control("</tool_call>")
RESPONSE, RESPONSE_END = Control("<tool_response>"), Control("</tool_response>")
CALL_TAGS = (CALL.text, CALL_END.text)

# The exact wording of the chat templates, because the models were trained on it.
TOOLS_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_CONCLUSION: tuple[Piece, ...] = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    CALL,
    CALL_END,
    " XML tags:\n",
    CALL,
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    CALL_END,
)

# Calls of this form keep the text of their arguments unchanged.
PLAIN_CALL = re.compile(r'\s*\{"name": "[^"\\]+", "arguments": (\{.*\})\}\s*', re.DOTALL)


def tools_pieces(system: str, tools: Sequence[str]) -> tuple[Piece, ...]:
    """Return the text of a system message that offers `tools`, each a JSON text."""
    lead = f"{system}\n\n" if system else ""
    return (lead + TOOLS_INTRODUCTION, *(f"\n{tool}" for tool in tools), *TOOLS_CONCLUSION)


def call_pieces(message: Checked) -> list[Piece]:
    """Return the tool calls that follow an assistant message's text. Unparsed calls come last, in
    the model's own wording.
    """
    pieces: list[Piece] = []
    for number, (name, arguments) in enumerate(message.calls):
        separator = "\n" if number or message.text else ""
        pieces += [separator, CALL, f"{call_opening(name)}{arguments}}}\n", CALL_END]
    for number, raw in enumerate(message.unparsed_calls):
        inner = raw.removeprefix(CALL.text)
        closing = [CALL_END] if inner.endswith(CALL_END.text) else []
        separator = "\n" if number or message.calls or message.text else ""
        pieces += [separator, CALL, inner.removesuffix(CALL_END.text), *closing]
    return pieces


def call_opening(name: str) -> str:
    """Return the text of a call between its opening tag and its arguments."""
    return f'\n{{"name": "{name}", "arguments": '


def response_pieces(text: str) -> tuple[Piece, ...]:
    return (RESPONSE, f"\n{text}\n", RESPONSE_END)


def as_text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text if isinstance(piece, Control) else piece for piece in pieces)


def read_calls(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Parse the text and the tool calls of a sampled message. Returns a dictionary with `content`
    and, if there are any, `tool_calls` and `unparsed_tool_calls`.
    """
    start = next((at for at, piece in enumerate(pieces) if piece == CALL), len(pieces))
    if start == len(pieces):
        return {"content": as_text(pieces)}
    # The line break before the first call belongs to the call. White space between calls has no
    # meaning.
    texts = [as_text(pieces[:start]).removesuffix("\n")]
    calls: list[dict[str, Any]] = []
    unparsed: list[dict[str, str]] = []
    while start < len(pieces):
        end = next(
            (at for at in range(start + 1, len(pieces)) if pieces[at] in (CALL, CALL_END)),
            len(pieces),
        )
        inner = as_text(pieces[start + 1 : end])
        closed = end < len(pieces) and pieces[end] == CALL_END
        call, error = _read_call(inner) if closed else (None, "the call is not closed")
        if call is not None:
            calls.append(call)
        else:
            unparsed.append(
                {
                    "raw_text": CALL.text + inner + (CALL_END.text if closed else ""),
                    "error": str(error),
                }
            )
        after = end + 1 if closed else end
        start = next((at for at in range(after, len(pieces)) if pieces[at] == CALL), len(pieces))
        texts.append(as_text(pieces[after:start]).strip())
    message: dict[str, Any] = {"content": "\n".join([*texts[:1], *filter(None, texts[1:])])}
    if calls:
        message["tool_calls"] = calls
    if unparsed:
        message["unparsed_tool_calls"] = unparsed
    return message


def _read_call(inner: str) -> tuple[dict[str, Any] | None, str | None]:
    try:
        call = json.loads(inner)
        half = half_character(json.dumps(call, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"
    if half is not None:
        return None, f"{half!r} is half of a character"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None, "not a JSON object with a name"
    name, arguments = call["name"], call.get("arguments", {})
    if not name or json.dumps(name, ensure_ascii=False) != f'"{name}"':
        return None, f"the name {name!r} is empty or needs escaping"
    if not isinstance(arguments, dict):
        return None, "the arguments are not a JSON object"
    plain = PLAIN_CALL.fullmatch(inner)
    # If the call has further keys or repeated ones, the pattern may match more than the arguments.
    verbatim = (
        plain.group(1)
        if plain and set(call) == {"name", "arguments"} and _same(plain.group(1), arguments)
        else None
    )
    text = verbatim if verbatim is not None else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": name, "arguments": text}}, None


def _same(text: str, value: object) -> bool:
    try:
        return json.loads(text) == value
    except ValueError:
        return False
