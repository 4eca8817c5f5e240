"""The log tree of an iteration, *_logtree.json: the logs of the environments, and the numbers of
every turn.

    body > title, subtitle, then for each logged group
      section "Group i" > what its environments logged during the rollout
                        > "Trajectory Details" > "Trajectory i Episode" > "Episode Details" >
                          "Turn k", and totals

Invariant: a program that searches the tree for conversations finds every logged rollout. Most
environments log their conversation. If the environments of a group log none, each turn gets a
conversation made from its tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish import logtree
from planish.logtree.nodes import Node, details_node, section
from planish.reports.rollout_records import TrajectoryRecord, TurnRecord, trajectory_records
from planish.reports.rollout_tokens import DisplayDetokenizer
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Logs, RolloutError

MAX_UNFOLDED_CHARACTERS = 120
"""Maximum characters of a log that is shown unfolded."""


def iteration_trace(
    title: str,
    path: Path,
    groups: Iterable[GroupRollout],
    detokenizer: DisplayDetokenizer,
    sections: Sequence[Node] = (),
) -> logtree.Trace:
    """Return the log tree of `groups`, followed by `sections`; `path` is that of the page."""
    trace = logtree.Trace(title, path)
    for rollout in groups:
        trace.attach(_group_section(rollout, detokenizer))
    for node in sections:
        trace.attach(node)
    return trace


def format_number(value: Any) -> str:
    """Return a number as text with at most six digits and no trailing zeros."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _group_section(rollout: GroupRollout, detokenizer: DisplayDetokenizer) -> Node:
    """Return a copy of the group's own tree with the details of its trajectories at the end."""
    tree = rollout.tree
    if tree is None:
        tree, _ = section(f"Group {rollout.group_idx}", 2)
    has_conversation = any(node.data for node in tree.walk())
    details, body = section("Trajectory Details", 3)
    for record in trajectory_records(rollout):
        body.children.append(_episode_section(record, None if has_conversation else detokenizer))
    heading, inner = tree.children
    assert isinstance(inner, Node)
    failures = rollout.group.rollout_errors
    errors = [_errors_section(failures)] if failures else []
    contents = Node(inner.tag, inner.attrs, [*inner.children, details, *errors])
    return Node(tree.tag, {**tree.attrs, "data-group": str(rollout.group_idx)}, [heading, contents])


def _episode_section(record: TrajectoryRecord, detokenizer: DisplayDetokenizer | None) -> Node:
    """Return the section of a trajectory, with a conversation for each turn if `detokenizer` is
    given.
    """
    episode, body = section(f"Trajectory {record.index} Episode", 4)
    details, turns = section("Episode Details", 5)
    for turn_number, turn in enumerate(record.turns, start=1):
        turns.children.append(_turn_section(turn_number, turn, detokenizer))
    totals = {
        "num_turns": len(record.turns),
        "final_ob_len": record.trajectory.final_ob.length,
        "sum_step_rewards": record.trajectory.step_rewards,
        "final_group_reward": record.group_reward,
        "total_return": record.total_reward,
    }
    body.children += [details, _stats_table(totals, "Episode totals")]
    return episode


def _turn_section(index: int, record: TurnRecord, detokenizer: DisplayDetokenizer | None) -> Node:
    turn, body = section(f"Turn {index}", 6)
    transition = record.transition
    if detokenizer is not None:
        prompt, answer = detokenizer.text(record.new_tokens), detokenizer.text(transition.ac.tokens)
        body.children.append(_conversation_node(prompt, answer))
    step_stats = {
        "ob_len": transition.ob.length,
        "ac_len": len(transition.ac.tokens),
        "step_reward": transition.reward,
    }
    body.children.append(_stats_table(step_stats, "Step stats"))
    if transition.metrics:
        metrics, table = section("Step Metrics", 6)
        table.children.append(_stats_table(transition.metrics, "Metrics emitted by env.step"))
        body.children.append(metrics)
    if transition.logs:
        body.children.append(_diagnostics_section(transition.logs))
    return turn


def _conversation_node(prompt: str, answer: str) -> Node:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Node(
        "div", {"class": "lt-conversation"}, data={"type": "conversation", "messages": messages}
    )


def _diagnostics_section(logs: Logs) -> Node:
    diagnostics, body = section("Diagnostics", 6)
    for name, value in logs.items():
        text = str(value)
        if "\n" in text or len(text) > MAX_UNFOLDED_CHARACTERS:
            shown = Node("pre", {"class": "lt-details-body"}, [text])
            body.children.append(details_node(name, shown, css_class="lt-details"))
        else:
            body.children.append(Node("p", {"class": "lt-p"}, [f"{name}: {text}"]))
    return diagnostics


def _errors_section(errors: Sequence[RolloutError]) -> Node:
    failed, body = section("Rollout Errors", 3)
    rows = [(error.error_type, error.error_message) for error in errors]
    body.children.append(logtree.table_node(rows, head=("error", "message")))
    return failed


def _stats_table(values: Mapping[str, Any], caption: str) -> Node:
    rows = [(name, format_number(value)) for name, value in values.items()]
    return logtree.table_node(rows, head=("key", "value"), caption=caption)
