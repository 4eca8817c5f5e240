"""Lists of training runs and checkpoints, for commands: from a server or from a local directory.

Rows are the objects of the server's REST API; rows of the local directory have the same fields. No
session is created on the server, so listing leaves no trace there. The local directory is that of
`ServiceClient()` without a server. Checkpoints of a server must be changed through the server,
because it keeps its own records about them.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from planish.client.local import resolve_server_url
from planish.client.remote_connection import resolve_api_key
from planish.client.rest_client import training_runs
from planish.client.rest_connection import RestConnection
from planish.engine.checkpoints.store import CheckpointStore, checkpoint_record, data_directory
from planish.errors import (
    CheckpointError,
    StorageError,
    UnsupportedError,
    UserError,
)
from planish.service import CheckpointInfo
from planish.types import CheckpointPath, TrainingRun
from planish.wire.records import checkpoint_to_json, weights_info_to_json

Row = Mapping[str, Any]
_PAGE_SIZE = 1000
_IMPORTED_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "planish.json",
    "planish_export.json",
)


class ServerRecords:
    """The training runs and checkpoints of a server."""

    def __init__(self, url: str, key: str | None) -> None:
        """`key` is the API key; None for a server without keys. Raise UserError for a wrong URL."""
        self._connection = RestConnection(url, key)

    def runs(self, limit: int | None) -> list[Row]:
        """Return at most `limit` training runs of the key's tenant (None: all)."""
        return self._pages("/training_runs", "training_runs", limit)

    def run(self, run_id: str) -> Row:
        """Return one training run. Raise CheckpointError if it does not exist."""
        return self._connection.call("GET", f"/training_runs/{quote(run_id, safe=':')}")

    def checkpoints(self, run_id: str | None, limit: int | None) -> list[Row]:
        """Return at most `limit` checkpoints of a run, or of all runs."""
        if run_id is None:
            return self._pages("/checkpoints", "checkpoints", limit)
        path = f"/training_runs/{quote(run_id, safe=':')}/checkpoints"
        return self._pages(path, "checkpoints", limit)[:limit]

    def checkpoint(self, path: str) -> Row:
        """Return the row of a checkpoint, with its base model and adapter shape."""
        return _flat_row(self._connection.call("POST", "/weights_info", json={"tinker_path": path}))

    def delete(self, path: str) -> None:
        """Delete a checkpoint on the server."""
        self._connection.call("DELETE", _endpoint(path))

    def set_ttl(self, path: str, seconds: int | None) -> None:
        """Let a checkpoint expire `seconds` from now; None keeps it for ever."""
        self._connection.call("PUT", f"{_endpoint(path)}/ttl", json={"ttl_seconds": seconds})

    def set_public(self, path: str, public: bool) -> None:
        """Publish a checkpoint, or make it private again."""
        self._connection.call("POST" if public else "DELETE", f"{_endpoint(path)}/publish")

    def download(self, path: str, directory: Path) -> list[Path]:
        """Download the files of a checkpoint into an existing directory, and return their paths.
        Raise StorageError if a file cannot be written.
        """
        urls = self._connection.call("GET", f"{_endpoint(path)}/external_weights_urls")["urls"]
        return [
            self._connection.download(url, directory / _file_name(name))
            for name, url in sorted(urls.items())
        ]

    def replicas(self) -> list[Row]:
        """Return what each replica of the server is and does."""
        return self._connection.call("GET", "/fleet")["replicas"]

    def drain(self, replica: int) -> list[Row]:
        """Let the server give a replica no new work. Return the rows of `replicas`."""
        return self._connection.call("POST", f"/fleet/{replica}/drain")["replicas"]

    def add_replica(self) -> list[Row]:
        """Let the server start one more replica. Return the rows of `replicas`."""
        return self._connection.call("POST", "/fleet/add")["replicas"]

    def import_adapter(self, directory: Path, options: Mapping[str, Any]) -> Row:
        """Upload the adapter in a directory and import it on the server. `options` are base_model,
        name, quantize and source, as far as they are known.
        """
        files = [name for name in _IMPORTED_FILES if (directory / name).is_file()]
        upload = self._connection.call(
            "POST", "/planish/import_start", json={**options, "files": files}
        )
        for name, url in upload["urls"].items():
            self._connection.upload(url, directory / name)
        return self._connection.call(
            "POST", "/planish/import_finish", json={"upload_id": upload["upload_id"]}
        )

    def _pages(self, path: str, name: str, limit: int | None) -> list[Row]:
        rows: list[Row] = []
        while limit is None or len(rows) < limit:
            page_limit = _PAGE_SIZE if limit is None else min(_PAGE_SIZE, limit - len(rows))
            page = self._connection.call(
                "GET", path, params={"limit": page_limit, "offset": len(rows)}
            )
            rows += page[name]
            # If the metadata are large, a server may send fewer rows than requested.
            total = page.get("cursor", {}).get("total_count", 0)
            if not page[name] or len(rows) >= total:
                break
        return rows


