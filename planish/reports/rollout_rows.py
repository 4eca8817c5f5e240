"""The JSON lines of an iteration, one row for each trajectory.

*_rollout_summaries.jsonl has numbers, for programs that filter, count and plot. *_rollouts.jsonl
has the texts and tokens, which `planish rollouts`, `planish console` and `planish replay` read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from planish.logtree.html import visible
from planish.logtree.nodes import plain
from planish.reports.rollout_records import (
    TrainedTokens,
    TrajectoryRecord,
    TurnRecord,
    trajectory_records,
)
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
    trained: Mapping[tuple[int, int], TrainedTokens],
) -> Iterator[dict[str, Any]]:
    """Yield the texts of all trajectories, ready for JSON. `advantages_P_G` has a row for each of
    `groups`; None if the groups are not trained on. `trained` has the trained tokens by (group,
    trajectory).
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
                    "turns": [
                        {
                            **_turn_fields(turn, detokenizer),
                            **_trained_fields(turn, tokens, record.advantage),
                        }
                        for turn, tokens in record.turns_with_tokens(
                            trained.get((rollout.group_idx, record.index))
                        )
                    ],
                }
            )


def _trained_fields(
    turn: TurnRecord, tokens: TrainedTokens | None, advantage: float | None
) -> dict[str, Any]:
    """Return the trainer's logprobs and the advantages of a turn's tokens. Equal numbers are not
    repeated: the logprobs if they are those of the sampler, and the advantages if each is that of
    the trajectory.
    """
    if tokens is None:
        return {}
    sampled = np.asarray(turn.transition.ac.logprobs, np.float32)
    is_equal = np.array_equal(sampled, tokens.logprobs)
    fields: dict[str, Any] = {"has_equal_trainer_logprobs": is_equal}
    if not is_equal:
        fields["trainer_logprobs"] = shortest_floats(tokens.logprobs)
    if advantage is None or np.any(tokens.advantages != np.float32(advantage)):
        fields["advantages"] = shortest_floats(tokens.advantages)
    return fields


def shortest_floats(values: Sequence[float] | np.ndarray | None) -> list[float | None] | None:
    """Return float32 numbers as the shortest decimals that give the same float32 again. A number
    that is not finite becomes None. Numbers that are not float32 are returned unchanged.
    """
    if values is None:
        return None
    singles = np.asarray(values, np.float32)
    if not np.array_equal(singles, np.asarray(values, np.float64), equal_nan=True):
        return plain(values)
    return orjson.loads(orjson.dumps(singles, option=orjson.OPT_SERIALIZE_NUMPY))


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
    pieces = detokenizer.pieces(transition.ac.tokens)
    return {
        "observation": detokenizer.text(turn.new_tokens),
        "observation_ids": turn.new_tokens,
        "extends_context": turn.extends_context,
        "answer": "".join([piece.text for piece in pieces]),
        "answer_tokens": len(transition.ac.tokens),
        "answer_ids": transition.ac.tokens,
        "logprobs": shortest_floats(transition.ac.maybe_logprobs),
        "piece_lengths": " ".join([piece.length_code for piece in pieces]),
        "control_pieces": [index for index, piece in enumerate(pieces) if piece.is_control],
        "is_trained": transition.train_on_action,
        "reward": transition.reward,
        "metrics": transition.metrics,
        "logs": {name: visible(str(value)) for name, value in transition.logs.items()},
    }
