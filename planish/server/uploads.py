"""Uploads of adapters, which become checkpoints of a running server.

A client starts an upload, sends its files, and finishes it. The server then imports the adapter as
`planish checkpoints import` does, with the same checks, and records the checkpoint as the tenant's
own, in a run without a model (stored_runs.py). Uploads are kept in memory and in the directory
`.uploads`. A restart forgets them, and so does the time UPLOAD_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from planish.engine.checkpoints.files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, MANIFEST_FILE
from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import UserError
from planish.server.results import BadRequest, NotFound, SessionSpec, Tenant, TooManyRequests
from planish.server.server import Server
from planish.server.sessions import new_session_id
from planish.types import CheckpointPath, CheckpointType, LoraConfig
from planish.wire.models import IdParts

UPLOAD_SECONDS = 3600.0
"""How long an upload may take, in seconds."""
MAX_TENANT_UPLOADS = 4
"""The maximum number of unfinished uploads of one tenant."""
EXPORT_MARKER_FILE = "planish_export.json"
REQUIRED_FILES = (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
OPTIONAL_FILES = (MANIFEST_FILE, EXPORT_MARKER_FILE)
"""Files of planish, which name the quantization of the base model."""
MAX_JSON_BYTES = 4 << 20
"""Limit for the size of each file without weights."""
LARGEST_LORA = LoraConfig(rank=256, train_unembed=True)
"""The file with the weights may be as large as this adapter is in memory."""

_log = logging.getLogger(__name__)


class ImportedAdapter(Protocol):
    """The result of an import (planish/export/importing.py)."""

    @property
    def path(self) -> CheckpointPath:
        """The path of the checkpoint."""
        ...

    @property
    def base_model(self) -> str:
        """The base model's name."""
        ...

    @property
    def lora(self) -> LoraConfig:
        """The configuration of the adapter."""
        ...

    @property
    def quantize(self) -> str | None:
        """The quantization scheme of the base weights, or None."""
        ...

    @property
    def num_linears(self) -> int:
        """The number of linear layers that the adapter changes."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user."""
        ...


ImportAdapter = Callable[..., ImportedAdapter]
"""`planish.export.importing.import_adapter`. That module is in a higher layer, so whoever starts
the server passes the function.
"""


@dataclass(frozen=True)
class ImportOptions:
    """What a client says about an adapter."""

    base_model: str
    name: str
    checkpoint_type: CheckpointType = "training"
    quantize: str | None = None
    source: str = "upload"
    """The name under which the client knows the adapter, for the checkpoint's metadata."""
    lora: LoraConfig | None = None
    """The configuration that the adapter must have; None: any."""
    alias: str | None = None
    """The name under which all tenants may use the checkpoint; None: only its own tenant may."""
    files: tuple[str, ...] = REQUIRED_FILES


