"""The main metrics of one step as a table for a terminal: rewards first, then environments, tests,
optimizer, and time last.

The table is compact, about ten lines for a step of RL. Each line holds as many metrics as fit.
Three kinds of metrics are only in metrics.jsonl: details such as totals over the run, counts of
rare events while they are 0, and spans that take little of the step's time.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

NAME_WIDTH = 22
VALUE_WIDTH = 9
SECTION_WIDTH = 12
FIRST_FAMILIES = ("reward", "env", "test", "optim", "kl")
LAST_FAMILIES = ("progress", "tokens", "time")
"""The families of metrics that come first and last. Other families are between them, sorted by
name.
"""
_ENVIRONMENT = re.compile(r"((?:[^/]+/)?env/[^/]+)/(.+)")
_DETAIL = re.compile(
    r"time/.+:(count|mean|max)|time/sampling_time_\w+|progress/.+|tokens/(cumulative|prefill).+"
    r"|optim/(adam_step|step|micro_batches:sum|(computed_|forest_)?tokens:sum|kl_sample_train_v1|ratio:min)"
    r"|(sampling|training)_client/.+|async/staleness_(min|mean)"
    r"|(.+/)?env/.+/(total_\w+|ob_tokens_per_turn|stop/completed|by_group/frac_(all|degenerate)\w*)"
)
_RARE_EVENT = re.compile(
    r"(.+/)?env/.+/(stop/\w+|unjudged|abstained|tool_errors)|num_(truncated|left_out)|rollout_errors/.+"
)
MIN_TIME_FRACTION = 0.05
"""A span is shown if it takes at least this share of the step's time."""


@dataclass(frozen=True, order=True)
class _Section:
    rank: int
    title: str


def metrics_table(step: int, num_steps: int, metrics: Mapping[str, float], width: int) -> Table:
    """Return the main metrics as a table of at most `width` columns. Names that are too long end in
    an ellipsis.
    """
    sections: dict[_Section, list[tuple[str, float]]] = {}
    for key, value in metrics.items():
        if _is_main(key, value, metrics.get("time/total", 0.0)):
            section, name = _section_and_name(key)
            sections.setdefault(section, []).append((name, value))
    metrics_per_row = max(1, (width - SECTION_WIDTH - 1) // (NAME_WIDTH + VALUE_WIDTH + 2))
    title = f"── step {step}/{num_steps} ".ljust(
        min(width, SECTION_WIDTH + metrics_per_row * (NAME_WIDTH + VALUE_WIDTH + 2)), "─"
    )
    table = Table(
        title=title,
        title_style="bold",
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column(style="bold", width=SECTION_WIDTH, no_wrap=True, overflow="ellipsis")
    for _ in range(metrics_per_row):
        table.add_column(style="dim", width=NAME_WIDTH, no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", width=VALUE_WIDTH, no_wrap=True)
    for section, named_values in sorted(sections.items()):
        for start in range(0, len(named_values), metrics_per_row):
            row = [
                Text(text)
                for name, value in named_values[start : start + metrics_per_row]
                for text in (name, format_number(value))
            ]
            table.add_row(Text(section.title if start == 0 else ""), *row)
    return table


def format_number(value: float) -> str:
    """Format a number in at most nine characters. Whole numbers below 1e8 keep all their digits;
    others are rounded to three or four significant digits.
    """
    if float(value).is_integer() and abs(value) < 1e8:
        whole = f"{int(value):,}"
        return whole if len(whole) <= VALUE_WIDTH else str(int(value))
    text = f"{value:.4g}"
    return f"{value:.2e}" if "e" in text else text


def _is_main(key: str, value: float, step_seconds: float) -> bool:
    """Return whether the table shows the metric. `step_seconds` is the duration of the step."""
    if _DETAIL.fullmatch(key):
        return False
    if _RARE_EVENT.fullmatch(key):
        return value != 0
    return value >= MIN_TIME_FRACTION * step_seconds if key.startswith("time/") else True


def _section_and_name(key: str) -> tuple[_Section, str]:
    """Return a metric's section and its name there: "env/all/correct" is "correct" in the section
    "env/all".
    """
    if key.endswith("reward/total"):
        return _section("reward", "reward"), key.removesuffix("/reward/total")
    if environment := _ENVIRONMENT.fullmatch(key):
        return _section("env" if key.startswith("env/") else "test", environment[1]), environment[2]
    title, slash, name = key.partition("/")
    if not slash:
        title = "kl" if key.startswith("kl_") else ""
    return _section(title, title), name or key


def _section(family: str, title: str) -> _Section:
    if family in FIRST_FAMILIES:
        return _Section(FIRST_FAMILIES.index(family), title)
    last = LAST_FAMILIES.index(family) + 1 if family in LAST_FAMILIES else 0
    return _Section(len(FIRST_FAMILIES) + last, title)
