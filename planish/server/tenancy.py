"""Who asks: keys, and the tenants that they stand for.

A file of keys has one a line, `KEY` or `NAME KEY`; what follows a # is a comment. Keys with one
name are one tenant, so a key can be changed without losing what was made under it. Without a name,
the tenant is named by the key's digest.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from planish.errors import UserError
from planish.server.answers import Tenant
from planish.server.errors import Unauthorized

EVERYBODY = Tenant("everybody")
"""The one tenant of a server without keys."""

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,100}")
_COMMENT = re.compile(r"(?:^|\s)#")
_KEY = re.compile(r"[\x21-\x7e]{8,500}")


def read_keys(path: str | Path) -> dict[str, str]:
    """Tenants' names by key. UserError for a file that cannot be read, is empty, or has a line that
    is none.
    """
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"api_key_file={path}: {error}; give a text file with one key a line"
        ) from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = _COMMENT.split(line, maxsplit=1)[0]
        if "#" in text:
            raise UserError(
                f"api_key_file={path}, line {number}: a # within a key; give another key, or a space before a comment"
            )
        words = text.split()
        if words:
            *names, key = words
            if (
                not _KEY.fullmatch(key)
                or len(names) > 1
                or not all(_NAME.fullmatch(name) for name in names)
            ):
                raise UserError(
                    f"api_key_file={path}, line {number}: give KEY or NAME KEY, with a key of at least 8 printable characters"
                )
            if key in keys:
                raise UserError(
                    f"api_key_file={path}, line {number}: this key is there twice; remove one"
                )
            keys[key] = names[0] if names else f"key-{_digest(key).hex()[:12]}"
    if not keys:
        raise UserError(f"api_key_file={path} holds no key; give one a line")
    return keys


class Keyring:
    """Tells tenants by their keys, in the same time for every key."""

    def __init__(self, keys: Mapping[str, str] | None) -> None:
        """`keys` maps keys to tenants' names; None: nobody is asked for one."""
        self._tenants = (
            None if keys is None else [(_digest(key), Tenant(name)) for key, name in keys.items()]
        )

    def tenant(self, key: str | None) -> Tenant:
        if self._tenants is None:
            return EVERYBODY
        if not key:
            raise Unauthorized("a key is needed here: set TINKER_API_KEY (header X-API-Key)")
        given = _digest(key)
        found = [tenant for digest, tenant in self._tenants if hmac.compare_digest(digest, given)]
        if not found:
            raise Unauthorized("this key is not known here; ask whoever runs the server for one")
        return found[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
