"""One row of numbers for each trajectory: *_rollout_summaries.jsonl, for programs that filter,
count and plot.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from planish.logtree.nodes import plain
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Transition

SCHEMA_VERSION = 1


def summary_rows(
    split: str, iteration: int, groups: Iterable[GroupRollout]
) -> Iterator[dict[str, Any]]:
    """The rows of all trajectories of all groups, as JSON holds them."""
    for rollout in groups:
        group = rollout.group
        played = zip(
            group.trajectories_G,
            group.get_total_rewards(),
            group.final_rewards_G,
            group.metrics_G,
            strict=True,
        )
        for traj_idx, (trajectory, total, final, metrics) in enumerate(played):
            yield plain(
                {
                    "schema_version": SCHEMA_VERSION,
                    "split": split,
                    "iteration": iteration,
                    "group_idx": rollout.group_idx,
                    "traj_idx": traj_idx,
                    "tags": rollout.tags,
                    "sampling_client_step": rollout.sampler_step,
                    "total_reward": total,
                    "final_reward": final,
                    "trajectory_metrics": metrics,
                    "steps": [
                        _step(index, turn) for index, turn in enumerate(trajectory.transitions)
                    ],
                    "final_ob_len": trajectory.final_ob.length,
                }
            )


def _step(index: int, turn: Transition) -> dict[str, Any]:
    return {
        "step_idx": index,
        "ob_len": turn.ob.length,
        "ac_len": len(turn.ac.tokens),
        "reward": turn.reward,
        "episode_done": turn.episode_done,
        "metrics": turn.metrics,
        "logs": turn.logs,
    }
