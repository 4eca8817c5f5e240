"""Tool calls as Qwen3.5 and Nemotron 3 write them: `<function=name>` with one `<parameter=name>`
element for each argument, between `<tool_call>` tags.

Strings are written without quotes. So a string that looks like JSON (`1`, `true`) is read back as
the JSON value. Only the tool's schema could tell the two apart, and the parser does not have it.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from planish.renderers.codec import Piece
from planish.renderers.forms import CallForm
from planish.renderers.messages import Call, CheckedMessage
from planish.renderers.tool_calls import CALL, CALL_END, raw_call_pieces, read_named_call

XML_CALLS = CallForm(
    begin=(CALL, "\n<function="),
    before_arguments=(">\n",),
    end=("</function>\n", CALL_END),
    between=("\n",),
    xml=True,
)

# The exact wording of the chat templates, because the models were trained on it.
TOOLS_INTRODUCTION = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
TOOLS_CONCLUSION: tuple[Piece, ...] = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO "
    "suffix:\n\n",
    CALL,
    "\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\n"
    "multiple lines\n</parameter>\n</function>\n",
    CALL_END,
    "\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner "
    "<function=...></function> block must be nested within ",
    CALL,
    CALL_END,
    " XML tags\n- Required parameters MUST be specified\n- You may provide optional reasoning for "
    "your function call in natural language BEFORE the function call, but NOT after\n- If there is "
    "no function call available, answer the question like normal with your current knowledge and "
    "do not tell the user about function calls\n</IMPORTANT>",
)

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def python_text(value: object) -> str:
    """Return the text of an argument as the templates of Qwen3.5 and Nemotron 3 write it.

    Lists and objects are JSON. Other values have Python's text, such as True or None.
    """
    return json_text(value) if isinstance(value, (dict, list)) else str(value)


def json_text(value: object) -> str:
    """Return an argument as the templates of Qwen3.6 and Qwen3.8 do: JSON for all but strings."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def xml_call_pieces(
    message: CheckedMessage, value_text: Callable[[object], str]
) -> list[list[Piece]]:
    """Return the pieces of each tool call of a message. Unparsed calls come last, in the model's
    own wording.
    """
    calls = [_call_pieces(call, value_text) for call in message.calls]
    return calls + [raw_call_pieces(raw, CALL, CALL_END) for raw in message.unparsed_calls]


def _call_pieces(call: Call, value_text: Callable[[object], str]) -> list[Piece]:
    arguments = "".join(
        f"<parameter={name}>\n{value_text(value)}\n</parameter>\n"
        for name, value in json.loads(call.arguments).items()
    )
    return [CALL, f"\n<function={call.name}>\n{arguments}</function>\n", CALL_END]


def read_xml_call(call_text: str) -> tuple[dict[str, Any] | None, str | None]:
    """Read the text of a call between its tags. Returns (call, None) or (None, error)."""
    function = _FUNCTION.fullmatch(call_text)
    if function is None:
        return None, "not <function=name>...</function>"
    name, body = function.groups()
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(body):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            return None, "the function has text outside of <parameter=name> elements"
        arguments[parameter.group(1)] = _parse_value(parameter.group(2))
        at = parameter.end()
    return read_named_call(name.strip(), json.dumps(arguments, ensure_ascii=False))


def _parse_value(text: str) -> object:
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)
