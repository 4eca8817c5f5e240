"""Checkpoints that clients saved: who owns them, who may read them, when they expire, and how they
are downloaded.

A tenant sees its own checkpoints, and can read public ones of other tenants. The time to live is
stored in a checkpoint's files. An expired checkpoint cannot be read, even before it is deleted.
Its owner can still give it a longer time to live. checkpoint_maintenance.py deletes it later.

External weights are adapters saved for other programs, in PEFT's layout. A sampler checkpoint of
planish has that layout already. So external weights NAME are stored as the sampler checkpoint
`external:NAME`. Clients see them as `tinker://MODEL/external_weights/NAME`.

A client that saves external weights may name recipients. A download is then encrypted with age
(age-encryption.org), and only the recipients can decrypt it. The recipients are stored in the
checkpoint's metadata. The server's own copy is not encrypted. Encryption would not protect that
copy, because anybody who can read the server's disk can read the model's state there.

The server makes private checkpoints for itself, in the runs of its models and samplers. Private
checkpoints are not in the catalog, and clients cannot use their names:

    tinker://MODEL/weights/_planish.snapshot.SEQ          a snapshot of the model after request SEQ
    tinker://MODEL/KIND/_planish.loaded.SEQ               a copy of the checkpoint that request SEQ
                                                          loaded
    tinker://MODEL/sampler_weights/_planish.sampler.SEQ   a sampler published by request SEQ
    tinker://SAMPLER/sampler_weights/_planish.source      a copy of the checkpoint of a sampler
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

from planish.errors import (
    CheckpointError,
    UnsupportedError,
    UserError,
)
from planish.server.durable.crash_points import crash_point
from planish.server.durable.database import PRIVATE_PREFIX
from planish.server.durable.links import LinkSigner
from planish.server.durable.quotas import check_storage
from planish.server.durable.records import (
    CheckpointRow,
    count,
    delete_row,
    select,
    select_checkpoint_page,
    update_row,
)
from planish.server.durable.store import Store
from planish.server.engine_client import EngineClient
from planish.server.results import Conflict, NoSuchCheckpoint, Page, Tenant
from planish.server.settings import ServerSettings
from planish.service import CheckpointInfo
from planish.types import Checkpoint, CheckpointPath

_log = logging.getLogger(__name__)

IS_UNEXPIRED = "(expires IS NULL OR expires > ?)"


class CheckpointCatalog:
    """The named checkpoints of all tenants."""

    def __init__(
        self,
        engine: EngineClient,
        store: Store,
        settings: ServerSettings,
    ) -> None:
        """`engine` manages the files of checkpoints, and `store` has a row for each checkpoint."""
        self._engine = engine
        self._store = store
        self._settings = settings
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def readable_row(self, tenant: Tenant, path: str) -> CheckpointRow:
        """Return a checkpoint that the tenant may read: its own, or a public one. Raise
        NoSuchCheckpoint for any other checkpoint, and for an expired one.
        """
        row = await self._row(path)
        if row.tenant != tenant.name and not row.public:
            raise _not_found(path)
        return row

    async def owned_row(self, tenant: Tenant, path: str) -> CheckpointRow:
        """Return a checkpoint of the tenant. Raise NoSuchCheckpoint for any other checkpoint, and
        for an expired one.
        """
        row = await self._row(path)
        if row.tenant != tenant.name:
            raise _not_found(path)
        return row

    async def page(
        self, tenant: Tenant, run_id: str | None, limit: int | None, offset: int
    ) -> Page[Checkpoint]:
        """Return a page of the tenant's checkpoints, or of the checkpoints of one run, newest
        first. A page ends early when the metadata of its checkpoints exceed PAGE_BYTES.
        `Page.limit` is then the number of checkpoints on the page.
        """
        where, values = f"tenant = ? AND {IS_UNEXPIRED}", [tenant.name, time.time()]
        if run_id is not None:
            where, values = f"{where} AND run = ?", [*values, run_id]
        order = f"{where} ORDER BY created DESC, path LIMIT ? OFFSET ?"
        (rows, is_truncated), total = await self._store.read(
            lambda connection: (
                select_checkpoint_page(
                    connection, order, [*values, -1 if limit is None else limit, offset]
                ),
                count(connection, CheckpointRow, where, values),
            )
        )
        return Page(
            [row.checkpoint for row in rows],
            offset,
            len(rows) if is_truncated or limit is None else limit,
            total,
        )

    async def newest_by_type(self, run_id: str) -> dict[str, Checkpoint]:
        """Return the newest checkpoint of each kind of a run, by kind. External weights are left
        out, because no sampler is created from them.
        """
        # "0" is the character after "/", so these bounds select the paths of one directory.
        where = (
            f"run = ? AND {IS_UNEXPIRED} AND path > ? || '/' AND path < ? || '0' AND NOT "
            "(path > ? AND path < ?) ORDER BY created DESC LIMIT 1"
        )
        external = f"tinker://{run_id}{STORED_DIRECTORY}"
        newest: dict[str, Checkpoint] = {}
        for segment in ("weights", "sampler_weights"):
            directory = f"tinker://{run_id}/{segment}"
            values = [run_id, time.time(), directory, directory, external, f"{external}\U0010ffff"]
            for row in await self._store.read(select, CheckpointRow, where, values):
                newest[row.checkpoint.checkpoint_type] = row.checkpoint
        return newest

    async def info(self, tenant: Tenant, path: str) -> CheckpointInfo:
        """Return the description of a checkpoint that the tenant may read."""
        row = await self.readable_row(tenant, path)
        return replace(await self._engine.checkpoints.info(row.path), checkpoint=row.checkpoint)

    def lock(self, path: str) -> asyncio.Lock:
        """Return the lock for making, changing or deleting a checkpoint. The caller must change the
        files and queue the write of the checkpoint's row before it releases the lock.
        """
        return self._locks.setdefault(path, asyncio.Lock())

    async def delete(self, tenant: Tenant, path: str) -> None:
        """Delete one of the tenant's checkpoints, even an expired one."""
        row = await self._owned_or_expired_row(tenant, path)
        async with self.lock(row.path):
            deletion = await self.delete_files_and_row(row)
        await deletion

    async def set_public(self, tenant: Tenant, path: str, public: bool) -> None:
        """Publish or unpublish a checkpoint. Raise Conflict if this would change nothing."""
        row = await self.owned_row(tenant, path)
        if bool(row.public) == public:
            raise Conflict(f"{path} is {'already public' if public else 'not public'}")
        await self._store.write(update_row, CheckpointRow, row.path, public=int(public))

    async def set_ttl(self, tenant: Tenant, path: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire `ttl_seconds` from now, even if it has expired already. With None
        it never expires.
        """
        row = await self._owned_or_expired_row(tenant, path)
        async with self.lock(row.path):
            await self._engine.checkpoints.set_ttl(row.path, ttl_seconds)
            row = await self.row_from_files(tenant, row.path)
            await self._store.write(update_row, CheckpointRow, row.path, expires=row.expires)

    async def row_from_files(self, tenant: Tenant, path: str) -> CheckpointRow:
        """Make the row of a checkpoint from its files, which were just written. The row is not
        written to the database.
        """
        info = await self._engine.checkpoints.info(path)
        return CheckpointRow.from_checkpoint(info.checkpoint, tenant.name)

    async def is_name_free(self, path: str) -> bool:
        """Return whether a save may replace what is at `path` without being asked to. This is so if
        nothing is there, an expired checkpoint, or files without a row. A save leaves such files if
        it wrote them, was interrupted by a crash, and failed when it was repeated.

        The caller holds the lock of the path. The writing thread reads the row, because the row of
        the last save may still wait to be written.
        """
        return not (
            await self._engine.checkpoints.exists(path)
            and await self._store.write(select, CheckpointRow, "path = ?", [path])
        )

    async def check_quota(self, tenant: Tenant) -> None:
        """Raise BadRequest if the tenant has used up its storage quota, `max_storage_bytes`."""
        await self._store.read(check_storage, tenant.name, self._settings)

    async def bytes_by_tenant(self) -> dict[str, int]:
        """Return the total size of each tenant's named checkpoints, in bytes."""
        query = "SELECT tenant, SUM(bytes) FROM checkpoints GROUP BY tenant"
        return await self._store.read(lambda db: dict(db.execute(query)))

    async def _row(self, path: str) -> CheckpointRow:
        for row in await self.rows(path):
            if row.expires is None or row.expires > time.time():
                return row
        raise _not_found(path)

    async def _owned_or_expired_row(self, tenant: Tenant, path: str) -> CheckpointRow:
        for row in await self.rows(path):
            if row.tenant == tenant.name:
                return row
        raise _not_found(path)

    async def rows(self, path: str) -> list[CheckpointRow]:
        """Return the row of a checkpoint, expired or not; an empty list without one."""
        parsed = str(CheckpointPath.parse(path))
        return await self._store.read(select, CheckpointRow, "path = ?", [parsed])

    async def delete_files_and_row(self, row: CheckpointRow) -> asyncio.Future[None]:
        """Delete the files and queue the deletion of the row. The returned future is done when the
        row is deleted.
        """
        await self._engine.checkpoints.delete(row.path)
        crash_point("checkpoint deleted before recording")
        return self._store.write_with_retries(delete_row, CheckpointRow, row.path)


def _not_found(path: str) -> NoSuchCheckpoint:
    return NoSuchCheckpoint(
        f"there is no checkpoint {path[:300]!r} that this tenant may read. If it is being saved, "
        "wait for the result of the save. If it has expired, give another checkpoint. If it "
        "belongs to another tenant, ask its owner to run `planish checkpoints publish`"
    )


def check_is_not_private(path: str) -> None:
    """Raise CheckpointError for the path of a private checkpoint, which no client may read."""
    if is_private(path):
        raise CheckpointError(f"there is no checkpoint {path[:300]!r}")


AGE_SUFFIX = ".age"
_RECIPIENTS_KEY = "age_encryption_recipients"
MAX_RECIPIENTS = 10


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint download."""

    paths: Mapping[str, Path]
    recipients: tuple[str, ...]
    """Public keys for which the download is encrypted. If empty, the download is not encrypted."""

    @property
    def names(self) -> list[str]:
        """The names of the files in the download."""
        return [name + AGE_SUFFIX if self.recipients else name for name in self.paths]

    def open(self, name: str) -> BinaryIO:
        """Open one of `names` for reading. Raise KeyError for another name, and FileNotFoundError
        if the checkpoint was deleted.
        """
        if not self.recipients:
            return open(self.paths[name], "rb")
        return encrypt(self.paths[name.removesuffix(AGE_SUFFIX)], self.recipients)


class CheckpointDownloads:
    """The files of checkpoints for tenants, and for anybody with a token."""

    def __init__(self, catalog: CheckpointCatalog, engine: EngineClient, links: LinkSigner) -> None:
        """`catalog` says who may read a checkpoint, and `links` signs the tokens."""
        self._catalog, self._engine, self._links = catalog, engine, links

    async def files(self, tenant: Tenant, path: str) -> CheckpointFiles:
        """Return the files of a checkpoint that the tenant may read."""
        row = await self._catalog.readable_row(tenant, path)
        recipients = recipients_of(row.checkpoint.user_metadata or {})
        return CheckpointFiles(await self._engine.checkpoints.files(row.path), recipients)

    def token(self, tenant: Tenant, path: str, seconds: float) -> str:
        """Return a token with which anybody can read the files of one checkpoint for `seconds`. The
        token stops working earlier if the tenant may no longer read the checkpoint.
        """
        return self._links.token(path, tenant.name, seconds)

    async def files_of_token(self, token: str) -> tuple[Tenant, CheckpointFiles]:
        """Return the tenant and the checkpoint files of a token. Raise NotFound for an invalid or
        expired token.
        """
        path, name = self._links.verify(token)
        return Tenant(name), await self.files(Tenant(name), path)


def metadata_of(recipients: Sequence[Any]) -> dict[str, str]:
    """Return the metadata that stores a checkpoint's recipients. Recipients are age1... keys or SSH
    public keys, at most ten.

    Raise UserError for invalid or too many keys. Raise UnsupportedError if the package pyrage,
    which encrypts, is not installed.
    """
    if not recipients:
        return {}
    if len(recipients) > MAX_RECIPIENTS:
        raise UserError(
            f"{_RECIPIENTS_KEY} names {len(recipients)} keys; give at most {MAX_RECIPIENTS}"
        )
    for index, recipient in enumerate(recipients):
        if not isinstance(recipient, str) or "\n" in recipient:
            raise UserError(
                f"{_RECIPIENTS_KEY}[{index}] is not a single-line string; give an age1... key or "
                "an SSH public key"
            )
        _parse_recipient(recipient, f"{_RECIPIENTS_KEY}[{index}]")
    return {_RECIPIENTS_KEY: "\n".join(recipients)}


def recipients_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the recipients in the metadata of a checkpoint."""
    return tuple(metadata.get(_RECIPIENTS_KEY, "").splitlines())


def encrypt(path: Path, recipients: Sequence[str]) -> BinaryIO:
    """Return a temporary file with the encrypted content. Closing the file deletes it."""
    keys = [_parse_recipient(recipient, _RECIPIENTS_KEY) for recipient in recipients]
    encrypted_file = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
    try:
        with open(path, "rb") as source:
            _import_pyrage().encrypt_io(source, encrypted_file, keys)
        encrypted_file.seek(0)
    except BaseException:
        encrypted_file.close()
        raise
    return encrypted_file


def _parse_recipient(text: str, name: str) -> Any:
    pyrage = _import_pyrage()
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise UserError(
            f"{name}={text[:100]!r}: {error}; give an age1... key or an SSH public key"
        ) from None


def _import_pyrage() -> Any:
    if find_spec("pyrage") is None:
        raise UnsupportedError(
            f"{_RECIPIENTS_KEY}: this server lacks the package pyrage; install planish[age] on it"
        )
    return importlib.import_module("pyrage")  # the package has no type hints


def snapshot_name(seq: int) -> str:
    """Return the name of the snapshot that is taken after request number `seq`."""
    return f"{PRIVATE_PREFIX}snapshot.{seq}"


def sampler_name(seq: int) -> str:
    """Return the name of the sampler checkpoint that request number `seq` published."""
    return f"{PRIVATE_PREFIX}sampler.{seq}"


def private_copy_path(model_id: str, seq: int, source: str) -> str:
    """Return the path of the private copy of the checkpoint `source`, which request number `seq`
    loads. The copy has the same kind as `source`.
    """
    return str(
        CheckpointPath(
            model_id, CheckpointPath.parse(source).checkpoint_type, f"{PRIVATE_PREFIX}loaded.{seq}"
        )
    )


def sampler_copy_path(sampler_id: str) -> str:
    """Return the path of the private copy of a sampler's checkpoint."""
    return str(CheckpointPath(sampler_id, "sampler", f"{PRIVATE_PREFIX}source"))


def is_private(path: str) -> bool:
    """Return whether the server made the checkpoint for itself."""
    return CheckpointPath.parse(path).name.startswith(PRIVATE_PREFIX)


def private_copy_seq(path: str) -> int | None:
    """Return the number of the load request that a private copy was made for. Return None if the
    checkpoint is not such a copy.
    """
    name = CheckpointPath.parse(path).name
    return int(name.rpartition(".")[2]) if name.startswith(f"{PRIVATE_PREFIX}loaded.") else None


def is_superseded(path: str, seq: int) -> bool:
    """Return whether a snapshot at request `seq` makes this private checkpoint unnecessary, so that
    the server can delete it.
    """
    copy_seq = private_copy_seq(path)
    return (
        copy_seq <= seq
        if copy_seq is not None
        else CheckpointPath.parse(path).name != snapshot_name(seq)
    )


def check_name_is_not_private(name: str) -> None:
    """Raise UserError for a name that is reserved for private checkpoints."""
    if name.startswith(PRIVATE_PREFIX):
        raise UserError(
            f"path={name[:200]!r}: names that begin with {PRIVATE_PREFIX!r} are reserved for the "
            "server; give another name"
        )


EXTERNAL_PREFIX = "external:"
_CLIENT_DIRECTORY, STORED_DIRECTORY = "/external_weights/", f"/sampler_weights/{EXTERNAL_PREFIX}"


def stored_path(path: str) -> str:
    """Return the stored path of a checkpoint for the path that clients use. Raise UserError for a
    name that is reserved for external weights.
    """
    stored = path.replace(_CLIENT_DIRECTORY, STORED_DIRECTORY, 1)
    parsed = CheckpointPath.parse(stored)
    if stored == path:
        check_name_is_not_external(parsed.name)
    return str(parsed)


def shown_path(path: str) -> str:
    """Return the path that clients use for a stored path."""
    return path.replace(STORED_DIRECTORY, _CLIENT_DIRECTORY, 1)


def is_external(path: str) -> bool:
    """Return whether a stored path belongs to external weights."""
    return STORED_DIRECTORY in path


def check_name_is_not_external(name: str) -> None:
    """Raise UserError for a name that is reserved for external weights."""
    if name.startswith(EXTERNAL_PREFIX):
        raise UserError(
            f"path={name[:200]!r}: names that begin with {EXTERNAL_PREFIX!r} are reserved for "
            "external weights; give another name"
        )
