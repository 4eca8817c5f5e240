"""What the environments of a group logged, as the rollout page shows it.

A section "Trajectory i" or "Trajectory i, attempt k" is what the environment at place i of the
group logged in one attempt (planish/rl/rollout/group_rollout.py opens it). It is shown with its trajectory if
that attempt was the one that counted; failed attempts, and all that belongs to no trajectory, are
shown with the group. Sections fold; those that hold messages begin folded, since the tokens of the
turns say the same. Messages that are on the page already are named and not drawn again.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from markupsafe import Markup

from planish.logtree.html import to_html, visible
from planish.logtree.nodes import Node

_ATTEMPT = re.compile(r"Trajectory (\d+)(?:, attempt \d+)?")


@dataclass(frozen=True)
class GroupLog:
    """One group's."""

    group: int
    parts: list[Node]
    """For each trajectory; none where it is not known which is which."""
    rest: Node | None
    shown: dict[str, Node] = field(default_factory=dict)
    """Messages that were drawn, and a link to where."""

    @classmethod
    def of(cls, tree: Node | None, group: int, trajectories: int) -> "GroupLog":
        if tree is None:
            return cls(group, [], None)
        parts = _attempts_that_count(tree)
        if len(parts) != trajectories:
            return cls(group, [], tree)
        return cls(group, parts, _without(tree, parts))

    def of_trajectory(self, number: int, answers: Sequence[str]) -> Markup:
        """HTML of its log; `answers` are the texts that the policy wrote in it."""
        nodes = _body(self.parts[number]) if self.parts else []
        return self._drawn(nodes, f"trajectory {number}", f"g{self.group}t{number}", answers)

    def of_group(self) -> Markup:
        """HTML of what belongs to no trajectory."""
        nodes = _body(self.rest) if self.rest is not None and _says_something(self.rest) else []
        return self._drawn(nodes, "the group", f"g{self.group}", ())

    def _drawn(
        self, nodes: Sequence[Node], name: str, anchor: str, answers: Sequence[str]
    ) -> Markup:
        link = Node("a", {"href": f"#{anchor}"}, [name])
        folded = (self._folded(node, link, answers) for node in nodes)
        return Markup("").join(to_html(node) for node in folded if node is not None)

    def _folded(self, node: Node, here: Node, answers: Sequence[str]) -> Node | None:
        """The node with sections that fold; None if it says nothing that is not in `answers`."""
        if node.data is not None and node.data.get("type") == "conversation":
            return self._conversation(node, here, answers)
        children: list[Node | str] = []
        for child in node.children:
            kept = self._folded(child, here, answers) if isinstance(child, Node) else child
            children += [] if kept is None else [kept]
        if node.children and not children:
            return None
        if node.tag != "section":
            return replace(node, children=children)
        if len(children) < len(node.children):
            return None
        is_open = {} if any(inner.data for inner in node.walk()) else {"open": ""}
        return Node(
            "details",
            {"class": "section", **is_open},
            [Node("summary", {}, [_title(node)]), *children[1:]],
        )

    def _conversation(self, node: Node, here: Node, answers: Sequence[str]) -> Node | None:
        messages = node.data["messages"] if node.data else []
        if len(messages) == 1 and _is_plain_answer(messages[0]):
            text = visible(messages[0]["content"])
            if any(text in answer for answer in answers):
                return None
        first = self.shown.setdefault(json.dumps(messages), here)
        return (
            node
            if first is here
            else Node("p", {"class": "note"}, ["The same messages as in ", first, "."])
        )


def _is_plain_answer(message: dict[str, Any]) -> bool:
    return (
        message.keys() == {"role", "content"}
        and message["role"] == "assistant"
        and isinstance(message["content"], str)
    )


def _attempts_that_count(tree: Node) -> list[Node]:
    """For each place of the group the last attempt that did not fail, in the order of the places."""
    counting: dict[int, Node] = {}
    for node in _body(tree):
        named = _ATTEMPT.fullmatch(_title(node))
        if named is not None and "data-failed" not in node.attrs:
            counting[int(named[1])] = node
    return [counting[place] for place in sorted(counting)]


def _without(tree: Node, parts: Sequence[Node]) -> Node:
    """The tree without these sections of its body."""
    taken = {id(part) for part in parts}
    left: list[Node | str] = [node for node in _body(tree) if id(node) not in taken]
    return Node("div", children=left)


def _title(node: Node) -> str:
    heading = node.children[0] if node.tag == "section" and node.children else ""
    return str(heading.children[0]) if isinstance(heading, Node) and heading.children else ""


def _body(node: Node) -> list[Node]:
    """What a section holds below its heading."""
    inner = node.children[-1] if node.tag == "section" and node.children else node
    return (
        [child for child in inner.children if isinstance(child, Node)]
        if isinstance(inner, Node)
        else []
    )


def _says_something(node: Node) -> bool:
    if node.data is not None:
        return True
    if node.tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
        return False
    return any(
        _says_something(child) if isinstance(child, Node) else child.strip()
        for child in node.children
    )