@dataclass(eq=False)
class Upload:
    """One upload."""

    tenant: Tenant
    options: ImportOptions
    directory: Path
    max_bytes: int
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """A part of the URLs to which files are sent without a key."""
    started: float = field(default_factory=time.monotonic)
    result: ImportedAdapter | None = None
    """The result of the import; None before it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Uploads:
    """The uploads of a server."""

    def __init__(
        self, server: Server, directories: Mapping[str, Path], import_adapter: ImportAdapter
    ) -> None:
        """`directories` maps the served base models to their directories."""
        self._server = server
        self._models = {name: str(path) for name, path in directories.items()}
        self._import_adapter = import_adapter
        self._directory = server.store.directory / ".uploads"
        shutil.rmtree(self._directory, ignore_errors=True)
        self._uploads: dict[str, Upload] = {}
        self._import_lock = asyncio.Lock()
        """One adapter is imported at a time, because an import needs memory for its optimizer."""

    async def start(self, tenant: Tenant, options: ImportOptions) -> Upload:
        """Begin an upload. Raise UserError if its options are invalid, BadRequest if the tenant has
        used up its storage quota, and TooManyRequests if it has too many uploads.
        """
        server = self._server
        server.engine.check_open()
        server.engine.check_base_model(options.base_model)
        CheckpointPath("run", options.checkpoint_type, options.name)
        unknown = set(options.files) - {*REQUIRED_FILES, *OPTIONAL_FILES}
        if unknown or not set(REQUIRED_FILES) <= set(options.files):
            raise UserError(
                f"files: give {' and '.join(REQUIRED_FILES)}, and no others but "
                f"{', '.join(OPTIONAL_FILES)}"
            )
        await server.checkpoints.check_quota(tenant)
        server.intake.check_capacity(tenant.name, 0)
        await self._remove_expired()
        unfinished = [
            one for one in self._uploads.values() if one.tenant == tenant and one.result is None
        ]
        if len(unfinished) >= MAX_TENANT_UPLOADS:
            raise TooManyRequests(
                f"this tenant has {MAX_TENANT_UPLOADS} unfinished uploads; finish one, or wait "
                "until it expires",
                60.0,
            )
        size = await server.engine.adapter_bytes(options.base_model, LARGEST_LORA)
        upload = Upload(tenant, options, self._directory, size.training)
        upload.directory = self._directory / upload.id
        await asyncio.to_thread(upload.directory.mkdir, 0o700, True)
        self._uploads[upload.id] = upload
        return upload

    async def write(
        self, upload_id: str, secret: str, name: str, size: int, pieces: AsyncIterator[bytes]
    ) -> None:
        """Write a file of `size` bytes. Raise NotFound for an unknown upload or secret, and
        UserError if the file is too large, or if `pieces` have another size.
        """
        upload = self._uploads.get(upload_id)
        is_known = upload is not None and secrets.compare_digest(upload.secret, secret)
        if upload is None or not is_known or upload.result is not None:
            raise NotFound("there is no such upload, or it has expired; start another one")
        if name not in upload.options.files:
            raise NotFound(f"the upload has no file {name[:100]!r}")
        limit = upload.max_bytes if name == ADAPTER_FILE else MAX_JSON_BYTES
        if size > limit:
            raise UserError(f"{name} has {size:,} bytes, and the limit is {limit:,}")
        self._server.intake.check_capacity(upload.tenant.name, size)
        async with upload.lock:
            partial = upload.directory / f".{name}"
            written = 0
            with open(partial, "wb") as file:
                async for piece in pieces:
                    written += len(piece)
                    if written > size:
                        break
                    await asyncio.to_thread(file.write, piece)
            if written != size:
                raise UserError(f"{name}: the body does not have the {size:,} bytes of its header")
            partial.replace(upload.directory / name)

    async def finish(self, tenant: Tenant, upload_id: str) -> ImportedAdapter:
        """Import the adapter, and return the checkpoint. A repeated call returns the same result.
        Raise UserError if a file is missing, or if the adapter does not fit the base model. The
        upload then ends in the second case.
        """
        upload = self._uploads.get(upload_id)
        if upload is None or upload.tenant != tenant:
            raise NotFound(
                f"upload_id={upload_id[:100]!r}: there is no such upload, or it has expired; start "
                "another one"
            )
        async with upload.lock:
            if upload.result is None:
                missing = [
                    name for name in upload.options.files if not (upload.directory / name).exists()
                ]
                if missing:
                    raise UserError(f"{missing[0]} was not uploaded; send it before you finish")
                try:
                    upload.result = await self.import_directory(
                        tenant, upload.directory, upload.options
                    )
                except UserError:  # the adapter is wrong, so another try would fail too
                    await self._remove(upload)
                    raise
                await asyncio.to_thread(shutil.rmtree, upload.directory, ignore_errors=True)
            return upload.result

    async def import_directory(
        self, tenant: Tenant, directory: Path, options: ImportOptions
    ) -> ImportedAdapter:
        """Import the adapter in a directory as a checkpoint of the tenant."""
        server, store = self._server, CheckpointStore(self._server.store.directory)
        run_id = IdParts(new_session_id(tenant, None), 0).model_id

        def import_adapter() -> ImportedAdapter:
            return self._import_adapter(
                directory,
                store,
                base_model=options.base_model,
                quantize=options.quantize,
                models=self._models,
                run_id=run_id,
                name=options.name,
                checkpoint_type=options.checkpoint_type,
                source=options.source,
            )

        async with self._import_lock:
            server.engine.check_open()
            await server.checkpoints.check_quota(tenant)
            server.intake.check_capacity(tenant.name, 0)
            imported = await server.engine.threads.run(import_adapter)
        path = str(imported.path)
        try:
            if options.lora is not None:
                _check_lora(imported.lora, options.lora)
            reason = "it holds an imported adapter"
            await server.stored_runs.record(
                tenant, path, reason, SessionSpec(["import"]), options.alias
            )
        except BaseException:
            await server.engine.checkpoints.delete(path)
            raise
        _log.info("imported %s for %s", path, tenant.name)
        return imported

    async def _remove_expired(self) -> None:
        oldest = time.monotonic() - UPLOAD_SECONDS
        for upload in [one for one in self._uploads.values() if one.started < oldest]:
            if not upload.lock.locked():
                await self._remove(upload)

    async def _remove(self, upload: Upload) -> None:
        self._uploads.pop(upload.id, None)
        await asyncio.to_thread(shutil.rmtree, upload.directory, ignore_errors=True)


def _check_lora(found: LoraConfig, expected: LoraConfig) -> None:
    names = ("rank", "train_attn", "train_mlp", "train_unembed")
    for name in names:
        if getattr(found, name) != getattr(expected, name):
            raise BadRequest(
                f"lora_config: {name}={getattr(expected, name)}, but the uploaded adapter has "
                f"{getattr(found, name)}; give the configuration of the adapter"
            )


def result_to_json(imported: ImportedAdapter) -> dict[str, Any]:
    """Return the JSON of an import's result."""
    return {
        "path": str(imported.path),
        "base_model": imported.base_model,
        "quantize": imported.quantize,
        "rank": imported.lora.rank,
        "linears": imported.num_linears,
        "notes": list(imported.notes),
    }
