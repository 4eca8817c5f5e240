"""From a tree to HTML. Text is escaped here and nowhere else.

What HTML cannot carry (control characters, halves of surrogate pairs) is written as a visible sign,
so that a page never hides or drops a character that a model wrote.
"""

import re
from html import escape

from markupsafe import Markup

from planish.logtree.conversations import CONVERSATION, message_nodes
from planish.logtree.nodes import Node

_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """`text` with a sign for each character that a page cannot show: U+240D for a carriage return,
    \\ud800 for a lone surrogate.
    """
    return _UNSHOWN.sub(_sign, text)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def to_html(node: Node) -> Markup:
    """The node and all below it; nothing is indented, so text keeps its own spaces."""
    pieces: list[str] = []
    _write(node, pieces)
    return Markup("".join(pieces))


def _write(node: Node, pieces: list[str]) -> None:
    attrs = "".join(f' {name}="{escape(visible(value))}"' for name, value in node.attrs.items())
    pieces.append(f"<{node.tag}{attrs}>")
    if node.tag == "pre":
        pieces.append("\n")  # browsers drop one line end there, which would else be the text's own
    for child in node.children or _drawn(node):
        if isinstance(child, Node):
            _write(child, pieces)
        else:
            pieces.append(child if isinstance(child, Markup) else escape(visible(child)))
    pieces.append(f"</{node.tag}>")


def _drawn(node: Node) -> list[Node]:
    data = node.data or {}
    return message_nodes(data) if data.get("type") == CONVERSATION else []


def css_of(*nodes: Node) -> Markup:
    """The rules that the nodes bring along, each once."""
    rules = dict.fromkeys(node.css for root in nodes for node in root.walk() if node.css)
    return Markup("\n".join(rule.replace("</", "<\\/") for rule in rules))
