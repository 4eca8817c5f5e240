"""The checkpoints of a run: their rows, what this machine knows of them, and commands for them."""

import shlex
from collections.abc import Mapping
from typing import Any

from planish.client.checkpoint_records import open_records
from planish.console.metric_table import MetricTable
from planish.console.row_tail import Row
from planish.console.run_reader import RunReader
from planish.errors import PlanishError

_SCORES = ("test/env/all/correct", "test/env/all/reward/total", "test/nll", "env/all/reward/total")


def checkpoint_rows(reader: RunReader) -> Row:
    """Return the checkpoints of a run, newest first."""
    server = reader.config.get("base_url")
    known: dict[str, Mapping[str, Any]] = {}
    note = None
    if server:
        note = f"The weights are on {server}; `planish checkpoints` shows their sizes and expiry."
    else:
        try:
            records = open_records(None, None, None).checkpoints(None, None)
            known = {row["tinker_path"]: row for row in records}
        except (PlanishError, OSError) as error:
            note = f"The checkpoints of this machine cannot be listed: {error}"
    with reader.lock:
        rows = [_row(row, known, reader) for row in reversed(reader.checkpoints)]
    lineage = reader.config.get("load_checkpoint_path")
    return {"checkpoints": rows, "note": note, "lineage": lineage}


def _row(row: Row, known: Mapping[str, Mapping[str, Any]], reader: RunReader) -> Row:
    paths = [row.get("state_path"), row.get("sampler_path")]
    records = [known[path] for path in paths if isinstance(path, str) and path in known]
    sizes = [record.get("size_bytes") for record in records]
    expiries = [record["expires_at"] for record in records if record.get("expires_at")]
    is_missing = not records and not reader.config.get("base_url") and bool(known)
    return {
        **row,
        "size_bytes": sum(size for size in sizes if size) or None,
        "expires": "not on this machine, or expired"
        if is_missing
        else str(min(expiries))
        if expiries
        else None,
        "score": _score(reader.metrics, row.get("batch")),
        "commands": _commands(row, reader),
    }


def _score(metrics: MetricTable, batch: Any) -> tuple[str, float] | None:
    """Return the name and value of the first score that was measured at the checkpoint's step."""
    if not isinstance(batch, int | float):
        return None
    for name in _SCORES:
        steps, values = metrics.values(name)
        at = (steps == batch).nonzero()[0]
        if len(at):
            return name, float(values[at[0]])
    return None


def _commands(row: Row, reader: RunReader) -> list[tuple[str, str]]:
    weights = row.get("sampler_path") or row.get("state_path")
    state = row.get("state_path")
    commands = []
    if isinstance(weights, str):
        quoted = shlex.quote(weights)
        commands += [
            ("write it as a PEFT adapter", f"planish export {quoted} DIRECTORY"),
            ("talk with it", f"planish chat --model {quoted}"),
            ("evaluate it", f"planish eval gsm8k --model {quoted}"),
        ]
    if isinstance(state, str):
        commands.append(("begin another run with it", f"load_checkpoint_path={shlex.quote(state)}"))
    return commands
