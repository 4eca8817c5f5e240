"""Render a tree as HTML. All escaping of text happens in this module.

Characters that HTML cannot contain (control characters, lone surrogates) are replaced with visible
signs, so that a page never hides or drops a character that a model wrote.
"""

import re
from html import escape
from pathlib import Path

from markupsafe import Markup

from planish.logtree.conversations import CONVERSATION, message_nodes
from planish.logtree.nodes import Node

PALETTE = Path(__file__).with_name("palette.css")
"""The colours of all pages, those of the console too."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """Replace each character that a page cannot show with a visible sign, such as U+240D for a
    carriage return or the text \\ud800 for a lone surrogate.
    """
    return _UNPRINTABLE.sub(_sign, text)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def to_html(node: Node) -> Markup:
    """Render a node and its descendants, without indentation, to keep the white space of text."""
    pieces: list[str] = []
    _write(node, pieces)
    return Markup("".join(pieces))


def _write(node: Node, pieces: list[str]) -> None:
    attrs = "".join(f' {name}="{escape(visible(value))}"' for name, value in node.attrs.items())
    pieces.append(f"<{node.tag}{attrs}>")
    if node.tag == "pre":
        # Browsers drop a line break right after <pre>. So write an extra one, because the text may
        # begin with a line break.
        pieces.append("\n")
    for child in node.children or _conversation_elements(node):
        if isinstance(child, Node):
            _write(child, pieces)
        else:
            pieces.append(child if isinstance(child, Markup) else escape(visible(child)))
    pieces.append(f"</{node.tag}>")


def _conversation_elements(node: Node) -> list[Node]:
    data = node.data or {}
    return message_nodes(data) if data.get("type") == CONVERSATION else []


def css_of(*nodes: Node) -> Markup:
    """Return the CSS rules of the nodes and their descendants, without duplicates."""
    rules = dict.fromkeys(node.css for root in nodes for node in root.walk() if node.css)
    return Markup("\n".join(rule.replace("</", "<\\/") for rule in rules))
