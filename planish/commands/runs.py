"""`planish runs`: list the training runs of a server or of this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from planish.client.checkpoint_records import Records, Row, as_json, open_records
from planish.commands.tables import format_time, print_fields, print_table
from planish.errors import UserError
from planish.model.architecture.weight_sizes import SCHEMES
from planish.processes.arguments import AddArgument, argument_adder
from planish.runlog.run_directory import CHECKPOINTS, weights_of
from planish.types import CheckpointPath


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish runs`."""
    add = argument_adder(parser)
    add_source_arguments(add)
    add("RUN", "id of a training run whose details are shown (default: list all runs)", nargs="?")
    add_limit_argument(add, "runs")


def add_source_arguments(add: AddArgument) -> None:
    """Add the arguments that say where records are read from, and --json."""
    add_server_arguments(add)
    add("--json", "print JSON", action="store_true")


def add_server_arguments(add: AddArgument) -> None:
    """Add the arguments of `resolve_server_url`: a server and its key, or a local directory."""
    add("--base-url URL", "URL of a server (default: PLANISH_BASE_URL, else no server)")
    add("--api-key KEY", "API key for the server (default: PLANISH_API_KEY, else TINKER_API_KEY)")
    add(
        "--data-dir DIR",
        "directory of this machine's checkpoints (default: PLANISH_DATA)",
        type=Path,
    )


def add_quantize_argument(add: AddArgument) -> None:
    """Add the argument that quantizes the base weights of an engine in this process."""
    add(
        "--quantize",
        "quantize the base weights; a checkpoint needs the scheme that it was trained on",
        choices=SCHEMES,
    )


def add_limit_argument(add: AddArgument, what: str) -> None:
    """Add the argument of `row_limit`."""
    add("--limit N", f"maximum number of {what} to list; 0 = all", default=20)


def row_limit(arguments: argparse.Namespace) -> int | None:
    """Return the maximum number of rows; None for all."""
    if arguments.limit < 0:
        raise UserError(
            f"--limit {arguments.limit}: give a whole number of at least 0; 0 lists all"
        )
    return arguments.limit or None


def run(arguments: argparse.Namespace) -> None:
    """List the training runs, or show one of them."""
    records = open_records(arguments.base_url, arguments.api_key, arguments.data_dir)
    if arguments.run is not None:
        check_run_id(arguments.run)
        _show_run(records, arguments.run, arguments.json)
        return
    rows = records.runs(row_limit(arguments))
    if arguments.json:
        print(as_json(rows))
        return
    print_table(
        rows,
        {
            "run": lambda row: row["training_run_id"],
            "recipe": lambda row: _recorded_metadata(row, "recipe_name"),
            "base model": lambda row: row["base_model"],
            "rank": lambda row: str(row["lora_rank"]),
            "last used": lambda row: format_time(row["last_request_time"]),
            "last state": _last_checkpoint_id,
            "log_path": lambda row: _recorded_metadata(row, "log_path"),
        },
        "no training runs",
    )


def check_run_id(run: str) -> None:
    """Raise UserError if `run` is a run directory, which `eval`, `export` and `chat` take, instead
    of an id.
    """
    if (Path(run) / CHECKPOINTS).is_file():
        run_id = CheckpointPath.parse(weights_of(run)).run_id
        raise UserError(
            f"RUN {run} is a run directory; give an id instead: its newest checkpoint has the id "
            f"{run_id}"
        )


def _show_run(records: Records, run_id: str, json: bool) -> None:
    row = records.run(run_id)
    print(as_json(row)) if json else print_fields(row)


def _recorded_metadata(row: Row, name: str) -> str:
    """Return a value that a recipe recorded in the metadata of the run's checkpoints."""
    return (row.get("user_metadata") or {}).get(name, "-")


def _last_checkpoint_id(row: Row) -> str:
    last = row["last_checkpoint"] or row["last_sampler_checkpoint"]
    return "-" if last is None else last["checkpoint_id"]
