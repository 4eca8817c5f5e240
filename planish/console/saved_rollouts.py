"""The rollouts that a page as one file contains (export.py): whole groups, spread evenly over the
steps of a run, at most MAX_ROLLOUTS with at most MAX_BYTES of texts and tokens.
"""

from collections.abc import Sequence

import numpy as np

from planish.console.answers import with_texts
from planish.console.row_tail import Row
from planish.console.run_reader import RunReader
from planish.files import short_path

MAX_ROLLOUTS = 400
"""The maximum number of rollouts of a file with one run; several runs share it."""
MAX_BYTES = 16 << 20
"""The maximum size of the texts and tokens of these rollouts."""


def saved_rollouts(reader: RunReader, num_runs: int) -> Row:
    """Return the rollouts that a file with `num_runs` runs contains of one of them, and the `total`
    number of its rollouts. static/saved_rollouts.js answers the requests of the views with them.
    """
    with reader.lock:
        reader.refresh_rollouts()
        table = reader.rollouts
        live = table.live_rows()
        groups = _groups(*(table.column(name)[live] for name in ("step", "group")))
        sizes = np.nan_to_num(table.column("bytes")[live])
        chosen = _spread(groups, sizes, MAX_ROLLOUTS // num_runs, MAX_BYTES // num_runs)
        return {
            "path": short_path(reader.path),
            "total": len(live),
            "rollouts": [with_texts(reader, table.row(row)) for row in live[chosen]],
        }


def _groups(step: np.ndarray, group: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the rows of each group, in order: neighbouring rows with the same step
    and group.
    """
    if not len(step):
        return []
    borders = np.flatnonzero((step[1:] != step[:-1]) | (group[1:] != group[:-1])) + 1
    return np.split(np.arange(len(step)), borders)


def _spread(
    groups: Sequence[np.ndarray], sizes: np.ndarray, most: int, most_bytes: int
) -> np.ndarray:
    """Return the rows of as many groups as fit, spread evenly from the first to the last."""
    count = min(len(groups), most)
    while count:
        places = np.unique(np.linspace(0, len(groups) - 1, count).round().astype(int))
        rows = np.concatenate([groups[place] for place in places])
        if len(rows) <= most and sizes[rows].sum() <= most_bytes:
            return rows
        count = min(count - 1, count * 49 // 50)
    return np.empty(0, np.int64)
