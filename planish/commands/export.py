"""`planish export`: write a checkpoint for other programs, as a PEFT adapter or merged into its
base model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from planish.client.checkpoint_records import as_json, open_records
from planish.commands.runs import add_source_arguments
from planish.commands.tables import format_size
from planish.errors import UserError
from planish.export.origin import open_checkpoint
from planish.export.writing import DTYPES, FORMATS, ExportOptions, check_target, write_export
from planish.processes.arguments import argument_adder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish export`."""
    add = argument_adder(parser)
    add(
        "CHECKPOINT",
        "tinker://RUN/KIND/NAME, a run directory (its last checkpoint), or the directory "
        "of an adapter",
    )
    add("DIRECTORY", "new or empty directory that the export is written to", type=Path)
    add("--format", "peft = an adapter, merged = the whole model", choices=FORMATS, default="peft")
    add(
        "--dtype",
        "dtype of the exported tensors (default: float32 for peft, the base model's dtype "
        "for merged)",
        choices=list(DTYPES),
    )
    add(
        "--base-model NAME",
        "name or directory of the base model (default: the one the checkpoint was trained on)",
    )
    add(
        "--run DIR",
        "run directory of the checkpoint, for the options and metrics in the model card",
        type=Path,
    )
    add("--shard-mib N", "maximum size of one file of a merged model, in MiB", default=4096)
    add("--overwrite", "replace an existing export", action="store_true")
    add_source_arguments(add)


def run(arguments: argparse.Namespace) -> None:
    """Write the export and list its files."""
    if arguments.shard_mib < 1:
        raise UserError(f"--shard-mib {arguments.shard_mib}: give a whole number of at least 1")
    options = ExportOptions(
        format=arguments.format,
        dtype=arguments.dtype,
        base_model=arguments.base_model,
        overwrite=arguments.overwrite,
        shard_bytes=arguments.shard_mib << 20,
    )
    check_target(arguments.directory, options)
    records = open_records(arguments.base_url, arguments.api_key, arguments.data_dir)
    with open_checkpoint(arguments.checkpoint, records, arguments.run) as origin:
        exported = write_export(origin, arguments.directory, options)
    files = sorted(exported.directory.expanduser().iterdir())
    if arguments.json:
        row = {
            "directory": str(exported.directory),
            "format": options.format,
            "base_model": exported.base.name,
            "files": [file.name for file in files],
            "rounding": exported.rounding.relative_error if options.format == "merged" else None,
        }
        print(as_json(row))
        return
    for file in files:
        print(f"{file}  {format_size(file.stat().st_size)}")
    if exported.rounding.relative_error > 0.01:
        print(
            f"rounding to the files' dtype lost {exported.rounding.relative_error:.1%} of the "
            "update's norm; --dtype float32 or --format peft keeps it"
        )
