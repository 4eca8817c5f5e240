"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: the server's operator loads
adapters from a directory of the server's machine while the server runs.

The routes exist with `planish serve --adapter-dir DIR`, and read adapters below DIR only. If the
server has keys, they need a key with the name `operator`. A loaded adapter is a checkpoint of the
operator, checked like any other, and counted in the operator's quotas. It is published, and its row
in the database has its name, so every tenant can use it under this name, also after a restart.
Unloading an adapter deletes the checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from planish.engine.checkpoints.files import ADAPTER_CONFIG_FILE
from planish.server.http.budgets import MAX_SMALL_BODY
from planish.server.http.compatible_routes import authenticated
from planish.server.http.context import RequestContext
from planish.server.http.openai_errors import (
    OPENAI_API,
    ModelNotFoundError,
    WrongParameterError,
)
from planish.server.openai.adapter_requests import (
    LOAD_PATH,
    UNLOAD_PATH,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from planish.server.openai.model_names import adapter_paths
from planish.server.openai.requests import R, read_request
from planish.server.results import NotFound, TooManyRequests
from planish.server.server import Server
from planish.server.uploads import ImportOptions, Uploads

MAX_REQUESTS = 4
"""The maximum number of unanswered requests to load or unload an adapter. One is handled at a
time.
"""
_BUSY_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass
class LoraAdapters:
    """The routes with which the operator loads and unloads adapters."""

    server: Server
    uploads: Uploads
    directory: Path
    """The directory below which the adapters are."""
    aliases: Mapping[str, str]
    """The names that `--model-alias` gives to checkpoints."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _num_requests: int = 0
    """The number of unanswered requests."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(LOAD_PATH, authenticated(OPENAI_API, self._load), methods=["POST"]),
            Route(UNLOAD_PATH, authenticated(OPENAI_API, self._unload), methods=["POST"]),
        ]

    async def _load(self, context: RequestContext) -> Response:
        options, server = await self._read(context, LoadAdapterRequest), context.open_server
        name = options.lora_name
        with self._counted():
            async with self._lock:
                replaced = (await adapter_paths(server)).get(name)
                is_taken = name in self.aliases or name in server.engine.base_models
                if is_taken or (replaced is not None and not options.load_inplace):
                    raise WrongParameterError(
                        "lora_name",
                        f"lora_name={name!r} is already loaded, or the name of another model; "
                        "unload it, give load_inplace=true, or give another name",
                    )
                directory = await asyncio.to_thread(self._adapter_directory, options.lora_path)
                base_model = options.base_model_name or await asyncio.to_thread(
                    self._base_model_of, directory
                )
                server.engine.check_base_model(base_model)
                await self.uploads.import_directory(
                    context.tenant,
                    directory,
                    ImportOptions(base_model, name, "sampler", source=name, alias=name),
                )
                # A crash before this deletion leaves the replaced checkpoint in the operator's
                # list of checkpoints, without the name.
                if replaced is not None:
                    await server.checkpoints.delete(context.tenant, replaced)
        _log.info("loaded the adapter %s from %s", name, directory)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, context: RequestContext) -> Response:
        options, server = await self._read(context, UnloadAdapterRequest), context.open_server
        name = options.lora_name
        with self._counted():
            async with self._lock:
                path = (await adapter_paths(server)).get(name)
                if path is None:
                    raise ModelNotFoundError(f"the adapter {name!r} is not loaded")
                await server.checkpoints.delete(context.tenant, path)
        _log.info("unloaded the adapter %s", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _read(self, context: RequestContext, request_type: type[R]) -> R:
        context.check_operator("adapters are loaded")
        async with context.read_body(
            MAX_SMALL_BODY, lambda fields: read_request(request_type, fields)
        ) as options:
            return options

    @contextmanager
    def _counted(self) -> Generator[None]:
        """Count a request until the block ends. Raise TooManyRequests if there are too many."""
        if self._num_requests >= MAX_REQUESTS:
            raise TooManyRequests(
                f"{MAX_REQUESTS} requests to load or unload adapters are unanswered, which is the "
                "limit; wait until some are answered",
                _BUSY_SECONDS,
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def _adapter_directory(self, path: str) -> Path:
        """Return the directory of an adapter. Raise NotFound if it is not below `directory`."""
        reason = ""
        try:
            directory, root = (self.directory / path).resolve(), self.directory.resolve()
            if root in directory.parents and (directory / ADAPTER_CONFIG_FILE).is_file():
                return directory
        except (OSError, RuntimeError, ValueError) as error:  # too long, unreadable, a loop, NUL
            reason = f" ({getattr(error, 'strerror', None) or error})"
        raise NotFound(
            f"lora_path={path[:200]!r}: there is no adapter of this name below --adapter-dir{reason}"
        )

    def _base_model_of(self, directory: Path) -> str:
        """Return the base model that an adapter names. Raise WrongParameterError if it is not
        served.
        """
        try:
            config = json.loads((directory / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
            name = str(config.get("base_model_name_or_path"))
        except (OSError, ValueError, AttributeError) as error:
            raise WrongParameterError(
                "lora_path", f"{ADAPTER_CONFIG_FILE} is damaged ({error}); get the adapter again"
            ) from None
        if name not in self.server.engine.base_models:
            raise WrongParameterError(
                "base_model_name",
                f"the adapter names the base model {name[:200]!r}, which is not served; give "
                f"base_model_name, one of {', '.join(self.server.engine.base_models)}",
            )
        return name
