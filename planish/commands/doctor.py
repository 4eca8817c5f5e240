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
from planish.doctor.gpu.cards import CARDS
from planish.doctor.gpu.report import GpuReport, ReportOptions
from planish.engine.settings import EngineSettings
from planish.errors import UserError
from planish.files import cache_home
from planish.model.architecture.weight_sizes import SCHEMES
from planish.model.kernels.self_test.verdicts import delete_verdicts
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.processes.arguments import argument_adder
from planish.server.options import ServeOptions

DEFAULT_REPORT = "planish-gpu-report.json"
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
    add(
        "--plan MODEL",
        "print the memory and the computed speeds of a base model on the GPU of --gpu, which this "
        "machine need not have",
    )
    add("--gpu NAME", "the GPU of --plan", choices=tuple(CARDS))
    add(
        "--gpu-report FILE",
        "test and measure this machine's GPU for at most 10 minutes, and write the results to "
        f"FILE, to attach to an issue (default: {DEFAULT_REPORT}); a second call continues",
        nargs="?",
        const=DEFAULT_REPORT,
    )
    add("--json", "print the report as JSON", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return 0 if nothing needs attention, else 1.

    With `--gpu-report`, return 0 if the report is complete. Raises UserError if `--retest` cannot
    delete the stored verdicts, if options do not belong together, or if the file of the report
    cannot be used.
    """
    _check(arguments)
    if arguments.retest:
        _delete_verdicts(cache_home() / "kernels")
    if arguments.gpu_report is not None:
        return _gpu_report(Path(arguments.gpu_report), arguments.device)
    if arguments.plan is not None:
        # A plan may need a config by transformers, whose import takes seconds.
        from planish.doctor.gpu.plan import plan

        with collect_warnings():
            report = plan(arguments.plan, arguments.gpu, arguments.quantize)
        return _show(report, as_json=arguments.json)
    with collect_warnings():  # the findings contain the same facts
        settings = EngineSettings(device=arguments.device, quantize=arguments.quantize)
        report = examine(ExaminationOptions(arguments.data_dir, arguments.model, settings))
    return _show(report, as_json=arguments.json)


def _check(arguments: argparse.Namespace) -> None:
    """Raise UserError if options contradict each other."""
    if (arguments.plan is None) != (arguments.gpu is None):
        raise UserError(
            "--plan and --gpu belong together; give both, such as --plan MODEL --gpu h100"
        )
    if arguments.gpu_report is None:
        return
    others = {
        "--plan": arguments.plan,
        "--model": arguments.model,
        "--quantize": arguments.quantize,
        "--json": arguments.json or None,
    }
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise UserError(
            f"--gpu-report has its own models and format; omit {', '.join(given)}, or --gpu-report"
        )


def _gpu_report(path: Path, device: str) -> int:
    with collect_warnings():
        is_complete = GpuReport(ReportOptions(path, device)).run()
    if is_complete:
        print(f"The report is complete. Please attach {path} to an issue.")
    else:
        print(f"The time is over. The same command continues the report in {path}.")
    return 0 if is_complete else 1


def _show(report: Report, *, as_json: bool) -> int:
    """Print the report and return the exit status."""
    if as_json:
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
