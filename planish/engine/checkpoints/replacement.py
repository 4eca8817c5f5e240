"""The directory of a checkpoint, which is replaced and removed by renames under the lock of its run.

Replacing a checkpoint takes two renames. If the process crashes between them, the old checkpoint
keeps a temporary name, and the next reader renames it back. `target` is the directory of a
checkpoint, DATA/<run>/<segment>/<name>, which may be absent.
"""

import os
import secrets
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from planish.engine.checkpoints.files import Manifest, read_manifest
from planish.errors import DamagedFileError
from planish.files import make_directory, sync

LOCK = ".lock"
_EXPIRED_SECONDS = 86400.0
"""How long an expired checkpoint stays on disk after a reader has found it expired."""


def new_temporary(target: Path) -> Path:
    """Return a new name for a directory beside the checkpoint."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def locked(run: Path, create: bool = False) -> Generator[None]:
    """Acquire the lock of the run.

    If `create`, create the run's directory if it does not exist.
    """
    lock, is_held = FileLock(run / LOCK), False
    while not is_held:
        if create:
            make_directory(run)
        try:
            lock.acquire()
            is_held = True
        except FileNotFoundError:  # another process just deleted the run's last checkpoint
            if not create:
                raise
    try:
        yield
    finally:
        lock.release()


def clear_leftovers(target: Path) -> None:
    """Remove the temporary files of crashed writers of this checkpoint.

    The caller must have the lock, so no other process is writing these files.
    """
    if not target.is_dir():
        _restore_previous_locked(target)
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_expired(target: Path) -> None:
    """Remove an expired checkpoint if a reader found it expired at least a day ago.

    The first reader that finds it expired only records the present time. Nothing happens if
    the run is locked. Readers reject an expired checkpoint even if it is not removed.
    """
    with suppress(OSError, DamagedFileError), FileLock(target.parent.parent / LOCK, timeout=0):
        manifest, now = read_manifest(target), time.time()
        if manifest.expires_at is None or not has_expired(manifest):
            return
        # The checkpoint was written before it expired. So only a reader can have set a
        # modification time after the expiry.
        found_expired_at = target.stat().st_mtime
        if not manifest.expires_at.timestamp() <= found_expired_at <= now:
            os.utime(target, (now, now))
        elif now - found_expired_at >= _EXPIRED_SECONDS:
            remove(target)


def restore_previous(target: Path) -> None:
    """Restore the old checkpoint if a writer crashed while it replaced the checkpoint."""
    if _previous_path(target).is_dir():
        with locked(target.parent.parent):
            _restore_previous_locked(target)


def _restore_previous_locked(target: Path) -> None:
    """Do the same as `restore_previous`; the caller must have the lock."""
    if _previous_path(target).is_dir() and not target.is_dir():
        os.rename(_previous_path(target), target)


def has_expired(manifest: Manifest) -> bool:
    """Return whether the time to live of a checkpoint is over."""
    return manifest.expires_at is not None and manifest.expires_at <= datetime.now(UTC)


def link_or_copy(source: Path, target: Path) -> None:
    """Create `target` as a hard link to `source`, or as a copy if links are not possible.

    Two directories can share a file because the files of a checkpoint never change. Some file
    systems do not support links, and links between two file systems are impossible.
    """
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
        sync(target)


def remove(target: Path) -> None:
    """Remove a checkpoint. The caller must have the lock."""
    temporary = new_temporary(target)
    try:
        shutil.rmtree(_previous_path(target), ignore_errors=True)
        os.rename(target, temporary)  # atomic, so that no reader sees a partly removed checkpoint
        sync(target.parent)
        shutil.rmtree(temporary)
    finally:
        remove_if_empty(target.parent)


def remove_if_empty(segment: Path) -> None:
    """Remove an empty directory of checkpoints, and the run's directory if that is empty too.

    The caller must have the lock.
    """
    run = segment.parent
    with suppress(OSError):
        with suppress(FileNotFoundError):
            # The previous owner of the lock may already have removed this directory.
            segment.rmdir()
        if {entry.name for entry in run.iterdir()} == {LOCK}:
            (run / LOCK).unlink()
            run.rmdir()


def _previous_path(target: Path) -> Path:
    """Return the temporary path of the old checkpoint while it is being replaced."""
    return target.with_name(f".{target.name}.previous")


def rename_into_place(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`.

    An older checkpoint of that name is removed only after the new one is in place.
    """
    # An earlier process may have created some of these directories without syncing their entries,
    # if it was killed or its sync failed. So sync the entries of all of them, before anything
    # changes.
    for directory in target.parents[1:4]:
        with suppress(PermissionError):  # an unreadable parent was not made by planish
            sync(directory)
    previous = _previous_path(target)
    if target.is_dir():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    try:
        os.rename(temporary, target)
        sync(target.parent)
    except OSError:
        # The save fails, so its name stays free, and an older checkpoint stays in place. Without
        # the last sync, a power loss could bring the new checkpoint back.
        with suppress(FileNotFoundError):
            os.rename(target, temporary)
        with suppress(FileNotFoundError):
            os.rename(previous, target)
        with suppress(OSError):
            sync(target.parent)
        raise
    shutil.rmtree(previous, ignore_errors=True)
