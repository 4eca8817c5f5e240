"""`planish checkpoints`: list, show, delete, publish, expire, download and import the checkpoints
of a server or of this machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from planish.client.checkpoint_records import (
    Records,
    Row,
    ServerRecords,
    as_json,
    download_checkpoint,
    open_records,
)
from planish.commands.runs import (
    add_limit_argument,
    add_source_arguments,
    check_run_id,
    row_limit,
)
from planish.commands.tables import (
    format_size,
    format_time,
    format_time_left,
    print_fields,
    print_table,
)
from planish.engine.checkpoints.store import CheckpointStore, data_directory
from planish.errors import CheckpointError, UnsupportedError, UserError
from planish.model.architecture.weight_sizes import SCHEMES
from planish.processes.arguments import AddArgument, argument_adder
from planish.server.durable.store import DATABASE

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,9})([smhd]?)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish checkpoints`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str) -> AddArgument:
        add = argument_adder(actions.add_parser(name, help=text, description=f"{text}."))
        add_source_arguments(add)
        return add

    def action_on_path(name: str, text: str) -> AddArgument:
        add = action(name, text)
        add("PATH", "path of the checkpoint: tinker://RUN/KIND/NAME")
        return add

    add = action("list", "list checkpoints, newest first")
    add("--run RUN", "list only checkpoints of this training run")
    add_limit_argument(add, "checkpoints")
    action_on_path("show", "show the details of a checkpoint")
    add = action("delete", "delete checkpoints permanently")
    add("PATH", "paths of the checkpoints", dest="paths", nargs="+")
    add("--yes -y", "delete without asking for confirmation", action="store_true")
    action_on_path("publish", "let every API key of the server read a checkpoint")
    action_on_path("unpublish", "make a published checkpoint private again")
    add = action_on_path("ttl", "set the time after which a checkpoint expires, or keep it forever")
    add("TIME", "time from now, in seconds or as 30m, 12h or 7d; `never` = keep the checkpoint")
    add = action(
        "import",
        "create a checkpoint from an adapter saved by PEFT, TRL, Unsloth or a hosted service",
    )
    add("DIR", "directory of the adapter", dest="directory", type=Path)
    add(
        "--base-model NAME",
        "base model that the adapter was trained on (default: the one named in its files)",
    )
    add(
        "--quantize",
        "quantization scheme of that base model's weights (default: the scheme named in DIR "
        "if planish wrote its files, otherwise none)",
        choices=SCHEMES,
    )
    add("--run RUN", "RUN in the checkpoint's path (default: imported-DIR)")
    add("--name", "NAME in the checkpoint's path", default="imported")
    add("--overwrite", "replace an existing checkpoint of the same path", action="store_true")
    add = action_on_path(
        "download",
        "download the files of a checkpoint: a PEFT adapter, and for weights/ the optimizer state",
    )
    add("--out DIR", "new or empty directory for the files (default: ./NAME)", type=Path)


def run(arguments: argparse.Namespace) -> None:
    """Run the chosen action of `planish checkpoints`."""
    records = open_records(arguments.base_url, arguments.api_key, arguments.data_dir)
    match arguments.action:
        case "list":
            _list(records, arguments)
        case "show":
            _show(records, arguments)
        case "delete":
            _delete(records, arguments)
        case "publish" | "unpublish":
            records.set_public(arguments.path, arguments.action == "publish")
            _print_change(
                arguments, {"path": arguments.path, "public": arguments.action == "publish"}
            )
        case "ttl":
            seconds = parse_duration(arguments.time)
            records.set_ttl(arguments.path, seconds)
            _print_change(arguments, {"path": arguments.path, "ttl_seconds": seconds})
        case "download":
            _download(records, arguments)
        case "import":
            _import(records, arguments)


def parse_duration(text: str) -> int | None:
    """Return a duration in seconds; None for `never`."""
    if text == "never":
        return None
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNIT_SECONDS[match[2] or "s"] if match else 0
    if not seconds:
        raise UserError(f"TIME {text!r}: give seconds, or a number with s, m, h or d, or `never`")
    return seconds


def _import(records: Records, arguments: argparse.Namespace) -> None:
    directory = arguments.directory.expanduser()
    row = (
        _import_on_server(records, directory, arguments)
        if isinstance(records, ServerRecords)
        else _import_here(directory, arguments)
    )
    if arguments.json:
        print(as_json(row))
        return
    scheme = f" quantized with {row['quantize']}" if row["quantize"] else ""
    linears = f"{row['linears']} linears of {row['base_model']}{scheme}"
    print(f"{row['path']}: rank {row['rank']}, {linears}")
    for note in row["notes"]:
        print(f"  {note}")


def _import_here(directory: Path, arguments: argparse.Namespace) -> Row:
    """Import an adapter into a directory of this machine."""
    # Import this here, because it loads torch, which no other action needs.
    from planish.export.importing import import_adapter

    data_dir = data_directory(arguments.data_dir)
    if (data_dir / DATABASE).exists():
        raise UserError(
            f"{data_dir} is the data directory of a server, which would not know the checkpoint; "
            "start the server and give --base-url"
        )
    adapter = import_adapter(
        directory,
        CheckpointStore(data_dir),
        base_model=arguments.base_model,
        quantize=arguments.quantize,
        run_id=arguments.run,
        name=arguments.name,
        overwrite=arguments.overwrite,
    )
    return {
        "path": str(adapter.path),
        "base_model": adapter.base_model,
        "quantize": adapter.quantize,
        "rank": adapter.lora.rank,
        "linears": adapter.num_linears,
        "notes": list(adapter.notes),
    }


def _import_on_server(
    records: ServerRecords, directory: Path, arguments: argparse.Namespace
) -> Row:
    """Upload an adapter to a server, which imports it."""
    for option in ("run", "overwrite"):
        if getattr(arguments, option):
            raise UnsupportedError(
                f"--{option}: a server imports each adapter into a new run; leave it out"
            )
    config_file = directory / "adapter_config.json"
    if not config_file.is_file():
        raise CheckpointError(
            f"{directory} has no {config_file.name}, so it is not an adapter; give a directory "
            "that PEFT saved"
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        base_model = arguments.base_model or config.get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{config_file} is damaged ({error}); get the adapter again"
        ) from None
    if not base_model:
        raise UserError(f"{config_file} names no base model; give --base-model NAME")
    options = {"base_model": base_model, "name": arguments.name, "source": directory.resolve().name}
    if arguments.quantize:
        options["quantize"] = arguments.quantize
    return records.import_adapter(directory, options)


def _list(records: Records, arguments: argparse.Namespace) -> None:
    if arguments.run is not None:
        check_run_id(arguments.run)
    rows = records.checkpoints(arguments.run, row_limit(arguments))
    if arguments.json:
        print(as_json(rows))
        return
    print_table(
        rows,
        {
            "path": lambda row: row["tinker_path"],
            "size": lambda row: format_size(row["size_bytes"]),
            "made": lambda row: format_time(row["time"]),
            "expires in": lambda row: format_time_left(row["expires_at"]),
            "public": lambda row: "yes" if row["public"] else "",
        },
        "no checkpoints",
    )


def _show(records: Records, arguments: argparse.Namespace) -> None:
    row = records.checkpoint(arguments.path)
    print(as_json(row)) if arguments.json else print_fields(row)


def _delete(records: Records, arguments: argparse.Namespace) -> None:
    paths: list[str] = arguments.paths
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise UserError(
                "cannot ask for confirmation without a terminal; give --yes to delete without it"
            )
        try:
            answer = input(f"permanently delete {', '.join(paths)}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return
    for path in paths:
        records.delete(path)
        _print_change(arguments, {"path": path, "deleted": True})


def _download(records: Records, arguments: argparse.Namespace) -> None:
    out: Path = (arguments.out or Path(arguments.path.rpartition("/")[2])).expanduser()
    files = download_checkpoint(records, arguments.path, out, "--out ")
    if arguments.json:
        print(as_json({"path": arguments.path, "files": [str(file) for file in files]}))
    else:
        for file in files:
            print(f"{file}  {format_size(file.stat().st_size)}")


def _print_change(arguments: argparse.Namespace, row: Row) -> None:
    """Print what was changed."""
    if arguments.json:
        print(as_json(row))
    else:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
