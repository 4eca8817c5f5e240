"""Checkpoints on disk, in DATA/<run>/weights/<name> and DATA/<run>/sampler_weights/<name>.

DATA is the `data_dir` argument, else the variable PLANISH_DATA, else ~/.local/share/planish/runs.
Each checkpoint is a directory that is either complete or absent. A checkpoint is written to a
temporary directory, fsynced and renamed.

A checkpoint is replaced under a lock file of the run (replacement.py). Readers take no lock. They
repeat a read or a copy if the checkpoint was replaced meanwhile.

Readers reject expired checkpoints. The first reader that finds a checkpoint expired records the
present time as the modification time of the checkpoint's directory. A reader that finds the
checkpoint expired at least a day later removes it. Because of this delay, a clock that is wrong for
a moment deletes nothing. A run without checkpoints has no directory.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from filelock import FileLock

from planish.engine.checkpoints.files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    Manifest,
    read_manifest,
    read_state,
    write_manifest,
    write_tensors,
)
from planish.engine.checkpoints.replacement import (
    LOCK,
    clear_leftovers,
    has_expired,
    link_or_copy,
    locked,
    new_temporary,
    remove,
    remove_expired,
    remove_if_empty,
    rename_into_place,
    restore_previous,
)
from planish.errors import CheckpointError, DamagedFileError, StorageError, UserError
from planish.files import make_directory, write_atomically, write_remedy
from planish.types import (
    Checkpoint,
    CheckpointPath,
    CheckpointType,
    check_metadata,
    check_name,
    check_ttl,
    is_name,
)

if TYPE_CHECKING:
    from torch import Tensor

    from planish.model.layers.lora import LoraLayout

_SEGMENT_OF_TYPE: dict[CheckpointType, str] = {"training": "weights", "sampler": "sampler_weights"}
_TYPE_OF_SEGMENT: dict[str, CheckpointType] = {
    segment: kind for kind, segment in _SEGMENT_OF_TYPE.items()
}

R = TypeVar("R")


@dataclass(frozen=True)
class SaveRequest:
    """The path, time to live and metadata of a checkpoint to write. Raises UserError if invalid."""

    path: CheckpointPath
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_name("name", self.path.name)
        check_ttl(self.ttl_seconds)
        if self.user_metadata is not None:
            check_metadata(self.user_metadata)

    def expires_at(self, now: datetime) -> datetime | None:
        """Return the time from which the checkpoint cannot be read; None: it never expires."""
        return None if self.ttl_seconds is None else now + timedelta(seconds=self.ttl_seconds)


@dataclass(frozen=True)
class AdapterSnapshot:
    """The adapter state to save, its layout and its base model."""

    state: Mapping[str, Tensor]
    """The result of `Adapter.state()`."""
    layout: LoraLayout
    base_model: str
    architecture: str
    """Fingerprint of the base model's architecture."""
    weights: str
    """Fingerprint of the base model's weights."""
    quantize: str | None = None
    """The quantization scheme of the base model's weights, or None."""


def data_directory(data_dir: str | Path | None) -> Path:
    """Return the directory of the checkpoints: `data_dir`, PLANISH_DATA, or the default."""
    directory = data_dir or os.environ.get("PLANISH_DATA") or "~/.local/share/planish/runs"
    return Path(directory).expanduser().absolute()


