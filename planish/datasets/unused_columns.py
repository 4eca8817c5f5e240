"""Count the columns of a dataset that a reader does not use, and name them in one warning."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from planish.datasets.layouts import Layout, find_layout

_log = logging.getLogger(__name__)
_logged: set[str] = set()
"""The warnings that were logged in this process. A dataset is read several times in a run."""


class UnusedColumns:
    """Columns that were not used, each with the number of its rows and the first of them."""

    def __init__(self, dataset: str) -> None:
        self.dataset = dataset
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, row: Mapping[str, Any], used: Collection[str], where: str) -> None:
        """Count the columns of a row that are not in `used` and not null."""
        for name, value in row.items():
            if value is not None and name not in used:
                count, first = self._found.get(name, (0, where))
                self._found[name] = count + 1, first

    def add_layout(self, row: Mapping[str, Any], layouts: Mapping[Layout, Any], where: str) -> None:
        """Count the columns of a row that its layout does not use."""
        self.add(row, find_layout(row, layouts, where).used, where)

    def warn(self) -> None:
        """Log the columns, unless this process has logged the same warning before."""
        if not self._found:
            return
        names = ", ".join(
            f'"{name}" ({count} {"row" if count == 1 else "rows"}, first in {first})'
            for name, (count, first) in self._found.items()
        )
        text = f"dataset {self.dataset}: columns that are not used: {names}"
        if text not in _logged:
            _logged.add(text)
            _log.warning("%s", text)
