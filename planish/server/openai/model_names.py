"""The names under which requests find checkpoints, and the entries of GET /v1/models.

Besides its tinker:// path, a checkpoint has these names:

    an alias         a name that the operator gives it (`planish serve --model-alias NAME=PATH`)
    an adapter       the name with which the operator loaded it (lora_adapters.py)
    RUN/latest       the newest checkpoint of a training run, also as tinker://RUN/latest

Names only stand for paths. Whether a tenant may read the checkpoint is decided by its path.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from planish.errors import UserError
from planish.server.results import Tenant
from planish.server.server import Server
from planish.types import Checkpoint, CheckpointPath, is_name

_LATEST = re.compile(r"(?:tinker://)?([A-Za-z0-9_:.-]+)/latest")
_ALIAS = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


def check_aliases(aliases: Mapping[str, str], base_models: Mapping[str, str]) -> None:
    """Raise UserError if the values of --model-alias are invalid."""
    for alias, path in aliases.items():
        if not _ALIAS.fullmatch(alias) or alias in base_models or _LATEST.fullmatch(alias):
            raise UserError(
                f"--model-alias {alias}={path}: give a name of letters, digits and _ . - that is "
                "no base model and does not end with /latest"
            )
        if not _LATEST.fullmatch(path):
            try:
                CheckpointPath.parse(path)
            except ValueError as error:
                raise UserError(f"--model-alias {alias}={path}: {error}") from None


async def resolve_name(server: Server, name: str, aliases: Mapping[str, str]) -> str:
    """Return the path for which a name stands. Return the name itself if it is no alias, and if a
    run has no checkpoint.
    """
    if name in aliases:
        name = aliases[name]
    elif is_name(name):
        name = (await adapter_paths(server)).get(name, name)
    latest = _LATEST.fullmatch(name)
    if latest is None:
        return name
    newest = (await server.checkpoints.newest_by_type(latest[1])).values()
    paths = [checkpoint.tinker_path for checkpoint in sorted(newest, key=lambda one: one.time)]
    return paths[-1] if paths else name


async def adapter_paths(server: Server) -> dict[str, str]:
    """Return the checkpoints of the adapters that the operator has loaded, by name."""
    query = "SELECT alias, path FROM checkpoints WHERE alias IS NOT NULL"
    return await server.store.read(lambda db: dict(db.execute(query).fetchall()))


class ModelList:
    """The entries of GET /v1/models, with the fields of OpenAI and vLLM."""

    def __init__(
        self, server: Server, directories: Mapping[str, Path], aliases: Mapping[str, str]
    ) -> None:
        """`directories` maps the served base models to their directories."""
        self._server = server
        self._created = {
            name: int((directory / "config.json").stat().st_mtime)
            for name, directory in directories.items()
            if (directory / "config.json").is_file()
        }
        self._aliases = aliases

    async def entries(self, tenant: Tenant) -> list[dict[str, Any]]:
        """Return the base models, the tenant's checkpoints, and the aliases that it may use."""
        checkpoints = (await self._server.runs.list_checkpoints(tenant)).items
        base_models = await self._server.runs.base_models(tenant)
        entries = [self.base_model(name) for name in self._server.engine.base_models]
        for checkpoint in checkpoints:
            run = CheckpointPath.parse(checkpoint.tinker_path).run_id
            entries.append(self._checkpoint(checkpoint, base_models.get(run)))
        return [*entries, *[entry async for entry in self._alias_entries(tenant)]]

    async def _alias_entries(self, tenant: Tenant) -> AsyncIterator[dict[str, Any]]:
        for alias in {**self._aliases, **await adapter_paths(self._server)}:
            path = await resolve_name(self._server, alias, self._aliases)
            try:
                info = await self._server.checkpoints.info(tenant, path)
            except ValueError:  # it does not exist, or belongs to another tenant
                continue
            yield {**self._checkpoint(info.checkpoint, info.base_model), "id": alias}

    def base_model(self, name: str) -> dict[str, Any]:
        """Return the entry of a base model."""
        return self._entry(name, name, None, self._created.get(name, 0))

    def checkpoint(self, name: str, path: str, base_model: str, created: float) -> dict[str, Any]:
        """Return the entry of a checkpoint that a client knows as `name`."""
        return {**self._entry(path, base_model, base_model, int(created)), "id": name}

    def _checkpoint(self, checkpoint: Checkpoint, base_model: str | None) -> dict[str, Any]:
        path, created = checkpoint.tinker_path, int(checkpoint.time.timestamp())
        return self._entry(path, base_model, base_model, created)

    def _entry(
        self, root: str, base_model: str | None, parent: str | None, created: int
    ) -> dict[str, Any]:
        return {
            "id": root,
            "object": "model",
            "created": created,
            "owned_by": "planish",
            "root": root,
            "parent": parent,
            "max_model_len": self._max_context(base_model),
        }

    def _max_context(self, base_model: str | None) -> int | None:
        return next(
            (
                model.max_context_length
                for model in self._server.engine.capabilities().supported_models
                if model.model_name == base_model
            ),
            None,
        )
