"""`planish plot`: draw the curves of runs, as a picture and as a page."""

import argparse

from planish.runlog.plotting import plot_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish plot`."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="directory of a run (its log_path), or its metrics.jsonl",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="output directory (default: the run directory, or with several runs the current one)",
    )
    parser.add_argument(
        "--metrics",
        metavar="A,B",
        help="metrics or patterns such as 'test/*'; each gets its own panel",
    )
    parser.add_argument(
        "--smooth",
        metavar="N",
        type=int,
        default=1,
        help="also draw the running mean over N steps; 1 = no running mean (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Draw the curves and print the paths of the files."""
    metrics = arguments.metrics.split(",") if arguments.metrics is not None else None
    for path in plot_runs(arguments.runs, arguments.out, metrics=metrics, smooth=arguments.smooth):
        print(path)
