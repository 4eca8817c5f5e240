"""`planish sweep`: run a recipe with each combination of some options' values, one run after the
other.

Each run is a process of its own, with a directory of its own below the sweep's. The same command
started again runs what is missing: it leaves out finished runs and resumes interrupted ones.

    DIR/OPTION=VALUE,...   the directory of each run
    DIR/sweep.jsonl        one object for each run that has ended: its options and its exit status
    DIR/comparison.html    all curves, findings and options of the runs as one page
"""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, get_origin

import chz

from planish.commands.recipe_modules import (
    import_recipe,
    module_name,
    options_type,
    read_recipe_options,
)
from planish.commands.tables import print_table
from planish.console.answers import Answers
from planish.console.catalog import Catalog
from planish.console.export import export_page
from planish.console.run_reader import RunReader
from planish.console.run_state import FINISHED
from planish.console.web import to_json
from planish.errors import UserError
from planish.files import Row, RowFile, lock_directory, read_rows, write_atomically
from planish.processes.arguments import argument_adder
from planish.recipes.rl_options import instead_of_training
from planish.runlog.run_directory import CHECKPOINTS
from planish.training.option_rules import check_fields
from planish.training.run_options import RecipeOptions, RunOptions, check_run

RECORD = "sweep.jsonl"
PAGE = "comparison.html"
_METRICS = ("test/env/all/correct", "test/nll", "optim/entropy")
"""Metrics of the table besides the run's reward, if a run has them."""


_MAX_NAME_LENGTH = 255
"""Of a file's name, on the file systems of Linux."""


@dataclass(frozen=True)
class SweptRun:
    """One combination of values."""

    values: dict[str, str]
    """The values of the swept options."""
    options: list[str]
    """All options of the recipe but log_path, as words."""
    directory: Path

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended with these options, and not because it was asked to stop."""
        recorded = [row for row in read_rows(self.directory.parent / RECORD) if self.is_row(row)]
        if not recorded or recorded[-1]["status"] != 0:
            return False
        has_checkpoints = (self.directory / CHECKPOINTS).exists()
        return not has_checkpoints or read_run(self.directory).state() == FINISHED

    def is_row(self, row: Row) -> bool:
        """Return whether a row of the record is about this run with these options."""
        return (row["run"], row["options"]) == (self.directory.name, self.options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish sweep`."""
    add = argument_adder(parser)
    add("RECIPE", "name of a recipe (math_rl), or your own recipe as a module or .py file")
    add(
        "name=value",
        "options of the recipe; name=a,b,c runs it with each of these values, and several such "
        "options with each combination. log_path is the directory of the sweep (default: "
        "runs/sweep-RECIPE)",
        dest="options",
        nargs="*",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run what is missing of the sweep, and print a table. Return 0 if all runs are finished, 1 if
    a run failed, and 128 plus the signal's number after a signal.
    """
    module = import_recipe(arguments.recipe)
    directory, runs = plan(arguments.recipe, module, arguments.options)
    check_runs(module, runs)
    is_file = arguments.recipe.endswith(".py")
    program = [arguments.recipe] if is_file else ["-m", module_name(arguments.recipe)]
    with lock_directory(directory, "log_path", "this sweep"):
        for number, one in enumerate(runs, start=1):
            name = f"run {number} of {len(runs)}: {one.directory.name}"
            if one.is_finished:
                print(f"{name}: finished before", flush=True)
                continue
            print(name, flush=True)
            command = [*program, *one.options, f"log_path={one.directory}"]
            status, stopped_by = run_process([sys.executable, *command])
            with closing(RowFile(directory / RECORD)) as record:
                record.append({"run": one.directory.name, "options": one.options, "status": status})
            if stopped_by is not None:
                report(directory, runs)
                print(f"stopped in {name}; the same command resumes there", file=sys.stderr)
                return 128 + stopped_by
        report(directory, runs)
    failed = [one.directory.name for one in runs if not one.is_finished]
    if failed:
        print(
            f"not finished: {'; '.join(failed)}; the same command runs only these again",
            file=sys.stderr,
        )
    return 1 if failed else 0


def plan(recipe: str, module: ModuleType, words: Sequence[str]) -> tuple[Path, list[SweptRun]]:
    """Return the directory of the sweep and its runs. Raises UserError for words from which no
    sweep can be made.
    """
    if options_type(module) is None:
        raise UserError(
            f"RECIPE {recipe} has no class `Options`, so its options are unknown; write it like "
            "planish/recipes/rl_options.py shows"
        )
    fixed, swept = {}, {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or word.startswith("-"):
            raise UserError(f"{word}: options are written name=value or name=a,b,c")
        if name in fixed or name in swept:
            raise UserError(f"{name} is given twice; write all its values as {name}=a,b,c")
        if "," in value and not is_sequence(module, name):
            swept[name] = value.split(",")
        else:
            fixed[name] = value
    for name, values in swept.items():
        if "" in values or len(set(values)) < len(values):
            raise UserError(
                f"{name}={','.join(values)}: a value is empty or given twice; give each once"
            )
    if not swept:
        raise UserError("give an option with several values, such as learning_rate=1e-4,3e-4")
    if "log_path" in swept:
        raise UserError(
            "log_path is the one directory of the sweep; each run gets its own below it"
        )
    name = Path(recipe).stem if recipe.endswith(".py") else recipe.rpartition(".")[2]
    directory = Path(fixed.pop("log_path", f"runs/sweep-{name}")).expanduser()
    runs = []
    for combination in itertools.product(*swept.values()):
        values = dict(zip(swept, combination, strict=True))
        options = [f"{name}={value}" for name, value in (fixed | values).items()]
        label = ",".join(f"{name}={value}" for name, value in values.items())
        runs.append(SweptRun(values, options, directory / re.sub(r"[^\w.,=+-]", "_", label)))
    for one in runs:
        if len(one.directory.name) > _MAX_NAME_LENGTH:
            raise UserError(
                f"the directory of a run would have a name of {len(one.directory.name)} characters, "
                f"and {_MAX_NAME_LENGTH} are possible: {one.directory.name}; sweep shorter values, "
                "such as links to long paths"
            )
    if len({one.directory for one in runs}) < len(runs):
        raise UserError(
            "two values differ only in characters that a directory's name cannot have; sweep them "
            "in two sweeps"
        )
    return directory, runs


def is_sequence(module: ModuleType, name: str) -> bool:
    """Return whether a value of the option is a list itself, such as loggers=wandb,trackio."""
    field = chz.chz_fields(options_type(module)).get(name)
    return field is not None and get_origin(field.final_type) in (tuple, list)


def check_runs(module: ModuleType, runs: Sequence[SweptRun]) -> None:
    """Raise UserError for wrong options of a run, and for two runs with equal options, such as
    1e-4 and 0.0001. Nothing is loaded or written.
    """
    names: dict[str, str] = {}
    for one in runs:
        options = chz.asdict(check_options(module, one), include_type=True)
        name = names.setdefault(repr(options | {"log_path": None}), one.directory.name)
        if name != one.directory.name:
            raise UserError(f"{name} and {one.directory.name} are the same run; give one of them")


def check_options(module: ModuleType, run: SweptRun) -> Any:
    """Return the options of a run. Raise UserError for wrong ones. Nothing is loaded or written."""
    try:
        options = read_recipe_options(module, [*run.options, f"log_path={run.directory}"])
        check_fields(options)
        if isinstance(options, RecipeOptions):
            with instead_of_training(_check_config):
                module.main(options)
        return options
    except UserError as error:
        raise UserError(f"{error} (in {run.directory.name}; no run was started)") from error


def _check_config(config: Any) -> Path:
    if isinstance(config, RunOptions):
        check_run(config)
    return Path(config.log_path)


def run_process(command: Sequence[str]) -> tuple[int, int | None]:
    """Run a command, and return its exit status, and the number of a signal that came meanwhile.

    The command has a process group of its own, so Ctrl-C does not reach it twice: signals to this
    process are passed on, and the command saves its run.
    """
    came: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None = None) -> None:
        came.append(number)
        if process is not None:
            # A closed terminal is no reason to lose steps: SIGTERM saves the run.
            process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    with handled_signals(pass_on):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        if came:  # before there was a process
            process.send_signal(signal.SIGTERM)
        status = process.wait()
    return status, came[0] if came else None


@contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """In the block, call `handler` for SIGINT, SIGTERM and SIGHUP, unless they are ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number, old in previous.items() if old is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, previous[number])


