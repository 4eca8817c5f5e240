"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: the server's operator loads
adapters from a directory of the server's machine while the server runs.

The routes exist with `planish serve --adapter-dir DIR`, and read adapters below DIR only. If the
server has keys, they need a key with the name `operator`. A loaded adapter is a checkpoint of the
operator, checked like any other. It is published, so every tenant can use it under its name. After
a restart, the operator loads it again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from planish.engine.checkpoints.files import ADAPTER_CONFIG_FILE
from planish.server.http.context import RequestContext
from planish.server.http.openai_errors import ModelNotFoundError, WrongParameterError
from planish.server.openai.routes import authenticated
from planish.server.results import NotFound, Unauthorized
from planish.server.server import Server
from planish.server.uploads import ImportOptions, Uploads
from planish.types import is_name

OPERATOR_KEY_NAME = "operator"
"""The name of the key with which adapters are loaded and unloaded."""

_log = logging.getLogger(__name__)


@dataclass
class LoraAdapters:
    """The adapters that the operator has loaded."""

    server: Server
    uploads: Uploads
    directory: Path
    """The directory below which the adapters are."""
    aliases: MutableMapping[str, str]
    """The names of checkpoints for OpenAI clients."""
    _paths: dict[str, str] = field(default_factory=dict)
    """The checkpoint of each loaded adapter, by name."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/load_lora_adapter", authenticated(self._load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", authenticated(self._unload), methods=["POST"]),
        ]

    async def _load(self, context: RequestContext) -> Response:
        _check_operator(context)
        async with context.fields() as fields:
            with fields:
                name, path = fields.text("lora_name"), fields.text("lora_path")
                replaces = fields.optional(fields.boolean, "load_inplace", False)
                base_model = fields.optional(fields.text, "base_model_name")
        if not is_name(name):
            raise WrongParameterError(
                "lora_name", f"lora_name={name[:100]!r}: give up to 200 letters, digits and _ . -"
            )
        async with self._lock:
            is_loaded = name in self._paths
            is_taken = name in self.aliases or name in self.server.base_models
            if (is_taken and not is_loaded) or (is_loaded and not replaces):
                raise WrongParameterError(
                    "lora_name",
                    f"lora_name={name!r} is already loaded, or the name of another model; unload "
                    "it, give load_inplace=true, or give another name",
                )
            directory = await asyncio.to_thread(self._adapter_directory, path)
            options = ImportOptions(
                base_model or await asyncio.to_thread(self._base_model_of, directory),
                name,
                "sampler",
                source=name,
            )
            self.server.check_base_model(options.base_model)
            imported = await self.uploads.import_directory(context.tenant, directory, options)
            checkpoint = str(imported.path)
            await self.server.checkpoints.set_public(context.tenant, checkpoint, True)
            replaced = self._paths.get(name)
            self._paths[name] = self.aliases[name] = checkpoint
            if replaced is not None:
                await self.server.checkpoints.delete(context.tenant, replaced)
        _log.info("loaded the adapter %s from %s", name, directory)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, context: RequestContext) -> Response:
        _check_operator(context)
        async with context.fields() as fields:
            with fields:
                name = fields.text("lora_name")
                fields.skip("lora_int_id")  # vLLM takes a number too, and does not need it
        async with self._lock:
            checkpoint = self._paths.pop(name, None)
            if checkpoint is None:
                raise ModelNotFoundError(f"the adapter {name[:200]!r} is not loaded")
            del self.aliases[name]
            await self.server.checkpoints.delete(context.tenant, checkpoint)
        _log.info("unloaded the adapter %s", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _adapter_directory(self, path: str) -> Path:
        """Return the directory of an adapter. Raise NotFound if it is not below `directory`."""
        directory, root = (self.directory / path).resolve(), self.directory.resolve()
        if root not in directory.parents or not (directory / ADAPTER_CONFIG_FILE).is_file():
            raise NotFound(
                f"lora_path={path[:200]!r}: there is no adapter of this name below --adapter-dir"
            )
        return directory

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
        if name not in self.server.base_models:
            raise WrongParameterError(
                "base_model_name",
                f"the adapter names the base model {name[:200]!r}, which is not served; give "
                f"base_model_name, one of {', '.join(self.server.base_models)}",
            )
        return name


def _check_operator(context: RequestContext) -> None:
    """Raise Unauthorized unless the server's operator has sent the request."""
    has_keys = context.state.settings.tenants_by_key is not None
    if has_keys and context.tenant.name != OPERATOR_KEY_NAME:
        raise Unauthorized(
            "adapters are loaded by the server's operator: this needs a key with the name "
            f"{OPERATOR_KEY_NAME} in the key file"
        )
