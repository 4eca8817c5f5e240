"""`planish rollouts`: show a run's trajectories in the terminal: prompts, answers, the parts of the
reward, and how each trajectory ended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from planish.errors import UserError
from planish.files import read_rows
from planish.processes.arguments import argument_adder
from planish.reports.rollout_files import find_rollout_texts, split_label

Row = Mapping[str, Any]
_DEFAULT_LIMIT = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish rollouts`."""
    add = argument_adder(parser)
    add("RUN", "directory of a run (its log_path)", type=Path)
    add("--step N", "training step to show (default: the last recorded step)", type=int)
    add("--eval NAME", "show the evaluation NAME instead of training")
    add_order = argument_adder(parser.add_mutually_exclusive_group())
    add_order("--best K", "show only the K trajectories with the highest reward", type=int)
    add_order("--worst K", "show only the K trajectories with the lowest reward", type=int)
    add("--reward MIN:MAX", "show only rewards in this range; MIN or MAX may be left out")
    add("--tag TAG", "show only groups with this tag")
    add("--text WORD", "show only trajectories whose text contains WORD")
    add(
        "--limit K",
        "maximum number of trajectories if neither --best nor --worst is given; 0 = all "
        "(default: %(default)s)",
        default=_DEFAULT_LIMIT,
    )
    add("--json", "print one JSON object per trajectory", action="store_true")


def run(arguments: argparse.Namespace) -> None:
    """Print the trajectories that match the options."""
    low, high = _parse_range(arguments.reward)
    for name, minimum in (("best", 1), ("worst", 1), ("limit", 0)):
        value = getattr(arguments, name)
        if value is not None and value < minimum:
            raise UserError(f"{name}={value}: give a whole number of at least {minimum}")
    path = _rollout_file(arguments.run, arguments.eval, arguments.step)
    rows = read_rows(path)
    if arguments.reward is not None:
        rows = [row for row in rows if low <= _reward(row) <= high]
    if arguments.tag is not None:
        rows = [row for row in rows if arguments.tag in row["tags"]]
    if arguments.text is not None:
        rows = [row for row in rows if any(arguments.text in text for text in _texts(row))]
    selected = _select(rows, arguments)
    if arguments.json:
        for row in selected:
            print(json.dumps(row))
        return
    console = Console(highlight=False)
    for row in selected:
        _print(console, row)
    count_text = f"{len(selected)} of {len(rows)}" if len(selected) < len(rows) else str(len(rows))
    is_limited = arguments.best is None and arguments.worst is None and len(selected) < len(rows)
    hint = "; --limit 0 shows all" if is_limited else ""
    console.print(
        Text(f"{count_text} trajectories, from {path}{hint}", style="dim"), soft_wrap=True
    )


def _rollout_file(run: Path, evaluation: str | None, step: int | None) -> Path:
    """Return the file with the trajectories of one step. If there is none, raise a UserError that
    lists the steps that exist.
    """
    if not run.is_dir():
        raise UserError(f"RUN {run}: there is no such directory; give the log_path of a run")
    label = "train" if evaluation is None else split_label(f"eval/{evaluation}")
    files = find_rollout_texts(run)
    steps = sorted(iteration for name, iteration in files if name == label)
    if not steps:
        splits = sorted({name for name, _ in files})
        if splits:
            available = ", ".join("training" if s == "train" else f"--eval {s[5:]}" for s in splits)
            raise UserError(f"RUN {run} has no rollouts of this kind; it has {available}")
        raise UserError(
            f"RUN {run} has no *_rollouts.jsonl: no step is finished yet, rollout_json_export was "
            "off, or an older planish made the run; its pages (*.html) show rollouts"
        )
    if step is not None and step not in steps:
        raise UserError(f"step={step}: give one of {_abbreviate(steps)}")
    return files[label, steps[-1] if step is None else step]


def _abbreviate(steps: Sequence[int]) -> str:
    """Return a short list of steps: all of them, or the first three and the last."""
    if len(steps) <= 6:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ... {steps[-1]}"


def _parse_range(text: str | None) -> tuple[float, float]:
    if text is None:
        return -inf, inf
    low, colon, high = text.partition(":")
    try:
        bounds = float(low) if low else -inf, float(high) if high else inf
    except ValueError:
        bounds = inf, -inf
    if not colon or not bounds[0] <= bounds[1]:
        raise UserError(f"reward={text}: write MIN:MAX, such as 0.5:1, :0 or 1:")
    return bounds


def _select(rows: Sequence[Row], arguments: argparse.Namespace) -> Sequence[Row]:
    """Return the rows to show, in the order in which they are shown."""
    if arguments.best is not None:
        return sorted(rows, key=_reward, reverse=True)[: arguments.best]
    if arguments.worst is not None:
        return sorted(rows, key=_reward)[: arguments.worst]
    return rows[: arguments.limit or None]


def _reward(row: Row) -> float:
    """Return the total reward. JSON stores a reward that is not finite as null; it sorts below all
    others.
    """
    return -inf if row["total_reward"] is None else row["total_reward"]


def _texts(row: Row) -> Iterator[str]:
    for turn in row["turns"]:
        yield turn["observation"]
        yield turn["answer"]


def _print(console: Console, row: Row) -> None:
    tags = f", {', '.join(row['tags'])}" if row["tags"] else ""
    title = f"step {row['iteration']}, group {row['group_idx']}, trajectory {row['traj_idx']}{tags}"
    console.rule(Text(title, style="bold"), align="left")
    for number, turn in enumerate(row["turns"], start=1):
        has_several_turns = len(row["turns"]) > 1
        _print_text(
            console, "prompt" if number == 1 else f"environment, turn {number}", turn["observation"]
        )
        turn_label = f", turn {number}" if has_several_turns else ""
        _print_text(
            console, f"answer{turn_label} ({turn['answer_tokens']} tokens)", turn["answer"], "green"
        )
        reward_and_metrics = {"reward": turn["reward"], **turn["metrics"]}
        if has_several_turns:
            console.print(
                Text(f"  {_format_metrics(reward_and_metrics)}", style="cyan"), soft_wrap=True
            )
        for name, value in turn["logs"].items():
            console.print(Text(f"  {name}: {value}", style="dim"), soft_wrap=True)
    console.print(Text(_outcome(row), style="bold cyan"), soft_wrap=True)


def _print_text(console: Console, heading: str, text: str, style: str = "") -> None:
    console.print(Text(f"[{heading}]", style="dim"))
    console.print(Text(text, style=style), soft_wrap=True)


def _outcome(row: Row) -> str:
    """Describe the reward and its parts, the advantage, and how the trajectory ended."""
    turns = row["turns"]
    reward_parts = [
        *(_format_number(turn["reward"]) for turn in turns),
        f"{_format_number(row['group_reward'])} (group)",
    ]
    texts = [f"reward {_format_number(row['total_reward'])} = {' + '.join(reward_parts)}"]
    if row["advantage"] is not None:
        texts.append(f"advantage {row['advantage']:+.4g}")
    texts.append(f"ended: {row['stop_reason'] or 'completed'}")
    last = turns[-1]["metrics"] if turns else {}
    metrics = _format_metrics({**last, **row["group_metrics"]})
    return ", ".join(texts) + (f" | {metrics}" if metrics else "")


def _format_metrics(values: Mapping[str, float | None]) -> str:
    metrics = {name: value for name, value in values.items() if not name.startswith("stop/")}
    return ", ".join(f"{name} {_format_number(value)}" for name, value in metrics.items())


def _format_number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
