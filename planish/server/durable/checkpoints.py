"""Checkpoints that clients saved: whose they are, who may read them, how long they stay.

A tenant sees its own, and reads others' once they are published. The files know their time to live
themselves, and are refused when it is over even before they are removed. The server's own
checkpoints (private_names.py) are none of these.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib
import logging
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import orjson

from planish.errors import CheckpointError, DamagedFileError, UnsupportedError, UserError
from planish.server.durable.names import is_external, is_private
from planish.server.durable.records import CheckpointRow, change, count, remove, select
from planish.server.durable.store import Store, Transaction, crash_point
from planish.server.engine_client import EngineClient
from planish.server.results import Conflict, NoSuchCheckpoint, NotFound, Page, Tenant
from planish.server.settings import ServerSettings
from planish.service import CheckpointInfo
from planish.types import Checkpoint, CheckpointPath

_log = logging.getLogger(__name__)

_ALIVE = "(expires IS NULL OR expires > ?)"


class CheckpointCatalog:
    def __init__(self, engine: EngineClient, store: Store, settings: ServerSettings) -> None:
        self._engine = engine
        self._store = store
        self._settings = settings
        self._secret = secrets.token_bytes(32)
        """Of download tokens; they end with the process."""
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def readable(self, tenant: Tenant, path: str) -> CheckpointRow:
        """The checkpoint, if it is the tenant's or published. NotFound otherwise, or when it has
        expired.
        """
        row = await self._row(path)
        if row.tenant != tenant.name and not row.public:
            raise _not_found(path)
        return row

    async def owned(self, tenant: Tenant, path: str) -> CheckpointRow:
        """The checkpoint, if it is the tenant's."""
        row = await self._row(path)
        if row.tenant != tenant.name:
            raise _not_found(path)
        return row

    async def page(
        self, tenant: Tenant, run_id: str | None, limit: int | None, offset: int
    ) -> Page[Checkpoint]:
        """The tenant's, or those of one of its runs; newest first."""
        where, values = f"tenant = ? AND {_ALIVE}", [tenant.name, time.time()]
        if run_id is not None:
            where, values = f"{where} AND run = ?", [*values, run_id]
        order = f"{where} ORDER BY made DESC, path LIMIT ? OFFSET ?"
        rows, total = await self._store.read(
            lambda connection: (
                select(
                    connection,
                    CheckpointRow,
                    order,
                    [*values, -1 if limit is None else limit, offset],
                ),
                count(connection, CheckpointRow, where, values),
            )
        )
        return Page(
            [row.checkpoint for row in rows], offset, total if limit is None else limit, total
        )

    async def newest(self, run_id: str) -> dict[str, Checkpoint]:
        """The last checkpoint of each kind of a run. External weights are of none: no sampler is
        made of them.
        """
        where = f"run = ? AND {_ALIVE} ORDER BY made"
        rows = await self._store.read(
            lambda db: select(db, CheckpointRow, where, [run_id, time.time()])
        )
        return {
            row.checkpoint.checkpoint_type: row.checkpoint
            for row in rows
            if not is_external(row.path)
        }

    async def info(self, tenant: Tenant, path: str) -> CheckpointInfo:
        row = await self.readable(tenant, path)
        info = await self._engine.checkpoint_info(row.path)
        return replace(info, checkpoint=row.checkpoint)

    async def files(self, tenant: Tenant, path: str) -> CheckpointFiles:
        row = await self.readable(tenant, path)
        recipients = recipients_of(row.checkpoint.user_metadata or {})
        return CheckpointFiles(await self._engine.checkpoint_files(row.path), recipients)

    def changing(self, path: str) -> asyncio.Lock:
        """Held by whoever makes, changes or deletes the files of a checkpoint, until its row is on
        the way to the database.
        """
        return self._changing.setdefault(path, asyncio.Lock())

    async def delete(self, tenant: Tenant, path: str) -> None:
        row = await self.owned(tenant, path)
        async with self.changing(row.path):
            removed = await self._remove(row)
        await removed

    async def set_public(self, tenant: Tenant, path: str, public: bool) -> None:
        row = await self.owned(tenant, path)
        if bool(row.public) == public:
            raise Conflict(f"{path} is {'published already' if public else 'not published'}")
        await self._store.write(
            lambda transaction: change(transaction, CheckpointRow, row.path, public=int(public))
        )

    async def set_ttl(self, tenant: Tenant, path: str, ttl_seconds: int | None) -> None:
        row = await self.owned(tenant, path)
        async with self.changing(row.path):
            await self._engine.set_checkpoint_ttl(row.path, ttl_seconds)
            expires = (await self.saved(tenant, row.path)).expires
            await self._store.write(
                lambda transaction: change(transaction, CheckpointRow, row.path, expires=expires)
            )

    async def saved(self, tenant: Tenant, path: str) -> CheckpointRow:
        """The row of a checkpoint that was just saved."""
        return CheckpointRow.made_of(
            (await self._engine.checkpoint_info(path)).checkpoint, tenant.name
        )

    async def check_quota(self, tenant: Tenant) -> None:
        """UserError if the tenant keeps as many bytes as it may."""
        used = await self._store.read(
            lambda db: db.execute(
                "SELECT SUM(bytes) FROM checkpoints WHERE tenant = ?", [tenant.name]
            ).fetchone()[0]
        )
        if (used or 0) >= self._settings.storage_bytes:
            raise UserError(
                f"the checkpoints of this key have {used:,} bytes, and may have {self._settings.storage_bytes:,}; "
                "delete some, or give ttl_seconds when you save"
            )

    async def bytes_by_tenant(self) -> dict[str, int]:
        """What named checkpoints take, for each tenant that has any."""
        query = "SELECT tenant, SUM(bytes) FROM checkpoints GROUP BY tenant"
        return await self._store.read(lambda db: dict(db.execute(query)))

    async def remove_expired(self) -> None:
        expired = await self._store.read(
            lambda db: select(db, CheckpointRow, f"NOT {_ALIVE}", [time.time()])
        )
        removed = []
        for row in expired:
            async with self.changing(row.path):
                if not await self._is_alive(row.path):  # it was not saved again meanwhile
                    removed.append(await self._remove(row))
        await asyncio.gather(*removed)  # behind all, since a full disk may need the space first

    async def reconcile(self) -> None:
        """At a start: believe the disk about what is there and when it expires, as a kill in the
        middle of a change leaves it.

        What is there and cannot be read stays its tenant's: the file may be put back.
        """
        on_disk = {
            checkpoint.tinker_path: checkpoint for checkpoint in await self._engine.checkpoints()
        }
        rows = await self._store.read(lambda db: select(db, CheckpointRow, "1"))
        missing, now = [row for row in rows if row.path not in on_disk], time.time()
        damaged = {
            row.path: error
            for row in missing
            if (error := await self._damage(row.path)) is not None
        }
        lost = [row.path for row in missing if row.path not in damaged]
        found = {
            row.path: CheckpointRow.made_of(on_disk[row.path], row.tenant).expires
            for row in rows
            if row.path in on_disk
        }
        changed = [row.path for row in rows if row.path in found and row.expires != found[row.path]]
        for path, error in damaged.items():
            _log.error(
                "%s cannot be read: %s. Put the file back from a backup, or delete the checkpoint",
                path,
                error,
            )
        for row in missing:
            if row.path in lost and (row.expires is None or row.expires > now):
                _log.warning("%s of %s is not on disk any more", row.path, row.tenant)

        def believe(transaction: Transaction) -> None:
            for path in lost:
                remove(transaction, CheckpointRow, path)
            for path in changed:
                change(transaction, CheckpointRow, path, expires=found[path])

        await self._store.write(believe)

    def token(self, tenant: Tenant, path: str, seconds: float) -> str:
        """Lets its holder read the files of one checkpoint for a while, if `tenant` may."""
        content = orjson.dumps([path, tenant.name, int(time.time() + seconds)]).hex()
        return f"{content}.{self._signature(content)}"

    async def files_of_token(self, token: str) -> CheckpointFiles:
        content, _, signature = token.partition(".")
        if not hmac.compare_digest(_encode(signature), _encode(self._signature(content))):
            raise NotFound(
                "this link is none of this server's, or it was made before its last start; ask for a new one"
            )
        path, tenant, until = orjson.loads(bytes.fromhex(content))
        if until < time.time():
            raise NotFound("this link is not valid any more; ask for a new one")
        return await self.files(Tenant(tenant), path)

    def _signature(self, content: str) -> str:
        return hmac.new(self._secret, _encode(content), hashlib.sha256).hexdigest()

    async def _row(self, path: str) -> CheckpointRow:
        parsed = str(CheckpointPath.parse(path))
        rows = await self._store.read(
            lambda db: select(db, CheckpointRow, f"path = ? AND {_ALIVE}", [parsed, time.time()])
        )
        if not rows:
            raise _not_found(path)
        return rows[0]

    async def _damage(self, path: str) -> Exception | None:
        """What is wrong with a checkpoint that is there and cannot be read."""
        try:
            await self._engine.exists(path)
        except (DamagedFileError, OSError) as error:
            return error
        return None

    async def _is_alive(self, path: str) -> bool:
        """Whether there is a checkpoint that can be read and has not expired."""
        try:
            return await self._engine.exists(path)
        except DamagedFileError:
            return False

    async def _remove(self, row: CheckpointRow) -> asyncio.Future[None]:
        """Delete the files; what is answered ends when the row is gone too."""
        await self._engine.delete_checkpoint(row.path)
        crash_point("checkpoint deleted before recording")
        return self._store.keep(lambda transaction: remove(transaction, CheckpointRow, row.path))


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _not_found(path: str) -> NoSuchCheckpoint:
    return NoSuchCheckpoint(
        f"there is no checkpoint {path[:300]!r} that this key may read; wait for the result of the save that makes it, "
        "name another if it has expired, or ask its owner to publish it (`planish checkpoints publish`)"
    )


