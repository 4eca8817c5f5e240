"""The tree of nodes in a trace.

A node is an HTML element. A child is another node, plain text, or `Markup`, which is HTML that the
caller trusts. Plain text is escaped when it is rendered, so text that a model wrote is never
interpreted as HTML. `data` is a node's content for programs, such as the messages of a
conversation, and the page is rendered from it. Nodes are plain data and can be pickled, so a
rollout worker process can return the tree of a group.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from planish.errors import UserError

_ATTRIBUTE_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


@dataclass
class Node:
    """One HTML element."""

    tag: str
    attrs: dict[str, str] = field(default_factory=dict)
    children: list["Node | str"] = field(default_factory=list)
    data: dict[str, Any] | None = None
    css: str | None = None
    """CSS rules for the Markup among the children. A page contains equal rules only once."""

    def walk(self) -> Iterator["Node"]:
        """Yield this node and its descendants, in the order of the page."""
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def to_json(self) -> dict[str, Any]:
        """Return {"tag", "attrs", "children"}, and "data" if there is any. With data, strings among
        the children are omitted, because the data contains the same text.
        """
        keeps_text = self.data is None
        children = [
            child.to_json() if isinstance(child, Node) else str.__str__(child)
            for child in self.children
            if keeps_text or isinstance(child, Node)
        ]
        plain: dict[str, Any] = {"tag": self.tag, "attrs": self.attrs, "children": children}
        return plain if self.data is None else {**plain, "data": self.data}


def section(title: str, level: int, attrs: Mapping[str, str] | None = None) -> tuple[Node, Node]:
    """Return (section, body): a section with a heading of `level` (1 to 6), and the node inside it
    that holds the contents.
    """
    body = Node("div", {"class": "lt-section-body"})
    heading = Node(f"h{level}", {"class": f"lt-h{level}"}, [text_of(title)])
    return Node("section", {"class": "lt-section", **(attrs or {})}, [heading, body]), body


def details_node(summary: str, *body: Node | str, css_class: str, **attrs: str) -> Node:
    """Return an element with a summary that folds and unfolds its body."""
    return Node("details", {"class": css_class, **attrs}, [Node("summary", {}, [summary]), *body])


def attributes(given: Mapping[str, Any]) -> dict[str, str]:
    """Convert keyword arguments to HTML attributes: class_ means class, data__x means data-x.
    Raises UserError for a name that is not valid in HTML.
    """
    named: dict[str, str] = {}
    for given_name, value in given.items():
        name = "class" if given_name == "class_" else given_name
        if name.startswith("data__"):
            name = name.replace("__", "-", 1)
        named[name] = str(value)
        if not _ATTRIBUTE_NAME.fullmatch(name):
            raise UserError(
                f"{name!r} is no name of an HTML attribute; use letters, digits, '-', '_' and '.'"
            )
    return named


def text_of(value: Any) -> str:
    """Return `value` as plain text. Markup becomes plain text too and is escaped when rendered."""
    return str.__str__(value if isinstance(value, str) else str(value))


def plain(value: Any) -> Any:
    """Return a copy of `value` as JSON can hold it. Numbers and arrays of other libraries become
    Python's, NaN and infinities become None, dataclasses and pydantic models become mappings, bytes
    become a text with their number, and any other object becomes its text.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Mapping):
        return {text_of(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist())
    if hasattr(value, "model_dump"):  # pydantic
        return plain(value.model_dump())
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    return str(value)
