"""`planish fleet`: list the replicas of a server, drain one, and add one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from planish.client.checkpoint_records import ServerRecords, as_json
from planish.client.local import resolve_server_url
from planish.client.remote_connection import resolve_api_key
from planish.commands.tables import format_size, print_table
from planish.errors import UserError
from planish.processes.arguments import argument_adder

ACTIONS = ("status", "drain", "add")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish fleet`."""
    add = argument_adder(parser)
    add(
        "ACTION",
        "status: list the replicas; drain: give one no new work, and end it; add: start a drained "
        "one again, or one more",
        choices=ACTIONS,
    )
    add("REPLICA", "drain: the number of the replica", nargs="?", type=int)
    add("--base-url URL", "URL of the server (default: PLANISH_BASE_URL)")
    add(
        "--api-key KEY",
        "the key named operator, if the server has keys (default: PLANISH_API_KEY, else "
        "TINKER_API_KEY)",
    )
    add("--json", "print JSON", action="store_true")


def run(arguments: argparse.Namespace) -> None:
    """List the replicas, after draining or adding one."""
    replica: int | None = arguments.replica
    if arguments.action == "drain" and replica is None:
        raise UserError("planish fleet drain REPLICA: give the number of a replica")
    if arguments.action != "drain" and replica is not None:
        raise UserError(f"planish fleet {arguments.action} takes no number; leave out {replica}")
    url = resolve_server_url(arguments.base_url, arguments.api_key, {})
    if url is None:
        raise UserError("planish fleet: give --base-url, or set PLANISH_BASE_URL")
    records = ServerRecords(url, resolve_api_key(arguments.api_key))
    if replica is not None:
        replicas = records.drain(replica)
    else:
        replicas = records.add_replica() if arguments.action == "add" else records.replicas()
    if arguments.json:
        print(as_json(replicas))
    else:
        _print(replicas)


def _print(replicas: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        replicas,
        {
            "replica": lambda row: str(row["replica"]),
            "state": lambda row: row["state"],
            "machine": lambda row: f"{row['host']}:{row['pid']}",
            "device": lambda row: str(row["device"]),
            "models": lambda row: str(row["models"]),
            "unfinished tokens": lambda row: str(row["unfinished_tokens"]),
            "samples": lambda row: str(row["samples"]),
            "micro-batches": lambda row: str(row["micro_batches"]),
            "losses": lambda row: str(row["losses"]),
            "memory": lambda row: format_size(row["resident_bytes"]),
        },
        "no replicas",
    )
