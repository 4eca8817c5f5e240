"""Checkpoints on disk: DATA/<run>/weights/<name> and DATA/<run>/sampler_weights/<name>, each a directory, whole or absent.

DATA is the `data_dir` argument, else the variable PLANISH_DATA, else ~/.local/share/planish/runs. A checkpoint is written aside, fsynced
and renamed. Replacing one takes two renames, under a lock file of the run; a kill between them leaves the old one under a name from which
the next reader puts it back. Expired checkpoints are refused, and removed when they are met.

Names are letters, digits and _ . - : and so can be part of a path on any disk and of a URL.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from filelock import FileLock
from torch import Tensor

from planish.engine.checkpoint_files import (
    ADAPTER,
    MANIFEST,
    OPTIMIZER,
    Manifest,
    read_manifest,
    read_state,
    sync,
    write_manifest,
    write_tensors,
)
from planish.errors import CheckpointError, DamagedFileError, StorageError, UserError
from planish.model.lora import LoraLayout
from planish.types import Checkpoint, CheckpointPath, CheckpointType

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
_SEGMENT: dict[CheckpointType, str] = {"training": "weights", "sampler": "sampler_weights"}
_TYPE: dict[str, CheckpointType] = {segment: kind for kind, segment in _SEGMENT.items()}
_MAX_TTL_SECONDS = 10 * 365 * 86400


@dataclass(frozen=True)
class SavedAdapter:
    """What is to be saved: `Adapter.state()`, its shape, and whose it is."""

    state: Mapping[str, Tensor]
    layout: LoraLayout
    base_model: str
    architecture: str
    weights: str
    """Fingerprints of the base model."""


@dataclass(frozen=True)
class Label:
    """What the caller says about a checkpoint."""

    path: CheckpointPath
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None


def data_directory(data_dir: str | Path | None) -> Path:
    """Where checkpoints are kept."""
    chosen = data_dir or os.environ.get("PLANISH_DATA") or "~/.local/share/planish/runs"
    return Path(chosen).expanduser().absolute()


def check_name(argument: str, name: object) -> None:
    """ValueError unless `name` can name a checkpoint or a run."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{argument}={name!r}: give up to 200 letters, digits and _ . - : without a slash, not beginning with a dot or dash"
        )


def check_label(label: Label) -> None:
    """ValueError for a label that cannot be right."""
    check_name("name", label.path.name)
    ttl = label.ttl_seconds
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int) or not 1 <= ttl <= _MAX_TTL_SECONDS):
        raise UserError(
            f"ttl_seconds={ttl!r}: give whole seconds from 1 to {_MAX_TTL_SECONDS} (ten years), or None to keep it"
        )
    check_metadata(label.user_metadata)


def check_metadata(user_metadata: object) -> None:
    """ValueError unless it is a mapping of strings to strings."""
    if user_metadata is None:
        return
    if not isinstance(user_metadata, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in user_metadata.items()
    ):
        raise UserError(f"user_metadata={user_metadata!r}: give a dictionary of strings to strings")


