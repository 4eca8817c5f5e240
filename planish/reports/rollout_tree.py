"""The tree of an iteration, *_logtree.json: what the environments logged, and the numbers of every
turn.

    body > title, subtitle, then for each group that is logged
      section "Group i" > what its environments logged while it was played
                        > "Trajectory Details" > "Trajectory i Episode" > "Episode Details" > "Turn k", and totals

Invariant: a reader that looks for conversations finds every rollout. Environments usually log
theirs; for a group in which none did, each turn holds one made of its tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish import logtree
from planish.logtree.nodes import Node, section
from planish.reports.rollout_tokens import TokenTexts
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Logs, Observation, RolloutError, Trajectory, Transition

SHORT_LOG = 120


def iteration_trace(
    title: str,
    path: Path,
    groups: Iterable[GroupRollout],
    texts: TokenTexts,
    sections: Sequence[Node] = (),
) -> logtree.Trace:
    """The trace of these groups and `sections`, for the page at `path`."""
    trace = logtree.Trace(title, path)
    for rollout in groups:
        trace.attach(_group_section(rollout, texts))
    for node in sections:
        trace.attach(node)
    return trace


def number(value: Any) -> str:
    """A number as people read it: at most six digits, and no zeros for show."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def new_tokens(seen: Sequence[int], observation: Observation) -> tuple[list[int], bool]:
    """The tokens of an observation behind those the policy has `seen`; all of them, and False, if
    it does not go on from those.
    """
    tokens = observation.to_ints()
    goes_on = tokens[: len(seen)] == list(seen)
    return (tokens[len(seen) :], True) if goes_on else (tokens, False)


def _group_section(rollout: GroupRollout, texts: TokenTexts) -> Node:
    """The group's own tree, which stays as it is, with the details behind what it holds."""
    tree = rollout.tree
    if tree is None:
        tree, _ = section(f"Group {rollout.group_idx}", 2)
    says_nothing = not any(node.data for node in tree.walk())
    details, body = section("Trajectory Details", 3)
    group = rollout.group
    for index, (trajectory, final) in enumerate(
        zip(group.trajectories_G, group.final_rewards_G, strict=True)
    ):
        episode = _episode(index, trajectory, final, texts if says_nothing else None)
        body.children.append(episode)
    heading, inner = tree.children
    assert isinstance(inner, Node)
    errors = [_errors(group.rollout_errors)] if group.rollout_errors else []
    contents = Node(inner.tag, inner.attrs, [*inner.children, details, *errors])
    return Node(tree.tag, {**tree.attrs, "data-group": str(rollout.group_idx)}, [heading, contents])


def _episode(
    index: int, trajectory: Trajectory, final_reward: float, texts: TokenTexts | None
) -> Node:
    episode, body = section(f"Trajectory {index} Episode", 4)
    details, turns = section("Episode Details", 5)
    seen: list[int] = []
    for number_of_turn, transition in enumerate(trajectory.transitions, start=1):
        new, _ = new_tokens(seen, transition.ob)
        turns.children.append(_turn(number_of_turn, transition, new, texts))
        seen = [*transition.ob.to_ints(), *transition.ac.tokens]
    totals = {
        "num_turns": len(trajectory.transitions),
        "final_ob_len": trajectory.final_ob.length,
        "sum_step_rewards": trajectory.step_rewards,
        "final_group_reward": final_reward,
        "total_return": trajectory.step_rewards + final_reward,
    }
    body.children += [details, _table(totals, "Episode totals")]
    return episode


def _turn(index: int, transition: Transition, new: Sequence[int], texts: TokenTexts | None) -> Node:
    turn, body = section(f"Turn {index}", 6)
    if texts is not None:
        body.children.append(_conversation(texts.text(new), texts.text(transition.ac.tokens)))
    sizes = {
        "ob_len": transition.ob.length,
        "ac_len": len(transition.ac.tokens),
        "step_reward": transition.reward,
    }
    body.children.append(_table(sizes, "Step stats"))
    if transition.metrics:
        metrics, table = section("Step Metrics", 6)
        table.children.append(_table(transition.metrics, "Metrics emitted by env.step"))
        body.children.append(metrics)
    if transition.logs:
        body.children.append(_diagnostics(transition.logs))
    return turn


def _conversation(prompt: str, answer: str) -> Node:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Node(
        "div", {"class": "lt-conversation"}, data={"type": "conversation", "messages": messages}
    )


def _diagnostics(logs: Logs) -> Node:
    diagnostics, body = section("Diagnostics", 6)
    for name, value in logs.items():
        text = str(value)
        if "\n" in text or len(text) > SHORT_LOG:
            folded: list[Node | str] = [
                Node("summary", {}, [name]),
                Node("pre", {"class": "lt-details-body"}, [text]),
            ]
            body.children.append(Node("details", {"class": "lt-details"}, folded))
        else:
            body.children.append(Node("p", {"class": "lt-p"}, [f"{name}: {text}"]))
    return diagnostics


def _errors(errors: Sequence[RolloutError]) -> Node:
    failed, body = section("Rollout Errors", 3)
    rows = [(error.error_type, error.error_message) for error in errors]
    body.children.append(logtree.table_node(rows, head=("error", "message")))
    return failed


def _table(values: Mapping[str, Any], caption: str) -> Node:
    rows = [(name, number(value)) for name, value in values.items()]
    return logtree.table_node(rows, head=("key", "value"), caption=caption)
