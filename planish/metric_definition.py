"""What a metric means, said once where it is logged, and the table of a page that is made from
that.

In a pattern, <word> stands for any text. A pattern that begins with env/ also covers
<evaluator>/env/..., the same measure on an evaluator's rollouts. Of several patterns that fit a
key, the first counts.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from planish.errors import UserError
from planish.files import write_whole


@dataclass(frozen=True)
class MetricDefinition:
    pattern: str
    unit: str
    """"" where it is a plain number."""
    definition: str
    healthy: str = ""
    """What it does in a run that learns; "" where it says nothing about that."""
    sick: str = ""

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        parts = re.split(r"<\w+>", self.pattern)
        expression = "(.+)".join(map(re.escape, parts))
        return re.compile(
            f"(?:[^/]+/)?{expression}" if self.pattern.startswith("env/") else expression
        )

    def covers(self, key: str) -> bool:
        return self._expression.fullmatch(key) is not None


@dataclass(frozen=True)
class Section:
    title: str
    metrics: tuple[MetricDefinition, ...]


SPANS = (
    MetricDefinition(
        "time/<span>:total",
        "s",
        "sum of a part that ran several times in the step; parts that ran at once overlap",
    ),
    MetricDefinition("time/<span>:count", "", "how many times it ran"),
    MetricDefinition("time/<span>:mean", "s", "mean of one time"),
    MetricDefinition(
        "time/<span>:max",
        "s",
        "the longest",
        "",
        "far above the mean: one straggler keeps the step waiting",
    ),
)
"""What planish/runlog/spans.py measures in any loop of parts that ran several times in a step."""


def definition_in(sections: Iterable[Section], key: str) -> MetricDefinition | None:
    """The definition of a metric as logged, such as test/env/all/correct; None if it has none."""
    return next(
        (metric for section in sections for metric in section.metrics if metric.covers(key)), None
    )


def table(sections: Iterable[Section]) -> str:
    """The definitions in Markdown."""
    lines = []
    for section in sections:
        lines += [
            f"### {section.title}",
            "",
            "| metric | unit | definition | healthy | sick |",
            "|---|---|---|---|---|",
        ]
        for metric in section.metrics:
            cells = (
                f"`{metric.pattern}`",
                metric.unit,
                metric.definition,
                metric.healthy,
                metric.sick,
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def with_table(page: str, sections: Sequence[Section], begin: str, end: str) -> str:
    """The text of a page with the table, as it is now, between its marks `begin` and `end`."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise UserError(
            f"the page has no lines {begin!r} and {end!r}; put them around the place of the table"
        )
    return f"{before}{begin}\n\n{table(sections)}\n{end}{after}"


def rewrite(page: Path, sections: Sequence[Section], begin: str, end: str) -> None:
    """Put the table into a page of the documentation."""
    if not page.is_file():
        sys.exit(f"{page} is not there: run this in a checkout, not in an installed package")
    write_whole(page, with_table(page.read_text(encoding="utf-8"), sections, begin, end))
