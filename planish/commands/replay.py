"""`planish replay`: sample recorded rollouts again, and compare them bit for bit."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from planish.console.replay import all_equal, replay
from planish.processes.arguments import argument_adder
from planish.reports.rollout_files import split_label
from planish.runlog.run_directory import weights_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish replay`."""
    add = argument_adder(parser)
    add("RUN", "directory of a run (its log_path)", dest="replayed")
    add("--step N", "step of the rollouts", type=int, required=True)
    add("--group N", "index of the group in its batch", type=int, required=True)
    add("--sample N", "index of the rollout in its group (default: all)", type=int)
    add("--eval NAME", "rollouts of the evaluation NAME instead of training")
    add(
        "--checkpoint PATH",
        "sample with these weights instead, a checkpoint (tinker://...) or a run directory: the "
        "same random numbers under another policy",
    )
    add("--json", "print one JSON object per turn", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison of each turn. Return 0 if all are equal, or with --checkpoint; else
    1.
    """
    split = "train" if arguments.eval is None else f"eval/{arguments.eval}"
    split_label(split)
    checkpoint = None if arguments.checkpoint is None else weights_of(arguments.checkpoint)
    turns = replay(
        arguments.replayed,
        arguments.step,
        arguments.group,
        sample=arguments.sample,
        split=split,
        checkpoint=checkpoint,
    )
    for turn in turns:
        print(json.dumps({**asdict(turn), "is_equal": turn.is_equal}) if arguments.json else turn)
    return 0 if all_equal(turns) or checkpoint is not None else 1
