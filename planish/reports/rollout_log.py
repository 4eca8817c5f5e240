"""The logs of a group's environments on the rollout page.

A section "Trajectory i" or "Trajectory i, attempt k" has the logs of the environment with index i
in one attempt (planish/rl/rollout/group_rollout.py opens the section). The successful attempt is
shown with its trajectory. Failed attempts, and logs that belong to no trajectory, are shown with
the group. Sections can be folded; sections with messages begin folded, since the tokens of the
turns show the same text. If messages are on the page already, the log links to them instead of
repeating them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from markupsafe import Markup

from planish.logtree.html import to_html, visible
from planish.logtree.nodes import Node, details_node

_ATTEMPT = re.compile(r"Trajectory (\d+)(?:, attempt \d+)?")


@dataclass(frozen=True)
class GroupLog:
    """The logs of one group."""

    group: int
    parts: list[Node]
    """The log of each trajectory; empty if logs cannot be matched with trajectories."""
    rest: Node | None
    """Logs that belong to no trajectory."""
    shown: dict[str, Node] = field(default_factory=dict)
    """Links to the conversations that are on the page already, by their messages as JSON."""

    @classmethod
    def of(cls, tree: Node | None, group: int, trajectories: int) -> "GroupLog":
        """Split the log tree of group number `group` with this many trajectories."""
        if tree is None:
            return cls(group, [], None)
        parts = _successful_attempts(tree)
        if len(parts) != trajectories:
            return cls(group, [], tree)
        return cls(group, parts, _without(tree, parts))

    def of_trajectory(self, number: int, answers: Sequence[str]) -> Markup:
        """Return the log of a trajectory as HTML; `answers` are the texts that the policy wrote."""
        nodes = _body(self.parts[number]) if self.parts else []
        return self._html(nodes, f"trajectory {number}", f"g{self.group}t{number}", answers)

    def of_group(self) -> Markup:
        """Return the logs that belong to no trajectory as HTML."""
        nodes = _body(self.rest) if self.rest is not None and _has_content(self.rest) else []
        return self._html(nodes, "the group", f"g{self.group}", ())

    def _html(
        self, nodes: Sequence[Node], name: str, anchor: str, answers: Sequence[str]
    ) -> Markup:
        link = Node("a", {"href": f"#{anchor}"}, [name])
        folded = (self._folded(node, link, answers) for node in nodes)
        return Markup("").join(to_html(node) for node in folded if node is not None)

    def _folded(self, node: Node, here: Node, answers: Sequence[str]) -> Node | None:
        """Return the node with foldable sections; None if its only content is `answers`, which the
        page shows anyway. `here` is a link to the node's place on the page.
        """
        if node.data is not None and node.data.get("type") == "conversation":
            return self._conversation(node, here, answers)
        children: list[Node | str] = []
        for child in node.children:
            kept = self._folded(child, here, answers) if isinstance(child, Node) else child
            if kept is not None:
                children.append(kept)
        if node.children and not children:
            return None
        if node.tag != "section":
            return replace(node, children=children)
        if len(children) < len(node.children):
            return None
        is_open = {} if any(inner.data for inner in node.walk()) else {"open": ""}
        return details_node(_title(node), *children[1:], css_class="section", **is_open)

    def _conversation(self, node: Node, here: Node, answers: Sequence[str]) -> Node | None:
        messages = node.data["messages"] if node.data else []
        if len(messages) == 1 and _is_plain_answer(messages[0]):
            text = visible(messages[0]["content"])
            if any(text in answer for answer in answers):
                return None
        first = self.shown.setdefault(json.dumps(messages), here)
        if first is here:
            return node
        return Node("p", {"class": "note"}, ["The same messages as in ", first, "."])


def _is_plain_answer(message: dict[str, Any]) -> bool:
    return (
        message.keys() == {"role", "content"}
        and message["role"] == "assistant"
        and isinstance(message["content"], str)
    )


def _successful_attempts(tree: Node) -> list[Node]:
    """Return for each environment its last attempt that did not fail, in the group's order."""
    attempts: dict[int, Node] = {}
    for node in _body(tree):
        title = _ATTEMPT.fullmatch(_title(node))
        if title is not None and "data-failed" not in node.attrs:
            attempts[int(title[1])] = node
    return [attempts[index] for index in sorted(attempts)]


def _without(tree: Node, parts: Sequence[Node]) -> Node:
    """Return the tree without these sections of its body."""
    removed = {id(part) for part in parts}
    remaining: list[Node | str] = [node for node in _body(tree) if id(node) not in removed]
    return Node("div", children=remaining)


def _title(node: Node) -> str:
    heading = node.children[0] if node.tag == "section" and node.children else ""
    return str(heading.children[0]) if isinstance(heading, Node) and heading.children else ""


def _body(node: Node) -> list[Node]:
    """Return the nodes of a section below its heading."""
    inner = node.children[-1] if node.tag == "section" and node.children else node
    if not isinstance(inner, Node):
        return []
    return [child for child in inner.children if isinstance(child, Node)]


def _has_content(node: Node) -> bool:
    """Return whether the node has any content besides headings."""
    if node.data is not None:
        return True
    if node.tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
        return False
    return any(
        _has_content(child) if isinstance(child, Node) else child.strip() for child in node.children
    )