def report(directory: Path, runs: Sequence[SweptRun]) -> None:
    """Print a table of the runs, and write the page that compares them."""
    readers = {one.directory: read_run(one.directory) for one in runs}
    summaries = {path: reader.summary() for path, reader in readers.items()}
    rewards = sorted({row["reward_name"] for row in summaries.values() if row["reward_name"]})
    known = [
        name
        for name in dict.fromkeys([*rewards, *_METRICS])
        if any(name in reader.metrics.columns for reader in readers.values())
    ]
    columns = {name: itemgetter(name) for name in [*runs[0].values, "steps", *known, "state"]}
    rows = [
        {
            **one.values,
            "steps": _num_steps(readers[one.directory], summaries[one.directory]["reward_name"]),
            **{name: _shown(readers[one.directory].metrics.last(name)) for name in known},
            "state": "finished" if one.is_finished else summaries[one.directory]["state"],
        }
        for one in runs
    ]
    print()
    print_table(rows, columns, "no runs")
    catalog = Catalog([directory])
    ids = {reader.path.resolve(): reader.id for reader in catalog.runs()}
    compared = [ids[one.directory.resolve()] for one in runs if one.directory.resolve() in ids]
    if compared:
        write_atomically(directory / PAGE, export_page(Answers(catalog), compared, to_json))
        print(f"\ncurves and options of all runs: {directory / PAGE}")
        print(f"the same while runs train: planish console {directory}")


def read_run(directory: Path) -> RunReader:
    """Return a reader that has read the run's metrics."""
    reader = RunReader(directory, directory.name)
    reader.refresh_metrics()
    return reader


def _num_steps(reader: RunReader, metric: str | None) -> str:
    """Return the number of trained steps. An evaluation of the final weights is not one."""
    if metric is None:
        return "0"
    steps, _ = reader.metrics.values(metric)
    return str(int(steps[-1]) + 1) if len(steps) else "0"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
