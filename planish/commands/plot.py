"""`planish plot`: draw the curves of runs, as a picture and as a page."""

import argparse

from planish.processes.arguments import argument_adder
from planish.runlog.plotting import plot_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish plot`."""
    add = argument_adder(parser)
    add("RUN", "directory of a run (its log_path), or its metrics.jsonl", dest="runs", nargs="+")
    add(
        "--out DIR",
        "output directory (default: the run directory, or with several runs the current one)",
    )
    add("--metrics A,B", "metrics or patterns such as 'test/*'; each gets its own panel")
    add("--smooth N", "also draw the running mean over N steps; 1 = no running mean", default=1)


def run(arguments: argparse.Namespace) -> None:
    """Draw the curves and print the paths of the files."""
    metrics = arguments.metrics.split(",") if arguments.metrics is not None else None
    for path in plot_runs(arguments.runs, arguments.out, metrics=metrics, smooth=arguments.smooth):
        print(path)
