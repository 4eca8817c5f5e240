"""Digests of the rows that a run reads.

A run records the digest of each split in its directory. So a resumed run notices rows that were
edited, even if their number is the same.

    with recorded_rows() as digests:
        rows = open_rows("chats.jsonl", "train")
    digests    # {"chats.jsonl, train": RowDigest(rows=16, sha256="...")}
"""

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_recorded: ContextVar["dict[str, RowDigest] | None"] = ContextVar("recorded_rows", default=None)


@dataclass(frozen=True)
class RowDigest:
    """The number of rows, and the SHA-256 of their contents in their order."""

    rows: int
    sha256: str


@contextmanager
def recorded_rows() -> Generator[Mapping[str, RowDigest]]:
    """Provide a mapping that gets the digest of each split that is read within the block, also in
    the block's calls of `asyncio.to_thread`.
    """
    digests: dict[str, RowDigest] = {}
    token = _recorded.set(digests)
    try:
        yield digests
    finally:
        _recorded.reset(token)


def record_rows(name: str, rows: Sequence[Any]) -> None:
    """Record the digest of `rows` as that of `name`, if a block of `recorded_rows` is active."""
    digests = _recorded.get()
    if digests is not None and name not in digests:
        digests[name] = digest_of(rows)


def digest_of(rows: Sequence[Any]) -> RowDigest:
    """Return the digest of rows, which contain JSON values, bytes, and values with a `repr` of
    their own, such as dates.
    """
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps(row, ensure_ascii=False, default=_as_text) + "\n"
        # A JSON file may contain half of a surrogate pair.
        digest.update(text.encode(errors="surrogatepass"))
    return RowDigest(len(rows), digest.hexdigest())


def _as_text(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)