class CheckpointStore:
    """The checkpoints under one data directory, which any number of processes may share."""

    def __init__(self, directory: Path) -> None:
        """Create a store for `directory`, which need not exist yet."""
        self.directory = directory
        self.removes_expired = True
        """Whether reads remove expired checkpoints, and saves replace them. A server decides itself
        when it removes one, and may extend its time to live before that.
        """

    def save(self, request: SaveRequest, adapter: AdapterSnapshot) -> None:
        """Write one checkpoint.

        Raises CheckpointError if the name is taken. Raises StorageError if writing fails; partial
        files are removed then.
        """
        self._new(request).create(lambda temporary: _write(temporary, request, adapter))

    def copy(self, source: CheckpointPath, request: SaveRequest) -> None:
        """Copy the checkpoint `source` to the path, time to live and metadata of `request`.

        The copy uses hard links if the file system supports them, so it needs no more space. A
        training checkpoint may be copied as a sampler checkpoint, without the optimizer state.

        Raises the errors of `manifest` and `save`, and DamagedFileError if a file of `source` is
        missing.
        """
        if source.checkpoint_type == "sampler" and request.path.checkpoint_type == "training":
            raise CheckpointError(
                f"{source} has no optimizer state; copy it as sampler weights, not as "
                f"{request.path}"
            )

        def copy(manifest: Manifest) -> None:
            self._new(request).create(
                lambda temporary: self._link(temporary, source, manifest, request)
            )

        self._retry_if_replaced(source, copy)

    def set_ttl(self, path: CheckpointPath, ttl_seconds: int | None) -> None:
        """Make the checkpoint expire `ttl_seconds` from now; None keeps it forever."""
        request = SaveRequest(path, ttl_seconds)
        # Raise an error here if the checkpoint does not exist. Acquiring the lock could otherwise
        # create a lock file for nothing.
        _ = self.manifest(path) if self.removes_expired else self._manifest_on_disk(path)
        with locked(self._directory_of(path).parent.parent):
            manifest = replace(
                self._read_manifest(path), expires_at=request.expires_at(datetime.now(UTC))
            )
            write_atomically(self._directory_of(path) / MANIFEST_FILE, manifest.to_json())

    def files(self, path: CheckpointPath) -> dict[str, Path]:
        """Return the path of each file of a checkpoint by file name."""
        names = (*self.manifest(path).files, MANIFEST_FILE)
        return {name: self._directory_of(path) / name for name in names}

    def exists(self, path: CheckpointPath) -> bool:
        """Return whether the checkpoint exists, possibly damaged, and has not expired."""
        try:
            self.manifest(path)
        except CheckpointError:
            return False
        except DamagedFileError:
            return True
        return True

    def manifest(self, path: CheckpointPath) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises CheckpointError if the checkpoint does not exist or has expired. Raises
        DamagedFileError if the manifest is unusable.
        """
        manifest = self._manifest_on_disk(path)
        if has_expired(manifest):
            if self.removes_expired:
                remove_expired(self._directory_of(path))
            raise CheckpointError(
                f"the checkpoint {path} expired at {manifest.expires_at:%Y-%m-%d %H:%M:%S} UTC; "
                "save with a longer ttl_seconds, or None"
            )
        return manifest

    def _manifest_on_disk(self, path: CheckpointPath) -> Manifest:
        """Do the same as `manifest`, but accept an expired checkpoint."""
        try:
            return self._read_manifest(path)
        except (CheckpointError, DamagedFileError):
            # Between the two renames of a replacement, the checkpoint has only a temporary name.
            # That replacement may still be in progress, or its process may have crashed.
            restore_previous(self._directory_of(path))
            return self._read_manifest(path)

    def read(
        self,
        path: CheckpointPath,
        layout: LoraLayout,
        with_optimizer: bool,
        check: Callable[[Manifest], None] = lambda manifest: None,
    ) -> tuple[dict[str, Tensor], str]:
        """Return the adapter state of a checkpoint, and the SHA-256 of the adapter file.

        `layout` must match the checkpoint. Equal weights have equal SHA-256. The optimizer state is
        included if `with_optimizer`. `check` receives the manifest and may raise an error to reject
        the checkpoint.
        """

        def read(manifest: Manifest) -> tuple[dict[str, Tensor], str]:
            check(manifest)
            if with_optimizer and OPTIMIZER_FILE not in manifest.files:
                raise CheckpointError(
                    f"{path} has weights for sampling, but no optimizer state; give a checkpoint "
                    "of save_state, or load it without the optimizer"
                )
            state = read_state(self._directory_of(path), manifest, layout, with_optimizer)
            self._check_unchanged(path, manifest)
            return state, manifest.files[ADAPTER_FILE].sha256

        return self._retry_if_replaced(path, read)

    def has_run(self, run_id: str) -> bool:
        """Return whether the run has a directory. A run without checkpoints has none."""
        check_name("run_id", run_id)
        return (self.directory / run_id).is_dir()

    def paths(self, run_id: str | None = None) -> Iterator[CheckpointPath]:
        """Yield the paths of the checkpoints of one run, or of all runs, in no order. Reads only
        directories, so damaged and expired checkpoints are among them.
        """
        if run_id is not None:
            check_name("run_id", run_id)
        for directory in self.directory.glob(f"{run_id or '*'}/*/*/"):
            run, segment, name = directory.parts[-3:]
            if segment in _TYPE_OF_SEGMENT and is_name(run) and is_name(name):
                yield CheckpointPath(run, _TYPE_OF_SEGMENT[segment], name)

    def records(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return the usable checkpoints of one run, or of all runs, newest first."""
        records: list[Checkpoint] = []
        for path in self.paths(run_id):
            with suppress(CheckpointError, DamagedFileError):
                records.append(checkpoint_record(path, self.manifest(path)))
        return sorted(records, key=lambda checkpoint: checkpoint.time, reverse=True)

    def delete(self, path: CheckpointPath) -> None:
        """Remove a checkpoint, even a damaged one; wait while another writer has the run's lock.

        Raises CheckpointError if the checkpoint does not exist, and StorageError if it cannot be
        removed.
        """
        target = self._directory_of(path)
        try:
            restore_previous(target)
            # Check for the checkpoint first, because acquiring the lock could create a lock file.
            if not _is_directory(target):
                raise FileNotFoundError
            with locked(target.parent.parent):
                remove(target)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"there is no checkpoint {path} under {self.directory}"
            ) from error
        except OSError as error:
            raise StorageError(f"the checkpoint {path} could not be removed: {error}") from error

    def clear_leftovers(self) -> None:
        """Remove the temporary files of crashed writers, in all runs that are not locked now."""
        for leftover in self.directory.glob("*/*/.*.tmp"):
            with suppress(OSError), FileLock(leftover.parents[1] / LOCK, timeout=0):
                shutil.rmtree(leftover)
                remove_if_empty(leftover.parent)

    def _directory_of(self, path: CheckpointPath) -> Path:
        """Return the directory of a checkpoint. Raises CheckpointError if its names are invalid."""
        try:
            check_name("the checkpoint path's run", path.run_id)
            check_name("the checkpoint path's name", path.name)
        except UserError as error:
            raise CheckpointError(str(error)) from None
        return self.directory / path.run_id / _SEGMENT_OF_TYPE[path.checkpoint_type] / path.name

    def _read_manifest(self, path: CheckpointPath) -> Manifest:
        """Return the current manifest without a lock, even if the checkpoint has expired."""
        target = self._directory_of(path)
        if not _is_directory(target):
            raise CheckpointError(
                f"there is no checkpoint {path} under {self.directory}. If it is being saved, wait "
                "for the result of the save; if it was saved elsewhere, give the same data_dir or "
                "PLANISH_DATA"
            )
        return read_manifest(target)

    def _retry_if_replaced(self, path: CheckpointPath, use: Callable[[Manifest], R]) -> R:
        """Return `use(manifest)`; call it again if the checkpoint was replaced meanwhile.

        `use` must call `_check_unchanged` after it has read or linked the files.
        """
        while True:
            manifest = self.manifest(path)
            try:
                return use(manifest)
            except DamagedFileError:
                if _same_files(self.manifest(path), manifest):
                    raise

    def _check_unchanged(self, path: CheckpointPath, manifest: Manifest) -> None:
        """Raise DamagedFileError if the checkpoint was replaced since `manifest` was read."""
        if not _same_files(read_manifest(self._directory_of(path)), manifest):
            raise DamagedFileError(f"{path} was replaced while it was read; try again")

    def _new(self, request: SaveRequest) -> _NewCheckpoint:
        return _NewCheckpoint(request, self._directory_of(request.path), self.removes_expired)

    def _link(
        self, temporary: Path, source: CheckpointPath, manifest: Manifest, request: SaveRequest
    ) -> Manifest:
        """Link the files of `source` into `temporary`, and write and return the copy's manifest."""
        linked_files = {
            name: file
            for name, file in manifest.files.items()
            if name in _file_names(request.path.checkpoint_type)
        }
        try:
            for name in linked_files:
                link_or_copy(self._directory_of(source) / name, temporary / name)
        except FileNotFoundError as error:
            raise DamagedFileError(
                f"{error.filename} is missing, so the checkpoint is damaged; use another checkpoint"
            ) from None
        self._check_unchanged(source, manifest)
        now = datetime.now(UTC)
        metadata = (
            manifest.user_metadata if request.user_metadata is None else dict(request.user_metadata)
        )
        copy_manifest = replace(
            manifest,
            time=now,
            expires_at=request.expires_at(now),
            user_metadata=dict(metadata),
            files=linked_files,
        )
        write_manifest(temporary, copy_manifest)
        return copy_manifest


