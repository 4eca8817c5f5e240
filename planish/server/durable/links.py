"""Signed download links. The key is stored in the data directory, so links outlive a restart.

Only the server's user can read the key file. To make all links invalid at once, stop the
server, delete the file, and start the server again.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from pathlib import Path

import orjson

from planish.errors import DamagedFileError
from planish.files import sync
from planish.server.results import NotFound

KEY_FILE = "links.key"
_KEY_BYTES = 32

_log = logging.getLogger(__name__)


class LinkSigner:
    """Makes and checks the tokens of download links."""

    def __init__(self, data_dir: Path) -> None:
        """Read the key in `data_dir`, or create it. Raise DamagedFileError if it is damaged."""
        self._key = _load_or_create_key(data_dir / KEY_FILE)

    def token(self, path: str, tenant: str, seconds: float) -> str:
        """Return a token for the checkpoint at `path` that is valid for `seconds`."""
        content = orjson.dumps([path, tenant, int(time.time() + seconds)]).hex()
        return f"{content}.{self._signature(content)}"

    def verify(self, token: str) -> tuple[str, str]:
        """Return the path and the tenant of a token. Raise NotFound if this server did not sign the
        token, or if the token has expired.
        """
        content, _, signature = token.partition(".")
        if not hmac.compare_digest(_encode(signature), _encode(self._signature(content))):
            raise NotFound(
                "this link was not signed by this server, or the server's key was replaced; ask "
                "for a new link"
            )
        path, tenant, expires = orjson.loads(bytes.fromhex(content))
        if expires <= time.time():
            raise NotFound("this link has expired; ask for a new one")
        return path, tenant

    def _signature(self, content: str) -> str:
        return hmac.new(self._key, _encode(content), hashlib.sha256).hexdigest()


def _load_or_create_key(file: Path) -> bytes:
    try:
        key = _read_key(file) or _create_key(file)
    except OSError as error:
        # A full disk must not keep the server from starting.
        _log.warning(
            "signed links will be invalid after the next restart, because their key could not be "
            "saved: %s",
            error,
        )
        return secrets.token_bytes(_KEY_BYTES)
    if len(key) != _KEY_BYTES:
        raise DamagedFileError(
            f"{file} has {len(key)} bytes, not {_KEY_BYTES}; restore it from a backup, or delete "
            "it, which makes all download links invalid"
        )
    return key


def _read_key(file: Path) -> bytes | None:
    try:
        key = file.read_bytes()
    except FileNotFoundError:
        return None
    if file.stat().st_mode & 0o077:
        _log.warning("%s could be read by other users of this machine; its mode is 0600 now", file)
        file.chmod(0o600)
    return key


def _create_key(file: Path) -> bytes:
    key = secrets.token_bytes(_KEY_BYTES)
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
        output.write(key)
        output.flush()
        os.fsync(output.fileno())
    os.replace(temporary, file)
    sync(file.parent)
    return key


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