def check_source(path: str) -> None:
    """CheckpointError for a path that clients cannot know of."""
    if is_private(path):
        raise CheckpointError(f"there is no checkpoint {path[:300]!r}")


SUFFIX = ".age"
_RECIPIENTS = "age_encryption_recipients"
_MAX_RECIPIENTS = 10


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
    if len(recipients) > _MAX_RECIPIENTS:
        raise UserError(
            f"{_RECIPIENTS} names {len(recipients)} keys; give at most {_MAX_RECIPIENTS}"
        )
    for index, recipient in enumerate(recipients):
        if not isinstance(recipient, str) or "\n" in recipient:
            raise UserError(
                f"{_RECIPIENTS}[{index}] is no text of one line; give an age1... key or a public key of SSH"
            )
        _recipient(recipient, f"{_RECIPIENTS}[{index}]")
    return {_RECIPIENTS: "\n".join(recipients)}


def recipients_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The inverse of `metadata_of`."""
    return tuple(metadata.get(_RECIPIENTS, "").splitlines())


def encrypted(path: Path, recipients: Sequence[str]) -> BinaryIO:
    """The encrypted content, at its beginning; it is gone when it is closed."""
    keys = [_recipient(recipient, _RECIPIENTS) for recipient in recipients]
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
            f"{_RECIPIENTS}: this server has no pyrage to encrypt with; install planish[age] there"
        )
    return importlib.import_module("pyrage")  # it has no types