@dataclass(frozen=True)
class _NewCheckpoint:
    """A checkpoint that is being written."""

    request: SaveRequest
    target: Path
    """The directory of the checkpoint. An older checkpoint may be there."""
    replaces_expired: bool
    """Whether it may replace an expired checkpoint."""

    def create(self, write: Callable[[Path], Manifest]) -> None:
        """Call `write` to fill a temporary directory, then rename it to the checkpoint."""
        target = self.target
        temporary = new_temporary(target)
        try:
            with locked(target.parent.parent, create=True):
                make_directory(target.parent)
                clear_leftovers(target)
                temporary.mkdir()
                self._check_name_is_free(write(temporary))
                rename_into_place(temporary, target)
        except OSError as error:
            remedy = write_remedy(
                error,
                "free space there, or choose another data_dir or PLANISH_DATA "
                f"(now {target.parents[2]})",
            )
            raise StorageError(
                f"the checkpoint {self.request.path} was not saved: {error}; {remedy}"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _check_name_is_free(self, manifest: Manifest) -> None:
        """Raise CheckpointError if the name is taken.

        A sampler checkpoint with equal weights may be replaced, because a resumed run saves its
        last weights once more. An expired checkpoint may be replaced too.
        """
        request = self.request
        if request.overwrite or not self.target.is_dir():
            return
        with suppress(DamagedFileError):
            existing = read_manifest(self.target)
            is_equal = (
                request.path.checkpoint_type == "sampler" and existing.files == manifest.files
            )
            if is_equal or (self.replaces_expired and has_expired(existing)):
                return
        raise name_taken_error(request.path)


def _write(temporary: Path, request: SaveRequest, adapter: AdapterSnapshot) -> Manifest:
    """Write all files of a checkpoint into `temporary`; return the manifest."""
    now = datetime.now(UTC)
    manifest = Manifest(
        base_model=adapter.base_model,
        architecture=adapter.architecture,
        weights=adapter.weights,
        lora=adapter.layout.lora_config,
        step=int(adapter.state["step"]),
        time=now,
        expires_at=request.expires_at(now),
        user_metadata=dict(request.user_metadata or {}),
        quantize=adapter.quantize,
    )
    with_optimizer = request.path.checkpoint_type == "training"
    files = write_tensors(
        temporary, adapter.layout, adapter.state, adapter.base_model, with_optimizer
    )
    manifest = replace(manifest, files=files)
    write_manifest(temporary, manifest)
    return manifest


def name_taken_error(path: CheckpointPath) -> CheckpointError:
    """Return the error for a checkpoint name that is already in use."""
    return CheckpointError(
        f"name={path.name!r}: {path} exists; give another name, overwrite=True, or delete it first"
    )


def _is_directory(path: Path) -> bool:
    """Return whether `path` is a directory. Raise OSError if the disk cannot be read.

    Since Python 3.14, `Path.is_dir` returns False in that case. The server would then delete the
    checkpoint from its database.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _same_files(one: Manifest, other: Manifest) -> bool:
    """Return whether both manifests are from the same save; the time to live may differ."""
    return (one.time, one.files) == (other.time, other.files)


def _file_names(kind: CheckpointType) -> tuple[str, ...]:
    """Return the names of a checkpoint's files, without the manifest."""
    return (
        (ADAPTER_FILE, ADAPTER_CONFIG_FILE, OPTIMIZER_FILE)
        if kind == "training"
        else (ADAPTER_FILE, ADAPTER_CONFIG_FILE)
    )


def checkpoint_record(path: CheckpointPath, manifest: Manifest) -> Checkpoint:
    """Return the public description of a checkpoint."""
    return Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=path.checkpoint_type,
        time=manifest.time,
        tinker_path=str(path),
        size_bytes=sum(file.size for file in manifest.files.values()) + len(manifest.to_json()),
        user_metadata=dict(manifest.user_metadata) or None,
        expires_at=manifest.expires_at,
    )
