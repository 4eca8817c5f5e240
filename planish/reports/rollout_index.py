"""The index of a run's rollouts: rollouts/index.jsonl, with one row for every trajectory.

A page that lists, filters and counts the rollouts of a whole run reads this file only. The row of a
trajectory says where its texts are: `bytes` bytes from `offset` on in `file`, a *_rollouts.jsonl of
the run directory. The rows of one iteration are appended in one write, after the texts are on disk.
When a run resumes, the rows of the iterations that it repeats are removed.

    step, split           iteration, and "train" or "eval/NAME"
    group, sample         index in the batch, and index in the group
    tags, prompt_id       tags of the group; identifies the tokens of the first prompt
    seed, sampler_step    seed of its policy, and the step of the weights (null if unknown)
    reward, advantage     total reward, and advantage (null if it is not trained on)
    ending, turns         why the episode ended, and number of turns
    tokens, mean_logprob  number of sampled tokens, and their mean logprob (null without logprobs)
    gap                   largest difference between the logprobs of trainer and sampler at a token
                          (null if it was not trained on)
    errors                types of the group's failed attempts
    file, offset, bytes   place of the texts; null with rollout_json_export=False
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planish.files import RowFile, make_directory
from planish.logtree.nodes import plain
from planish.reports.rollout_records import TrainedTokens, TrajectoryRecord, trajectory_records
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import prompt_id

INDEX = "rollouts/index.jsonl"


@dataclass(frozen=True)
class TextPlace:
    """The place of a trajectory's texts in a file."""

    file: str
    """Path of the file, relative to the run directory."""
    offset: int
    """First byte of its line."""
    num_bytes: int
    """Length of the line, without the newline."""


def text_places(file: str, lines: Sequence[bytes]) -> list[TextPlace]:
    """Return the place of each of the `lines` of a file. Every line ends with a newline."""
    places, offset = [], 0
    for line in lines:
        places.append(TextPlace(file, offset, len(line) - 1))
        offset += len(line)
    return places


def index_rows(
    split: str,
    iteration: int,
    groups: Sequence[GroupRollout],
    advantages_P_G: Sequence[Sequence[float | None]] | None,
    places: Sequence[TextPlace],
    trained: Mapping[tuple[int, int], TrainedTokens],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one iteration, ready for JSON. `advantages_P_G` has a row for each of
    `groups`; None if the groups are not trained on. `places` has one place for each trajectory, in
    order; it is empty if the texts are not written. `trained` has the trained tokens by (group,
    trajectory).
    """
    remaining_places = iter(places)
    for index, rollout in enumerate(groups):
        advantages_G = None if advantages_P_G is None else advantages_P_G[index]
        for record in trajectory_records(rollout, advantages_G):
            place = next(remaining_places, None)
            yield plain(
                {
                    "step": iteration,
                    "split": split,
                    "group": rollout.group_idx,
                    "sample": record.index,
                    "tags": rollout.tags,
                    "prompt_id": prompt_id(record.initial_prompt),
                    "seed": record.trajectory.seed,
                    "sampler_step": rollout.sampler_step,
                    "reward": record.total_reward,
                    "advantage": record.advantage,
                    "ending": record.trajectory.stop_reason or "completed",
                    "turns": len(record.turns),
                    **_token_fields(record),
                    "gap": _gap(record, trained.get((rollout.group_idx, record.index))),
                    "errors": [error.error_type for error in rollout.group.rollout_errors],
                    "file": place and place.file,
                    "offset": place and place.offset,
                    "bytes": place and place.num_bytes,
                }
            )


def append_to_index(directory: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append the rows of one iteration to the index of a run directory."""
    if not rows:
        return
    path = directory / INDEX
    make_directory(path.parent)
    with closing(RowFile(path)) as index:
        index.append(*rows)


def remove_from_index(directory: Path, iteration: int) -> None:
    """Remove the rows of `iteration` and all later iterations, before they are repeated."""
    path = directory / INDEX
    if not path.exists():
        return
    with closing(RowFile(path)) as index:
        index.keep(lambda row: row["step"] < iteration)
    if path.stat().st_size == 0:
        path.unlink()
        with suppress(OSError):  # the folder has files of the user
            path.parent.rmdir()


def _gap(record: TrajectoryRecord, trained: TrainedTokens | None) -> float | None:
    """Return the largest absolute difference of logprobs; None without trained tokens."""
    if trained is None:
        return None
    gaps = [
        float(np.abs(np.asarray(turn.transition.ac.logprobs, np.float32) - tokens.logprobs).max())
        for turn, tokens in record.turns_with_tokens(trained)
        if tokens is not None
    ]
    return max(gaps, default=None)


def _token_fields(record: TrajectoryRecord) -> dict[str, Any]:
    actions = [turn.transition.ac for turn in record.turns]
    num_tokens = sum(len(action.tokens) for action in actions)
    logprobs = [logprob for action in actions for logprob in action.maybe_logprobs or ()]
    mean = sum(logprobs) / num_tokens if logprobs and len(logprobs) == num_tokens else None
    return {"tokens": num_tokens, "mean_logprob": mean}
