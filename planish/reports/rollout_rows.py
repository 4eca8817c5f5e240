"""The JSON lines of an iteration, one row for each trajectory.

*_rollout_summaries.jsonl has numbers, for programs that filter, count and plot. *_rollouts.jsonl
has the texts, which `planish rollouts` reads.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from planish.logtree.html import visible
from planish.logtree.nodes import plain
from planish.reports.rollout_records import TrajectoryRecord, TurnRecord, trajectory_records
from planish.reports.rollout_tokens import DisplayDetokenizer
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import prompt_id

SCHEMA_VERSION = 1
"""Version of the fields of both kinds of rows."""


def summary_rows(
    split: str, iteration: int, groups: Iterable[GroupRollout]
) -> Iterator[dict[str, Any]]:
    """Yield the summaries of all trajectories, ready for JSON."""
    for rollout in groups:
        for record in trajectory_records(rollout):
            yield plain(
                {
                    **_row_key_fields(split, iteration, rollout, record),
                    "prompt_id": prompt_id(record.initial_prompt),
                    "sampling_client_step": rollout.sampler_step,
                    "total_reward": record.total_reward,
                    "final_reward": record.group_reward,
                    "trajectory_metrics": record.group_metrics,
                    "steps": [_step_fields(index, turn) for index, turn in enumerate(record.turns)],
                    "final_ob_len": record.trajectory.final_ob.length,
                }
            )


def rollout_rows(
    split: str,
    iteration: int,
    groups: Iterable[GroupRollout],
    advantages_P_G: Sequence[Sequence[float | None]] | None,
    detokenizer: DisplayDetokenizer,
) -> Iterator[dict[str, Any]]:
    """Yield the texts of all trajectories, ready for JSON. `advantages_P_G` has a row for each of
    `groups`; None if the groups are not trained on.
    """
    for index, rollout in enumerate(groups):
        advantages_G = None if advantages_P_G is None else advantages_P_G[index]
        for record in trajectory_records(rollout, advantages_G):
            yield plain(
                {
                    **_row_key_fields(split, iteration, rollout, record),
                    "total_reward": record.total_reward,
                    "group_reward": record.group_reward,
                    "group_metrics": record.group_metrics,
                    "advantage": record.advantage,
                    "stop_reason": record.trajectory.stop_reason,
                    "turns": [_turn_fields(turn, detokenizer) for turn in record.turns],
                }
            )


def _row_key_fields(
    split: str, iteration: int, rollout: GroupRollout, record: TrajectoryRecord
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "split": split,
        "iteration": iteration,
        "group_idx": rollout.group_idx,
        "traj_idx": record.index,
        "tags": rollout.tags,
    }


def _step_fields(index: int, turn: TurnRecord) -> dict[str, Any]:
    transition = turn.transition
    return {
        "step_idx": index,
        "ob_len": transition.ob.length,
        "ac_len": len(transition.ac.tokens),
        "reward": transition.reward,
        "episode_done": transition.episode_done,
        "metrics": transition.metrics,
        "logs": transition.logs,
    }


def _turn_fields(turn: TurnRecord, detokenizer: DisplayDetokenizer) -> dict[str, Any]:
    transition = turn.transition
    return {
        "observation": detokenizer.text(turn.new_tokens),
        "answer": detokenizer.text(transition.ac.tokens),
        "answer_tokens": len(transition.ac.tokens),
        "reward": transition.reward,
        "metrics": transition.metrics,
        "logs": {name: visible(str(value)) for name, value in transition.logs.items()},
    }
