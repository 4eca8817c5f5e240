"""`planish doctor`: what planish uses on this machine and why, and what needs attention."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planish.doctor.examination import ExaminationOptions, examine
from planish.doctor.findings import Report, Section, collect_warnings
from planish.engine.settings import EngineSettings
from planish.errors import UserError
from planish.files import cache_home
from planish.model.kernels.verdicts import delete_verdicts
from planish.model.sources import DEFAULT_MODEL
from planish.model.weight_sizes import SCHEMES
from planish.processes.arguments import argument_adder
from planish.server.options import ServeOptions

_WIDTH = 100
"""The width of a line if stdout is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish doctor`."""
    add = argument_adder(parser)
    add("--model NAME", f"base model whose memory plan is shown (default: {DEFAULT_MODEL})")
    add("--device", "device: cpu, cuda, cuda:N, or auto", default="auto")
    add(
        "--quantize",
        "quantization scheme of the base weights in the memory plan (default: none)",
        choices=SCHEMES,
    )
    add("--data-dir DIR", "data directory of `planish serve`", default=ServeOptions.data_dir)
    add(
        "--retest", "test the kernels again, whatever earlier self-tests found", action="store_true"
    )
    add("--json", "print the report as JSON", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return 0 if nothing needs attention, else 1.

    Raises UserError if `--retest` cannot delete the stored verdicts.
    """
    if arguments.retest:
        _delete_verdicts(cache_home() / "kernels")
    with collect_warnings():  # the findings contain the same facts
        settings = EngineSettings(device=arguments.device, quantize=arguments.quantize)
        report = examine(ExaminationOptions(arguments.data_dir, arguments.model, settings))
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _print(report)
    return 1 if report.problems else 0


def _delete_verdicts(directory: Path) -> None:
    try:
        delete_verdicts(directory)
    except OSError as error:
        raise UserError(
            f"--retest: the verdicts in {directory} cannot be deleted ({error}); make the "
            "directory writable, or set PLANISH_HOME to another one"
        ) from error


def _print(report: Report) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    with console.capture() as printed:
        for section in report.sections:
            console.print(Text(section.name, style="bold"))
            console.print(_table(section))
        problem_names = [f"{section}/{finding.name}" for section, finding in report.problems]
        conclusion = (
            f"Needs attention: {', '.join(problem_names)}"
            if problem_names
            else "Nothing needs attention"
        )
        console.print(Text(f"{conclusion} ({report.seconds:.1f} s)", style="bold"))
    for line in printed.get().splitlines():
        print(line.rstrip())  # rich fills each row of a table with spaces


def _table(section: Section) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in section.findings:
        mark = Text("!", style="bold yellow") if finding.needs_attention else Text(" ")
        text = Text(finding.text)
        if finding.needs_attention:
            text.append(f"\nRemedy: {finding.remedy}", style="yellow")
        table.add_row(mark, Text(finding.name), text)
    return table