class CheckpointStore:
    """The checkpoints under one data directory. Any number of processes may share it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, label: Label, adapter: SavedAdapter) -> None:
        """Write one checkpoint. CheckpointError: the name is taken; StorageError: the disk refused, nothing is left behind."""
        check_label(label)
        target = self._place(label.path)
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(target.parent.parent):
                self._clear_leftovers(target)
                aside.mkdir()
                manifest = self._write(aside, label, adapter)
                self._check_free(label, target, manifest)
                _put(aside, target)
        except OSError as error:
            remedy = f"free space there, or choose another data_dir or PLANISH_DATA (now {self.directory})"
            raise StorageError(f"the checkpoint {label.path} was not saved: {error}; {remedy}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def exists(self, path: CheckpointPath) -> bool:
        """Whether `path` is there and has not expired."""
        try:
            self.manifest(path)
        except CheckpointError:
            return False
        except DamagedFileError:
            return True
        return True

    def manifest(self, path: CheckpointPath) -> Manifest:
        """What the checkpoint says of itself. CheckpointError: there is none, or it has expired."""
        target = self._place(path)
        if not target.is_dir():
            self._put_back(target)
        if not target.is_dir():
            raise CheckpointError(
                f"there is no checkpoint {path} under {self.directory}; wait for the result of the save that makes it, "
                "and use the same data_dir or PLANISH_DATA as where it was saved"
            )
        manifest = read_manifest(target)
        if manifest.expires_at is not None and manifest.expires_at <= datetime.now(UTC):
            self.delete(path)
            raise CheckpointError(
                f"the checkpoint {path} expired at {manifest.expires_at:%Y-%m-%d %H:%M:%S} UTC and was removed; "
                "save with a longer ttl_seconds, or None"
            )
        return manifest

    def read(self, path: CheckpointPath, layout: LoraLayout, with_optimizer: bool) -> dict[str, Tensor]:
        """The adapter state of a checkpoint that `layout` fits; with the optimizer's if asked."""
        manifest = self.manifest(path)
        if with_optimizer and OPTIMIZER not in manifest.files:
            raise CheckpointError(
                f"{path} holds weights for sampling, without optimizer state; give a checkpoint of save_state, "
                "or load it without the optimizer"
            )
        return read_state(self._place(path), manifest, layout, with_optimizer)

    def records(self, run_id: str | None = None) -> list[Checkpoint]:
        """Checkpoints that can be used, newest first."""
        if run_id is not None:
            check_name("run_id", run_id)
        found = []
        for manifest_path in self.directory.glob(f"{run_id or '*'}/*/*/{MANIFEST}"):
            run, segment, name = manifest_path.parts[-4:-1]
            if segment in _TYPE and _NAME.fullmatch(run) and _NAME.fullmatch(name):
                path = CheckpointPath(run, _TYPE[segment], name)
                with suppress(CheckpointError, DamagedFileError):
                    found.append(_record(path, self.manifest(path)))
        return sorted(found, key=lambda checkpoint: checkpoint.time, reverse=True)

    def version(self, path: CheckpointPath) -> str:
        """The SHA-256 of the adapter: equal for equal weights."""
        return self.manifest(path).files[ADAPTER].sha256

    def record(self, path: CheckpointPath) -> Checkpoint:
        return _record(path, self.manifest(path))

    def delete(self, path: CheckpointPath) -> None:
        """Remove a checkpoint, damaged or not. CheckpointError: there is none."""
        target = self._place(path)
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            shutil.rmtree(_previous(target), ignore_errors=True)
            os.rename(target, aside)  # at once, so that nobody sees half of it
            shutil.rmtree(aside)
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no checkpoint {path} under {self.directory}") from error
        except OSError as error:
            raise StorageError(f"the checkpoint {path} could not be removed: {error}") from error

    def _place(self, path: CheckpointPath) -> Path:
        check_name("the checkpoint path's run", path.run_id)
        check_name("the checkpoint path's name", path.name)
        return self.directory / path.run_id / _SEGMENT[path.checkpoint_type] / path.name

    def _write(self, aside: Path, label: Label, adapter: SavedAdapter) -> Manifest:
        now = datetime.now(UTC)
        manifest = Manifest(
            base_model=adapter.base_model,
            architecture=adapter.architecture,
            weights=adapter.weights,
            lora=adapter.layout.lora,
            step=int(adapter.state["step"]),
            time=now,
            expires_at=now + timedelta(seconds=label.ttl_seconds) if label.ttl_seconds is not None else None,
            user_metadata=dict(label.user_metadata or {}),
        )
        with_optimizer = label.path.checkpoint_type == "training"
        files = write_tensors(aside, adapter.layout, adapter.state, adapter.base_model, with_optimizer)
        manifest = replace(manifest, files=files)
        write_manifest(aside, manifest)
        return manifest

    def _check_free(self, label: Label, target: Path, manifest: Manifest) -> None:
        """A name may be taken again by a sampler's equal weights: a run that is resumed saves its last ones once more."""
        if label.overwrite or not self.exists(label.path):
            return
        if label.path.checkpoint_type == "sampler":
            with suppress(DamagedFileError):
                if read_manifest(target).files == manifest.files:
                    return
        raise name_taken(label.path)

    @contextmanager
    def _locked(self, run: Path) -> Iterator[None]:
        with FileLock(run / ".lock"):
            yield

    def _clear_leftovers(self, target: Path) -> None:
        """What killed writers left; to be called under the lock, so nobody is writing them now."""
        if not target.is_dir():
            self._put_back_locked(target)
        for leftover in target.parent.glob(f".{target.name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _put_back(self, target: Path) -> None:
        if _previous(target).is_dir():
            with self._locked(target.parent.parent):
                self._put_back_locked(target)

    def _put_back_locked(self, target: Path) -> None:
        if _previous(target).is_dir() and not target.is_dir():
            os.rename(_previous(target), target)


def name_taken(path: CheckpointPath) -> CheckpointError:
    return CheckpointError(f"name={path.name!r}: {path} exists; give another name, overwrite=True, or delete it first")


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _put(aside: Path, target: Path) -> None:
    """Rename `aside` to `target`; an older checkpoint of that name goes only when the new one is in place."""
    previous = _previous(target)
    if target.is_dir():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    os.rename(aside, target)
    sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _record(path: CheckpointPath, manifest: Manifest) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=path.checkpoint_type,
        time=manifest.time,
        tinker_path=str(path),
        size_bytes=sum(file.size for file in manifest.files.values()),
        user_metadata=dict(manifest.user_metadata) or None,
        expires_at=manifest.expires_at,
    )