class LocalRecords:
    """The training runs and checkpoints that local engines saved in a directory."""

    def __init__(self, data_dir: Path | None) -> None:
        """`data_dir` is the directory; None for the default of ServiceClient."""
        self._store = CheckpointStore(data_directory(data_dir))

    def runs(self, limit: int | None) -> list[Row]:
        """Return at most `limit` training runs that have checkpoints (None: all)."""
        runs = training_runs(self._store.records(), self._info)
        return [_run_to_json(run) for run in runs[:limit]]

    def run(self, run_id: str) -> Row:
        """Return one training run. Raise CheckpointError if it has no checkpoints."""
        checkpoints = self._store.records(run_id)
        if not checkpoints:
            raise CheckpointError(
                f"{run_id!r}: no run of this name has checkpoints; `planish runs` lists the runs"
            )
        (run,) = training_runs(checkpoints, self._info)
        return _run_to_json(run)

    def checkpoints(self, run_id: str | None, limit: int | None) -> list[Row]:
        """Return at most `limit` checkpoints of a run, or of all runs."""
        return [
            checkpoint_to_json(checkpoint) for checkpoint in self._store.records(run_id)[:limit]
        ]

    def checkpoint(self, path: str) -> Row:
        """Return the row of a checkpoint, with its base model and adapter shape."""
        return _flat_row(weights_info_to_json(self._info(path)))

    def delete(self, path: str) -> None:
        """Delete a checkpoint from the directory."""
        self._store.delete(_parse_path(path))

    def set_ttl(self, path: str, seconds: int | None) -> None:
        """Let a checkpoint expire `seconds` from now; None keeps it for ever."""
        self._store.set_ttl(_parse_path(path), seconds)

    def set_public(self, path: str, public: bool) -> None:
        """Raise UnsupportedError: only checkpoints of a server can be published."""
        raise UnsupportedError("checkpoints can be published on a server only; give --base-url")

    def download(self, path: str, directory: Path) -> list[Path]:
        """Copy the files of a checkpoint into an existing directory, and return their paths. Raise
        StorageError if a file cannot be written.
        """
        files = self._store.files(_parse_path(path))
        try:
            return [
                Path(shutil.copyfile(source, directory / name))
                for name, source in sorted(files.items())
            ]
        except OSError as error:
            raise StorageError(
                f"cannot write to {directory} ({error}); free space or give another --out"
            ) from error

    def _info(self, path: str) -> CheckpointInfo:
        parsed = _parse_path(path)
        manifest = self._store.manifest(parsed)
        return CheckpointInfo(
            manifest.base_model, manifest.lora, checkpoint_record(parsed, manifest)
        )


def _run_to_json(run: TrainingRun) -> Row:
    last, sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return {
        "training_run_id": run.training_run_id,
        "base_model": run.base_model,
        "lora_rank": run.lora_rank,
        "last_request_time": run.last_request_time.isoformat(),
        "last_checkpoint": last and checkpoint_to_json(last),
        "last_sampler_checkpoint": sampler and checkpoint_to_json(sampler),
        "user_metadata": run.user_metadata,
    }


Records = ServerRecords | LocalRecords
"""Training runs and checkpoints. Lists are newest first. A path is tinker://RUN/KIND/NAME."""


def open_records(base_url: str | None, api_key: str | None, data_dir: Path | None) -> Records:
    """Return the records of a server if `base_url` or the environment names one, else local
    ones.
    """
    url = resolve_server_url(base_url, api_key, {"data_dir": data_dir})
    return LocalRecords(data_dir) if url is None else ServerRecords(url, resolve_api_key(api_key))


def download_checkpoint(records: Records, path: str, out: Path, option: str) -> list[Path]:
    """Download a checkpoint into `out`, which must be new or empty, and return the file paths.

    `option` is the text before the path in error messages.
    """
    try:
        existed = out.exists()
        if existed and (not out.is_dir() or any(out.iterdir())):
            raise UserError(
                f"{option}{out}: the directory is not empty; give a new or empty directory"
            )
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{option}{out}: {error}; give a writable directory") from error
    try:
        return records.download(path, out)
    except BaseException:
        with suppress(OSError):  # some files were written before the error
            if not existed:
                out.rmdir()
        raise


def as_json(rows: object) -> str:
    """Return the rows as indented JSON."""
    return orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode()


def _parse_path(path: str) -> CheckpointPath:
    try:
        return CheckpointPath.parse(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _flat_row(info: Mapping[str, Any]) -> Row:
    return {
        **info["checkpoint"],
        **{key: value for key, value in info.items() if key != "checkpoint"},
    }


def _endpoint(path: str) -> str:
    """Return the REST path of a checkpoint. `CheckpointPath.parse` does not fit here, because the
    paths of external weights have a kind that only servers know.
    """
    prefix, run_id, checkpoint_id = "tinker://", *path.removeprefix("tinker://").partition("/")[::2]
    if not path.startswith(prefix) or not run_id or checkpoint_id.count("/") != 1:
        raise CheckpointError(
            f"{path!r} is not the path of a checkpoint; give tinker://RUN/weights/NAME as in "
            "`planish checkpoints list`"
        )
    return f"/training_runs/{quote(run_id, safe=':')}/checkpoints/{quote(checkpoint_id, safe='/:')}"


def _file_name(name: str) -> str:
    if Path(name).name != name or name.startswith("."):
        raise CheckpointError(f"the server sent {name!r}, which is not a valid file name")
    return name
