"""The tables of metrics in docs, as programs read them.

Each page has its table between two marks, and the tables are the only place where a metric is
defined. In a pattern, <word> stands for any text. A pattern that begins with env/ also covers
<evaluator>/env/..., the same measure on an evaluator's rollouts. Of several patterns that fit a
key, the first counts.
"""

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"
PAGES = (
    "reference/metrics.md",
    "guide/supervised.md",
    "guide/evaluation.md",
    "guide/distillation.md",
    "recipes/dpo.md",
    "recipes/preference_model.md",
)
LOOP_OF_PAGE = {
    "guide/distillation.md": ("reference/metrics.md", "guide/supervised.md"),
    "recipes/dpo.md": ("guide/supervised.md",),
    "recipes/preference_model.md": ("guide/supervised.md",),
}
"""Pages whose runs also log the metrics of a loop, which other pages define."""


@dataclass(frozen=True)
class Metric:
    """A row of a table."""

    pattern: str
    definition: str

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        expression = "(.+)".join(map(re.escape, re.split(r"<\w+>", self.pattern)))
        prefix = "(?:[^/]+/)?" if self.pattern.startswith("env/") else ""
        return re.compile(prefix + expression)

    def covers(self, key: str) -> bool:
        return self._expression.fullmatch(key) is not None


def metrics_in(text: str) -> tuple[Metric, ...]:
    """Return the rows of the tables between the marks. Raises ValueError without marks, or for a
    row that does not have one cell for each cell of its header.
    """
    _, found_begin, rest = text.partition(BEGIN)
    tables, found_end, _ = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r} around its tables")
    metrics = []
    columns: list[str] = []
    for line in tables.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("| metric "):
            columns = cells
        elif line.startswith("| `"):
            if len(cells) != len(columns):
                raise ValueError(f"this row has {len(cells)} cells, and not {len(columns)}: {line}")
            row = dict(zip(columns, cells, strict=True))
            metrics.append(Metric(row["metric"].strip("`"), row["definition"]))
    return tuple(metrics)


@cache
def metrics_of(page: str) -> tuple[Metric, ...]:
    """Return the metrics that a page of docs defines."""
    return metrics_in((DOCS / page).read_text(encoding="utf-8"))


def definition_of(key: str, page: str = "reference/metrics.md") -> Metric | None:
    """Return the definition of a metric, such as test/env/all/correct, as the runs that `page`
    describes log it. None without a definition.
    """
    pages = (page, *LOOP_OF_PAGE.get(page, ()))
    return next(
        (metric for each in pages for metric in metrics_of(each) if metric.covers(key)), None
    )
