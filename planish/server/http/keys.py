"""Keys of tenants, and the file that lists them.

A key file has one key per line, `KEY` or `NAME KEY`; a comment begins with #. Keys with the same
name belong to one tenant. So a new key with this name can use the models and checkpoints that were
made with the old key. Without a name, the tenant is named by the key's digest. A key with the name
`metrics` reads /metrics only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from planish.errors import UserError
from planish.server.results import Tenant, Unauthorized

_log = logging.getLogger(__name__)

METRICS_KEY_NAME = "metrics"
"""The name of the key that may read only the page /metrics."""
OPERATOR_KEY_NAME = "operator"
"""The name of the key that may change what the server runs: its adapters and its replicas."""
ANONYMOUS_TENANT = Tenant("everybody")
"""The only tenant of a server without keys."""

_TENANT_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,100}")
_COMMENT = re.compile(r"(?:^|\s)#")
_KEY = re.compile(r"[\x21-\x7e]{8,500}")
_NAME_AND_KEY = re.compile(r"[^=]=[^=]|.[:,;=]tml-")
"""Matches a line such as NAME=KEY, which is probably a mistake. Without this check, the whole word
would become a key without a name. A base64 key does not match, because it has = only at its end.
"""


def read_keys(path: str | Path) -> dict[str, str]:
    """Return the tenants' names by key. Raise UserError if the file cannot be read, is empty, or
    has an invalid line.
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_text().splitlines()
        if file.stat().st_mode & 0o077:
            _log.warning(
                "api_key_file=%s can be read by other users of this machine; run: chmod 600 %s",
                path,
                shlex.quote(str(file)),
            )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"api_key_file={path}: {error}; give a text file with one key per line"
        ) from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = _COMMENT.split(line, maxsplit=1)[0]
        if "#" in text:
            raise UserError(
                f"api_key_file={path}, line {number}: a # within a key; change the key, or put a "
                "space before a comment"
            )
        words = text.split()
        if words:
            *names, key = words
            if not names and _NAME_AND_KEY.search(key):
                raise UserError(
                    f"api_key_file={path}, line {number}: this looks like a name and a key in one "
                    "word; put a space between them, NAME KEY"
                )
            if (
                not _KEY.fullmatch(key)
                or len(names) > 1
                or not all(_TENANT_NAME.fullmatch(name) for name in names)
            ):
                raise UserError(
                    f"api_key_file={path}, line {number}: give KEY or NAME KEY, with a key of at "
                    "least 8 printable characters"
                )
            if key in keys:
                raise UserError(
                    f"api_key_file={path}, line {number}: this key is listed twice; remove one"
                )
            keys[key] = names[0] if names else f"key-{_key_digest(key).hex()[:12]}"
    if not keys:
        raise UserError(f"api_key_file={path} holds no key; write one per line")
    return keys


class ApiKeys:
    """Finds the tenant of a key, in the same time for every key."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """`keys` maps keys to tenants' names."""
        self._tenants = [(_key_digest(key), Tenant(name)) for key, name in keys.items()]

    def tenant(self, key: str | None) -> Tenant:
        """Return the tenant of a key. Raise Unauthorized if the key is missing or unknown."""
        if not key:
            raise Unauthorized("this server needs a key: set TINKER_API_KEY (header X-API-Key)")
        given_digest = _key_digest(key)
        matching_tenants = [
            tenant for digest, tenant in self._tenants if hmac.compare_digest(digest, given_digest)
        ]
        if not matching_tenants:
            raise Unauthorized("this key is unknown; ask the server's operator for one")
        return matching_tenants[0]


def _key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
