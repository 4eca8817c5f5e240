"""What was said in every trajectory, as text: *_rollouts.jsonl, one row per trajectory, which
`planish rollouts` reads.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from planish.logtree.html import visible
from planish.logtree.nodes import plain
from planish.reports.rollout_tokens import TokenTexts
from planish.reports.rollout_tree import new_tokens
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Trajectory

SCHEMA_VERSION = 1


def text_rows(
    split: str,
    iteration: int,
    groups: Iterable[GroupRollout],
    advantages_P_G: Sequence[Sequence[float]] | None,
    texts: TokenTexts,
) -> Iterator[dict[str, Any]]:
    """The rows of all trajectories of all groups, as JSON holds them. `advantages_P_G` goes with
    `groups`; None where nothing is trained.
    """
    for place, rollout in enumerate(groups):
        group = rollout.group
        totals_G = group.get_total_rewards()
        for traj_idx, trajectory in enumerate(group.trajectories_G):
            advantage = None if advantages_P_G is None else advantages_P_G[place][traj_idx]
            yield plain(
                {
                    "schema_version": SCHEMA_VERSION,
                    "split": split,
                    "iteration": iteration,
                    "group_idx": rollout.group_idx,
                    "traj_idx": traj_idx,
                    "tags": rollout.tags,
                    "total_reward": totals_G[traj_idx],
                    "group_reward": group.final_rewards_G[traj_idx],
                    "group_metrics": group.metrics_G[traj_idx],
                    "advantage": advantage,
                    "stop_reason": trajectory.stop_reason,
                    "turns": list(_turns(trajectory, texts)),
                }
            )


def _turns(trajectory: Trajectory, texts: TokenTexts) -> Iterator[dict[str, Any]]:
    seen: list[int] = []
    for turn in trajectory.transitions:
        new, _ = new_tokens(seen, turn.ob)
        yield {
            "observation": texts.text(new),
            "answer": texts.text(turn.ac.tokens),
            "answer_tokens": len(turn.ac.tokens),
            "reward": turn.reward,
            "metrics": turn.metrics,
            "logs": {name: visible(str(value)) for name, value in turn.logs.items()},
        }
        seen = [*turn.ob.to_ints(), *turn.ac.tokens]
