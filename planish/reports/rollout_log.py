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

    group_idx: int
    trajectory_logs: list[Node]
    """The log of each trajectory; empty if logs cannot be matched with trajectories."""
    group_log: Node | None
    """Logs that belong to no trajectory."""
    links: dict[str, Node] = field(default_factory=dict)
    """Links to the conversations that are on the page already, by their messages as JSON."""

    @classmethod
    def from_tree(cls, tree: Node | None, group_idx: int, num_trajectories: int) -> "GroupLog":
        """Split the log tree of the group with this index and number of trajectories."""
        if tree is None:
            return cls(group_idx, [], None)
        trajectory_logs = _successful_attempts(tree)
        if len(trajectory_logs) != num_trajectories:
            return cls(group_idx, [], tree)
        return cls(group_idx, trajectory_logs, _without_sections(tree, trajectory_logs))

    def trajectory_html(self, index: int, answers: Sequence[str]) -> Markup:
        """Return the log of a trajectory as HTML; `answers` are the texts that the policy wrote."""
        nodes = _body_nodes(self.trajectory_logs[index]) if self.trajectory_logs else []
        return self._render(nodes, f"trajectory {index}", f"g{self.group_idx}t{index}", answers)

    def group_html(self) -> Markup:
        """Return the logs that belong to no trajectory as HTML."""
        nodes = (
            _body_nodes(self.group_log)
            if self.group_log is not None and _has_content(self.group_log)
            else []
        )
        return self._render(nodes, "the group", f"g{self.group_idx}", ())

    def _render(
        self, nodes: Sequence[Node], name: str, anchor: str, answers: Sequence[str]
    ) -> Markup:
        link = Node("a", {"href": f"#{anchor}"}, [name])
        folded = (self._fold(node, link, answers) for node in nodes)
        return Markup("").join(to_html(node) for node in folded if node is not None)

    def _fold(self, node: Node, link: Node, answers: Sequence[str]) -> Node | None:
        """Return the node with foldable sections; None if its only content is `answers`, which the
        page shows anyway. `link` is a link to the node's place on the page.
        """
        if node.data is not None and node.data.get("type") == "conversation":
            return self._conversation(node, link, answers)
        children: list[Node | str] = []
        for child in node.children:
            folded = self._fold(child, link, answers) if isinstance(child, Node) else child
            if folded is not None:
                children.append(folded)
        if node.children and not children:
            return None
        if node.tag != "section":
            return replace(node, children=children)
        if len(children) < len(node.children):
            return None
        is_open = {} if any(inner.data for inner in node.walk()) else {"open": ""}
        return details_node(_title(node), *children[1:], css_class="section", **is_open)

    def _conversation(self, node: Node, link: Node, answers: Sequence[str]) -> Node | None:
        messages = node.data["messages"] if node.data else []
        if len(messages) == 1 and _is_plain_answer(messages[0]):
            text = visible(messages[0]["content"])
            if any(text in answer for answer in answers):
                return None
        first = self.links.setdefault(json.dumps(messages), link)
        if first is link:
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
    for node in _body_nodes(tree):
        title = _ATTEMPT.fullmatch(_title(node))
        if title is not None and "data-failed" not in node.attrs:
            attempts[int(title[1])] = node
    return [attempts[index] for index in sorted(attempts)]


def _without_sections(tree: Node, sections: Sequence[Node]) -> Node:
    """Return the tree without these sections of its body."""
    removed = {id(section) for section in sections}
    remaining: list[Node | str] = [node for node in _body_nodes(tree) if id(node) not in removed]
    return Node("div", children=remaining)


def _title(node: Node) -> str:
    heading = node.children[0] if node.tag == "section" and node.children else ""
    return str(heading.children[0]) if isinstance(heading, Node) and heading.children else ""


def _body_nodes(node: Node) -> list[Node]:
    """Return the nodes of a section below its heading."""
    inner = node.children[-1] if node.tag == "section" and node.children else node
    if not isinstance(inner, Node):
        return []
    return [child for child in inner.children if isinstance(child, Node)]


def _has_content(node: Node) -> bool:
    """Return whether the node has any content besides headings."""
    if node.data is not None:
        return True
    return node.tag not in ("h1", "h2", "h3", "h4", "h5", "h6") and any(
        _has_content(child) if isinstance(child, Node) else child.strip() for child in node.children
    )
