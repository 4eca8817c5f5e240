"""A directory that is whole or absent.

It is filled under another name beside its place, .NAME.partial, synced and renamed. A killed
process leaves that name behind, which no program takes for a model, and which the next attempt
clears and uses. A lock in it keeps two processes from filling one directory.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from planish.errors import StorageError, UserError

_LOCK = ".lock"


@contextmanager
def whole_directory(target: Path, *, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """A directory to fill, which is `target` after the block, or is gone if the block fails.

    `target` may be there already if it is empty, or, with `overwrite`, if it has a file `marker`,
    by which it is known as one that was made here; it is replaced when the new one is whole.
    UserError for any other; StorageError when the disk refuses.
    """
    target = target.expanduser().absolute()
    check_free(target, marker=marker, overwrite=overwrite)
    aside = target.with_name(f".{target.name}.partial")
    try:
        aside.mkdir(parents=True, exist_ok=True)
        lock = FileLock(aside / _LOCK)
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
        _clear(aside)
        yield aside
        _put(aside, target)
    except OSError as error:
        raise StorageError(
            f"{target} was not written ({error}); free space, or give another directory"
        ) from error
    finally:
        lock.release()
        shutil.rmtree(aside, ignore_errors=True)


def check_free(target: Path, *, marker: str, overwrite: bool) -> None:
    """UserError if `whole_directory` would refuse the target."""
    target = target.expanduser()
    if target.is_dir() and not target.is_symlink():
        if not any(target.iterdir()) or (overwrite and (target / marker).is_file()):
            return
        if overwrite:
            raise UserError(
                f"{target} has no {marker}, so it is not known as an export; remove it yourself"
            )
        raise UserError(
            f"{target} is there already; give another directory, or overwrite to replace an export"
        )
    if os.path.lexists(target):
        raise UserError(f"{target} is there already and is no directory; give another name")


def _clear(aside: Path) -> None:
    for entry in aside.iterdir():
        if entry.name != _LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _put(aside: Path, target: Path) -> None:
    for entry in aside.iterdir():
        _sync(entry)
    (aside / _LOCK).unlink()
    _sync(aside)
    if target.is_dir() and any(target.iterdir()):
        previous = target.with_name(f".{target.name}.previous")
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
        aside.rename(target)
        shutil.rmtree(previous)
    else:
        aside.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
