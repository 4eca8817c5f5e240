"""checkpoints.jsonl of a run, written by loops that are not planish's own."""

import asyncio
import logging
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from planish.client.futures import in_thread
from planish.cookbook.adapters.models import get_recommended_renderer_name
from planish.errors import PlanishError, UnsupportedError
from planish.files import RowFile, read_rows
from planish.runlog.run_directory import CHECKPOINTS
from planish.tinker import ServiceClient

_log = logging.getLogger(__name__)
CHECKPOINTS_BASE_NAME = CHECKPOINTS
RENDERER_NAME_METADATA_KEY = "renderer_name"
_KNOWN = ("name", "batch", "epoch", "final", "state_path", "sampler_path")


@dataclass
class CheckpointRecord:
    """A row of checkpoints.jsonl. `extra` has the keys that are not fields of this class."""

    name: str
    batch: int | None = None
    epoch: int | None = None
    final: bool | None = None
    state_path: str | None = None
    sampler_path: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the row, without fields that are None."""
        known = {name: getattr(self, name) for name in _KNOWN}
        return {
            **{name: value for name, value in known.items() if value is not None},
            **self.extra,
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "CheckpointRecord":
        """Return a row as a record."""
        known = {name: d[name] for name in _KNOWN if name in d}
        return cls(**known, extra={k: v for k, v in d.items() if k not in _KNOWN})

    def has(self, key: str) -> bool:
        """Return whether the row has the key, with a value."""
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a field, or of a key of `extra`."""
        return getattr(self, key) if key in _KNOWN else self.extra.get(key, default)


def load_checkpoints_file(log_dir: str) -> list[CheckpointRecord]:
    """Return the records of a run directory, oldest first; none if there is no file."""
    return [CheckpointRecord.from_dict(dict(row)) for row in read_rows(Path(log_dir) / CHECKPOINTS)]


def get_last_checkpoint(log_dir: str, required_key: str = "state_path") -> CheckpointRecord | None:
    """Return the newest record that has `required_key`."""
    records = [record for record in load_checkpoints_file(log_dir) if record.has(required_key)]
    return records[-1] if records else None


async def save_checkpoint_async(
    training_client: Any,
    name: str,
    log_path: str,
    loop_state: dict[str, Any],
    kind: Literal["state", "sampler", "both"] = "state",
    ttl_seconds: int | None = None,
    store: Any = None,
) -> dict[str, str]:
    """Save the model and append a row to checkpoints.jsonl. Return the paths by field name, such as
    "state_path".
    """
    if store is not None:
        raise UnsupportedError("store: rows are written to checkpoints.jsonl only; leave it out")
    saved = {}
    if kind in ("state", "both"):
        saved["state_path"] = training_client.save_state(name, ttl_seconds=ttl_seconds)
    if kind in ("sampler", "both"):
        saved["sampler_path"] = training_client.save_weights_for_sampler(
            name, ttl_seconds=ttl_seconds
        )
    paths = {field: (await pending).path for field, pending in saved.items()}
    row = CheckpointRecord.from_dict({"name": name, **loop_state, **paths}).to_dict()
    directory = Path(log_path)
    directory.mkdir(parents=True, exist_ok=True)
    with closing(RowFile(directory / CHECKPOINTS)) as file:
        file.append(row)
        file.sync()
    return paths


def save_checkpoint(
    training_client: Any,
    name: str,
    log_path: str,
    loop_state: dict[str, Any],
    kind: Literal["state", "sampler", "both"] = "state",
    ttl_seconds: int | None = None,
    store: Any = None,
) -> dict[str, str]:
    """Same as `save_checkpoint_async`, for code without an event loop."""
    return asyncio.run(
        save_checkpoint_async(training_client, name, log_path, loop_state, kind, ttl_seconds, store)
    )


def add_renderer_name_to_user_metadata(
    user_metadata: dict[str, str], renderer_name: str | None
) -> None:
    """Put the name into the metadata, if there is one."""
    if renderer_name:
        user_metadata[RENDERER_NAME_METADATA_KEY] = renderer_name


def get_renderer_name_from_checkpoint(service_client: Any, checkpoint_path: str) -> str | None:
    """Return the renderer name in the metadata of a checkpoint; None if there is none."""
    try:
        rest = service_client.create_rest_client()
        run = rest.get_training_run_by_tinker_path(checkpoint_path).result()
    except PlanishError as error:
        _log.warning("no metadata of %s: %s", checkpoint_path, error)
        return None
    return (run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)


get_renderer_name_from_checkpoint_async = in_thread(get_renderer_name_from_checkpoint)


def resolve_renderer_name_from_checkpoint_or_default(
    *,
    model_name: str,
    explicit_renderer_name: str | None,
    load_checkpoint_path: str | None,
    base_url: str | None = None,
) -> str:
    """Return the explicit name, else that of the checkpoint, else the recommended one."""
    if explicit_renderer_name is not None:
        return explicit_renderer_name
    if load_checkpoint_path is not None:
        service_client = ServiceClient(base_url=base_url)
        found = get_renderer_name_from_checkpoint(service_client, load_checkpoint_path)
        if found is not None:
            return found
    return get_recommended_renderer_name(model_name)


resolve_renderer_name_from_checkpoint_or_default_async = in_thread(
    resolve_renderer_name_from_checkpoint_or_default
)


def check_renderer_name_for_checkpoint(
    service_client: Any, checkpoint_path: str, expected_renderer_name: str | None
) -> None:
    """Log a warning if the checkpoint names another renderer."""
    if expected_renderer_name is None:
        return
    found = get_renderer_name_from_checkpoint(service_client, checkpoint_path)
    if found not in (None, expected_renderer_name):
        _log.warning(
            "%s was trained with renderer %s, not %s",
            checkpoint_path,
            found,
            expected_renderer_name,
        )


check_renderer_name_for_checkpoint_async = in_thread(check_renderer_name_for_checkpoint)
