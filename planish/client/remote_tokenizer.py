"""Tokenizers that a server gives out, kept on this machine's disk.

A directory is named by the digest of what is in it, so it is written once, never changes, and never
belongs to another model than the one that was asked for, whatever a server calls it. What lies
there comes from the server: names of files are checked, and planish.tokenizer runs no code of them.
"""

from __future__ import annotations

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
    """`PLANISH_HOME`/tokenizers, by default ~/.cache/planish/tokenizers."""
    return cache_home() / "tokenizers"


def keep_tokenizer(files: Mapping[str, str], cache: Path) -> Path:
    """The directory of `cache` that holds these files, by name; written if it is not there.
    UserError for what cannot be a file.
    """
    for name, text in files.items():
        if not _FILE_NAME.fullmatch(name) or not isinstance(text, str):
            raise UserError(
                f"the server's tokenizer has a file {name[:100]!r}, which is none; the server is not planish's"
            )
    if not files:
        raise UserError(
            "the server has no files of this tokenizer; look at the model's directory there"
        )
    directory = cache / _digest(files)
    if directory.is_dir():
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".", dir=cache))
        try:
            for name, text in files.items():
                (aside / name).write_text(text, encoding="utf-8", newline="")
            aside.chmod(0o755)
            _move(aside, directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"cannot keep the tokenizer in {cache} ({error}); set PLANISH_HOME to where there is room"
        ) from error
    return directory


def _move(aside: Path, directory: Path) -> None:
    try:
        aside.rename(directory)
    except OSError:
        if not directory.is_dir():  # otherwise another process was faster, with the same files
            raise


def _digest(files: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(files.items()):
        content = text.encode()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]
