"""Rows for people: tables on a terminal, sizes and times in few signs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
_WIDE = 10_000
"""Where no terminal sets a width, a row is one line."""
Columns = Mapping[str, Callable[[Row], str]]


def print_table(rows: Sequence[Row], columns: Columns, nothing: str) -> None:
    """A line a row; `nothing` if there is none."""
    if not rows:
        print(nothing)
        return
    table = Table(box=None, pad_edge=False)
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for row in rows:
        # as text: `:train:` is an emoji of rich's
        table.add_row(*(Text(cell(row)) for cell in columns.values()))
    console = Console()
    (console if console.is_terminal else Console(width=_WIDE)).print(table)


def print_fields(row: Row) -> None:
    """A line a field."""
    width = max(len(name) for name in row)
    for name, value in row.items():
        print(f"{name:{width}}  {value}")


def size(count: int | None) -> str:
    if count is None:
        return "-"
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return (
        f"{amount:.0f} {units[0]}"
        if amount >= 10 or units[0] == "B"
        else f"{amount:.1f} {units[0]}"
    )


def time(text: str | None) -> str:
    """ISO 8601 with a zone, in the zone of this machine."""
    return (
        "-"
        if text is None
        else datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")
    )


def time_left(text: str | None, now: datetime | None = None) -> str:
    if text is None:
        return "-"
    seconds = int((datetime.fromisoformat(text) - (now or datetime.now(UTC))).total_seconds())
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {name}"
    return f"{max(0, seconds)} s"
