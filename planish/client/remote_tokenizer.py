"""A disk cache of the tokenizers that servers send.

A cache directory is named by the digest of its files. It is written once and never changes, and
models of the same name on different servers cannot be confused. The files are not trusted: file
names are checked, and planish.tokenizer runs no code from the files.
"""

# pyright: reportUnnecessaryIsInstance=false

import hashlib
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from planish.errors import StorageError, UserError
from planish.files import cache_home

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def cache_directory() -> Path:
    """Return $PLANISH_HOME/tokenizers, by default ~/.cache/planish/tokenizers."""
    return cache_home() / "tokenizers"


def cache_tokenizer(files: Mapping[str, str], cache: Path) -> Path:
    """Return the directory in `cache` with these files (name to text), and write it if it is
    missing.

    Raise UserError if a name or a content is invalid, and StorageError if the directory cannot be
    written.
    """
    for name, text in files.items():
        if not _FILE_NAME.fullmatch(name) or not isinstance(text, str):
            raise UserError(
                f"the server's tokenizer has an invalid file {name[:100]!r}; connect to a planish "
                "server"
            )
    if not files:
        raise UserError(
            "the server has no files for this tokenizer; check the model's directory on the server"
        )
    directory = cache / _digest(files)
    if directory.is_dir():
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary_directory = Path(tempfile.mkdtemp(prefix=".", dir=cache))
        try:
            for name, text in files.items():
                (temporary_directory / name).write_text(text, encoding="utf-8", newline="")
            temporary_directory.chmod(0o755)
            _move(temporary_directory, directory)
        finally:
            shutil.rmtree(temporary_directory, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"cannot keep the tokenizer in {cache} ({error}); set PLANISH_HOME to a directory with "
            "free space"
        ) from error
    return directory


def _move(temporary_directory: Path, directory: Path) -> None:
    try:
        temporary_directory.rename(directory)
    except OSError:
        if not directory.is_dir():  # it exists if another process has just written the same files
            raise


def _digest(files: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(files.items()):
        content = text.encode()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]
