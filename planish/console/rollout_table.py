"""The rollouts of one run by column, with filters, counts and the places of their texts.

The rows are those of rollouts/index.jsonl (planish/reports/rollout_index.py). A run of the public
cookbook has no such file, so its *_rollout_summaries.jsonl are read instead; they have no texts.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planish.console.metric_table import is_number
from planish.console.row_tail import Row

NUMBERS = (
    "step",
    "group",
    "sample",
    "reward",
    "advantage",
    "tokens",
    "turns",
    "mean_logprob",
    "gap",
    "seed",
    "sampler_step",
    "offset",
    "bytes",
)
"""Columns of numbers. A missing value is NaN."""
TEXTS = ("split", "ending", "prompt_id", "file")
"""Columns of texts, each with few different values."""
LISTS = ("tags", "errors")
"""Columns of lists of texts."""
SORTABLE = ("step", "reward", "advantage", "tokens", "mean_logprob", "turns", "gap")
MAX_BARS = 24


@dataclass
class Codes:
    """A column of values that repeat: each value is stored once."""

    values: list[Any] = field(default_factory=list)
    codes: array = field(default_factory=lambda: array("l"))
    _code_of: dict[Any, int] = field(default_factory=dict)

    def add(self, value: Any) -> None:
        """Append a hashable value."""
        code = self._code_of.get(value)
        if code is None:
            code = self._code_of[value] = len(self.values)
            self.values.append(value)
        self.codes.append(code)

    def matches(self, wanted: Any) -> np.ndarray:
        """Return a mask of the rows whose value equals `wanted`, or whose list contains it."""
        chosen = [
            code
            for code, value in enumerate(self.values)
            if (wanted in value if isinstance(value, tuple) else value == wanted)
        ]
        return np.isin(np.array(self.codes), chosen)


@dataclass(frozen=True)
class Filter:
    """Which rollouts to show. None and "" mean any."""

    split: str = ""
    step_from: float = -math.inf
    step_to: float = math.inf
    reward_from: float = -math.inf
    reward_to: float = math.inf
    tag: str = ""
    ending: str = ""
    error: str = ""
    group: int | None = None
    prompt_id: str = ""


class RolloutTable:
    """All rollouts of one run."""

    def __init__(self) -> None:
        self._numbers = {name: array("d") for name in NUMBERS}
        self._codes = {name: Codes() for name in (*TEXTS, *LISTS)}
        self._live: np.ndarray | None = None
        self.num_invalid = 0
        """Number of rows that lack a step, a group or a sample."""

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows in the order of the file."""
        for row in rows:
            if not all(is_number(row.get(name)) for name in ("step", "group", "sample")):
                self.num_invalid += 1
                continue
            for name, column in self._numbers.items():
                value = row.get(name)
                column.append(value if is_number(value) else math.nan)
            for name in TEXTS:
                value = row.get(name)
                self._codes[name].add(value if isinstance(value, str) else "")
            for name in LISTS:
                value = row.get(name)
                texts = value if isinstance(value, list) else ()
                self._codes[name].add(tuple(str(text) for text in texts))
        if rows:
            self._live = None

    def __len__(self) -> int:
        return len(self._numbers["step"])

    def column(self, name: str) -> np.ndarray:
        """Return a column of numbers, one for each row."""
        return np.array(self._numbers[name])

    def texts(self, name: str, rows: np.ndarray) -> list[str]:
        """Return the values of a column of texts in some rows."""
        column = self._codes[name]
        return [column.values[column.codes[row]] for row in rows]

    def live_rows(self) -> np.ndarray:
        """Return the indices of the rows that count, in order. If an iteration was written twice,
        its rows of the second time replace those of the first.
        """
        if self._live is None:
            self._live = self._find_live_rows()
        return self._live

    def _find_live_rows(self) -> np.ndarray:
        if not len(self):
            return np.empty(0, np.int64)
        step, group, sample = (self.column(name) for name in ("step", "group", "sample"))
        split = np.array(self._codes["split"].codes)
        same = (step[1:] == step[:-1]) & (split[1:] == split[:-1])
        rises = (group[1:] > group[:-1]) | ((group[1:] == group[:-1]) & (sample[1:] > sample[:-1]))
        block = np.concatenate([[0], np.cumsum(~(same & rises))])
        first_rows = np.flatnonzero(np.concatenate([[True], block[1:] != block[:-1]]))
        newest = {(split[row], step[row]): block[row] for row in first_rows}
        is_newest = np.zeros(block[-1] + 1, bool)
        is_newest[list(newest.values())] = True
        return np.flatnonzero(is_newest[block])

    def select(self, chosen: Filter) -> np.ndarray:
        """Return the indices of the rows that pass the filter, in order."""
        rows = self.live_rows()
        mask = np.ones(len(self), bool)
        for name, low, high in (
            ("step", chosen.step_from, chosen.step_to),
            ("reward", chosen.reward_from, chosen.reward_to),
        ):
            if low > -math.inf or high < math.inf:
                column = self.column(name)
                mask &= (column >= low) & (column <= high)
        for name, wanted in (
            ("split", chosen.split),
            ("tags", chosen.tag),
            ("ending", chosen.ending),
            ("errors", chosen.error),
            ("prompt_id", chosen.prompt_id),
        ):
            if wanted:
                mask &= self._codes[name].matches(wanted)
        if chosen.group is not None:
            mask &= self.column("group") == chosen.group
        return rows[mask[rows]]

    def ordered(self, rows: np.ndarray, key: str) -> np.ndarray:
        """Return `rows` sorted by a column of `SORTABLE`; "-reward" sorts from high to low. Rows
        without a value come last.
        """
        name = key.removeprefix("-")
        if name not in SORTABLE:
            return rows
        values = self.column(name)[rows]
        return rows[np.argsort(-values if key.startswith("-") else values, kind="stable")]

    def row(self, index: int) -> Row:
        """Return one row. Numbers without a value are None."""
        numbers = {name: _plain_number(column[index]) for name, column in self._numbers.items()}
        others = {name: codes.values[codes.codes[index]] for name, codes in self._codes.items()}
        return {**numbers, **others}

    def choices(self, name: str) -> list[tuple[str, int]]:
        """Return the values of a column of texts or lists with their counts, most frequent first.
        Values of lists are counted one by one.
        """
        codes = self._codes[name]
        counts: dict[str, int] = {}
        live_codes = np.array(codes.codes, np.int64)[self.live_rows()]
        for value, count in zip(
            codes.values, np.bincount(live_codes, minlength=len(codes.values)), strict=True
        ):
            for text in value if isinstance(value, tuple) else (value,):
                if text and count:
                    counts[text] = counts.get(text, 0) + int(count)
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def histogram(rewards: np.ndarray) -> list[dict[str, Any]]:
    """Return bars with `low`, `high` and `count`: one for each value if there are at most MAX_BARS
    values, else MAX_BARS bars of equal width. Values that are not finite are left out.
    """
    finite = rewards[np.isfinite(rewards)]
    if not len(finite):
        return []
    values, counts = np.unique(finite, return_counts=True)
    if len(values) <= MAX_BARS:
        edges = [(value, value) for value in values.tolist()]
    else:
        counts, bounds = np.histogram(finite, MAX_BARS)
        edges = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    return [
        {"low": low, "high": high, "count": count}
        for (low, high), count in zip(edges, counts.tolist(), strict=True)
    ]


def rows_of_summary(summary: Mapping[str, Any]) -> Row:
    """Return the index row of a row of *_rollout_summaries.jsonl, without a place of its texts."""
    turns = [turn for turn in summary.get("steps") or () if isinstance(turn, dict)]
    endings = [
        name.removeprefix("stop/")
        for turn in turns[-1:]
        for name, value in (turn.get("metrics") or {}).items()
        if name.startswith("stop/") and value == 1
    ]
    lengths = [turn.get("ac_len") for turn in turns]
    return {
        "step": summary.get("iteration"),
        "split": summary.get("split"),
        "group": summary.get("group_idx"),
        "sample": summary.get("traj_idx"),
        "tags": summary.get("tags"),
        "prompt_id": summary.get("prompt_id"),
        "sampler_step": summary.get("sampling_client_step"),
        "reward": summary.get("total_reward"),
        "tokens": sum(length for length in lengths if isinstance(length, int)),
        "turns": len(turns),
        "ending": endings[0] if endings else "",
    }


def _plain_number(value: float) -> float | int | None:
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else value
