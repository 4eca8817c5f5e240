"""`planish inspect-logs`: write evaluations as log files of Inspect."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from planish.errors import UserError
from planish.processes.arguments import argument_adder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish inspect-logs`."""
    add = argument_adder(parser)
    add("DIR", "directory of `planish eval`, or of a run with evaluations", dest="evaluated")
    add(
        "--log-dir DIR",
        "directory for the logs; `inspect view --log-dir DIR` shows them (%(default)s)",
        type=Path,
        default=Path("logs"),
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the logs and print their paths."""
    try:
        logs = importlib.import_module("planish.integrations.inspect.logs")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "inspect_ai":
            raise
        raise UserError(
            "planish inspect-logs needs Inspect; run: pip install 'planish[inspect]'"
        ) from error
    for path in logs.write_logs(arguments.evaluated, arguments.log_dir):
        print(path)
