"""Files that only the holders of a key can read: encrypted by age (age-encryption.org) as they are
sent.

A client that saves external weights may name recipients. Their names are kept in the checkpoint's
metadata, and no way of downloading it gives its files in plain. On this server's own disk it is as
any other checkpoint, since whoever reads that disk has the model's state too.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from planish.errors import UnsupportedError, UserError

SUFFIX = ".age"
_FIELD = "age_encryption_recipients"
_MOST = 10


@dataclass(frozen=True)
class CheckpointFiles:
    """What a download of a checkpoint is made of."""

    paths: Mapping[str, Path]
    recipients: tuple[str, ...]
    """Those who can read what is sent; empty: everybody."""

    @property
    def names(self) -> list[str]:
        """Of the files that are sent."""
        return [name + SUFFIX if self.recipients else name for name in self.paths]

    def open(self, name: str) -> BinaryIO:
        """One of `names`, to be read from its beginning. KeyError for another name,
        FileNotFoundError when it was deleted.
        """
        if not self.recipients:
            return open(self.paths[name], "rb")
        return encrypted(self.paths[name.removesuffix(SUFFIX)], self.recipients)


def metadata_of(recipients: Sequence[Any]) -> dict[str, str]:
    """What a checkpoint's metadata say of its recipients: age1... keys or public keys of SSH, at
    most ten.

    UserError for what is no such key, UnsupportedError where the package that encrypts is not
    installed.
    """
    if not recipients:
        return {}
    if len(recipients) > _MOST:
        raise UserError(f"{_FIELD} names {len(recipients)} keys; give at most {_MOST}")
    for index, recipient in enumerate(recipients):
        if not isinstance(recipient, str) or "\n" in recipient:
            raise UserError(
                f"{_FIELD}[{index}] is no text of one line; give an age1... key or a public key of SSH"
            )
        _recipient(recipient, f"{_FIELD}[{index}]")
    return {_FIELD: "\n".join(recipients)}


def recipients_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The inverse of `metadata_of`."""
    return tuple(metadata.get(_FIELD, "").splitlines())


def encrypted(path: Path, recipients: Sequence[str]) -> BinaryIO:
    """The encrypted content, at its beginning; it is gone when it is closed."""
    keys = [_recipient(recipient, _FIELD) for recipient in recipients]
    sealed = tempfile.TemporaryFile()  # noqa: SIM115  (closed when it is sent)
    try:
        with open(path, "rb") as plain:
            _pyrage().encrypt_io(plain, sealed, keys)
        sealed.seek(0)
    except BaseException:
        sealed.close()
        raise
    return sealed


def _recipient(text: str, name: str) -> Any:
    pyrage = _pyrage()
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise UserError(
            f"{name}={text[:100]!r}: {error}; give an age1... key or a public key of SSH"
        ) from None


def _pyrage() -> Any:
    if find_spec("pyrage") is None:
        raise UnsupportedError(
            f"{_FIELD}: this server has no pyrage to encrypt with; install planish[age] there"
        )
    return importlib.import_module("pyrage")  # it has no types
