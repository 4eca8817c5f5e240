"""Format rows for people: tables on a terminal, short sizes and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
_FILE_WIDTH = 10_000
"""The width of a table that is not printed to a terminal, so that each row is one line."""
Columns = Mapping[str, Callable[[Row], str]]
"""For each column, its heading and a function that returns the cell of a row."""


def print_table(rows: Sequence[Row], columns: Columns, empty_message: str) -> None:
    """Print one line for each row, or `empty_message` if there are none."""
    if not rows:
        print(empty_message)
        return
    table = Table(box=None, pad_edge=False)
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for row in rows:
        # rich would replace a string such as `:train:` with an emoji; it leaves Text unchanged.
        table.add_row(*(Text(cell(row)) for cell in columns.values()))
    console = Console()
    (console if console.is_terminal else Console(width=_FILE_WIDTH)).print(table)


def print_fields(row: Row) -> None:
    """Print one line for each field."""
    width = max(len(name) for name in row)
    for name, value in row.items():
        print(f"{name:{width}}  {value}")


def format_size(num_bytes: int | None) -> str:
    """Return a number of bytes in binary units, such as 1.5 GiB; "-" for None."""
    if num_bytes is None:
        return "-"
    amount, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    digits = 0 if amount >= 10 or units[0] == "B" else 1
    return f"{amount:.{digits}f} {units[0]}"


def format_time(text: str | None) -> str:
    """Return an ISO 8601 time in this machine's time zone; "-" for None."""
    return (
        "-"
        if text is None
        else datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")
    )


def format_time_left(text: str | None, now: datetime | None = None) -> str:
    """Return how long until an ISO 8601 time in its largest fitting unit, such as 3 h; "-" for
    None.
    """
    if text is None:
        return "-"
    seconds = int((datetime.fromisoformat(text) - (now or datetime.now(UTC))).total_seconds())
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {name}"
    return f"{max(0, seconds)} s"
