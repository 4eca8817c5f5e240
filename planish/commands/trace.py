"""`planish trace`: when each part of a traced run ran, for Perfetto."""

import argparse

from planish.runlog.spans import write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traced", metavar="RUN", help="the log_path of a run")
    parser.add_argument("--out", metavar="FILE", help="where to write (trace.json in the run)")


def run(arguments: argparse.Namespace) -> None:
    print(f"{write_trace(arguments.traced, arguments.out)}: open it at https://ui.perfetto.dev")
