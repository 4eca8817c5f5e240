"""`planish trace`: write a timeline of a traced run for Perfetto."""

import argparse

from planish.processes.arguments import argument_adder
from planish.runlog.spans import write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish trace`."""
    add = argument_adder(parser)
    add("RUN", "directory of a run (its log_path)", dest="traced")
    add("--out FILE", "output file (default: trace.json in the run's directory)")


def run(arguments: argparse.Namespace) -> None:
    """Write the timeline and print its path."""
    print(f"{write_trace(arguments.traced, arguments.out)}: open it at https://ui.perfetto.dev")
