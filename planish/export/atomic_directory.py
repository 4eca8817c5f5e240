"""Write a directory atomically: it is either complete or absent.

The directory is filled next to its target under another name, .NAME.partial, then synced and
renamed. A killed process leaves only that temporary directory. No program takes it for a model, and
the next attempt clears and reuses it. A lock file prevents two processes from filling the same
directory.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from planish.errors import StorageError, UserError
from planish.files import sync

_LOCK_FILE = ".lock"


@contextmanager
def atomic_directory(target: Path, *, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a directory to fill, which is renamed to `target` at the end; it is removed on an
    error.

    `target` may exist if it is empty. With `overwrite` it may also be an earlier export, recognized
    by its file `marker`. It is replaced only when the new directory is complete. Raise UserError
    for any other existing target. Raise StorageError if writing fails.
    """
    target = target.expanduser().absolute()
    check_replaceable(target, marker=marker, overwrite=overwrite)
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = FileLock(partial / _LOCK_FILE)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{target}: another process is writing it; wait for it, or give another directory"
        ) from error
    except OSError as error:
        raise StorageError(
            f"{target} cannot be written ({error}); give another directory"
        ) from error
    try:
        _clear(partial)
        yield partial
        _rename_into_place(partial, target)
    except OSError as error:
        raise StorageError(
            f"{target} was not written ({error}); free space, or give another directory"
        ) from error
    finally:
        lock.release()
        shutil.rmtree(partial, ignore_errors=True)


def check_replaceable(target: Path, *, marker: str, overwrite: bool) -> None:
    """Raise UserError if `atomic_directory` would reject the target."""
    target = target.expanduser()
    if target.is_dir() and not target.is_symlink():
        if not any(target.iterdir()) or (overwrite and (target / marker).is_file()):
            return
        if overwrite:
            raise UserError(
                f"{target} has no {marker}, so it is not known as an export; remove it yourself"
            )
        raise UserError(
            f"{target} exists already; give another directory, or overwrite to replace an export"
        )
    if os.path.lexists(target):
        raise UserError(f"{target} exists already and is no directory; give another name")


def _clear(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.name != _LOCK_FILE:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _rename_into_place(partial: Path, target: Path) -> None:
    for entry in partial.iterdir():
        sync(entry)
    (partial / _LOCK_FILE).unlink()
    sync(partial)
    if target.is_dir() and any(target.iterdir()):
        previous = target.with_name(f".{target.name}.previous")
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
        partial.rename(target)
        shutil.rmtree(previous)
    else:
        partial.rename(target)
    sync(target.parent)
