"""Creates the service behind a client: an engine in this process, an engine in a process of its own,
or a connection to a server.

The engine and the HTTP client (in remote_http) are imported at first use, so `import planish`
imports neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.client.remote import RemoteService
from planish.errors import UserError
from planish.service import Service

if TYPE_CHECKING:
    from planish.fleet.vllm.options import VllmSampler

URL_VARIABLE = "PLANISH_BASE_URL"
"""The environment variable with the default server URL. TINKER_BASE_URL is not read: even if it is
set for scripts of the tinker SDK, ServiceClient() without a URL starts an engine in this process.
"""


ENGINES = ("thread", "process")
"""Where an engine runs: in a thread of this process, or in a process of its own."""


def start_engine(
    models: Mapping[str, str] | None,
    data_dir: str | Path | None,
    settings: Mapping[str, Any],
    engine: str = "thread",
    replicas: int | None = None,
    ray: str | None = None,
    sampler: str | VllmSampler = "engine",
) -> Service:
    """Start an engine, or a fleet of engines if `replicas` or `ray` is given. `settings` are the
    fields of EngineSettings, and `engine` is one of ENGINES. `sampler`: see `checked_sampler`.
    """
    if engine != "thread" and (replicas is not None or ray is not None):
        raise UserError(
            f"engine={engine!r} is for one engine, but replicas and ray start several; leave out "
            "either"
        )
    if engine not in ENGINES:
        raise UserError(
            f"engine={engine!r}: give 'thread' for an engine in this process, or 'process' for one "
            "in a process of its own"
        )
    from planish.engine.engine import Engine
    from planish.engine.settings import EngineSettings

    if sampler != "engine":
        from planish.fleet.vllm.engine import VllmEngine
        from planish.fleet.vllm.options import checked_sampler

        vllm = checked_sampler(sampler, replicas, ray, engine)
        assert vllm is not None
        return VllmEngine(vllm, models, data_dir, EngineSettings(**settings))
    if replicas is not None or ray is not None:
        from planish.fleet.start import start_fleet

        return start_fleet(models, data_dir, settings, replicas, ray)
    if engine == "process":
        from planish.fleet.start import start_process

        return start_process(models, data_dir, settings)
    return Engine(models, data_dir, EngineSettings(**settings))


def connect(base_url: str, api_key: str | None, user_metadata: Mapping[str, str]) -> Service:
    """Begin a session with a server."""
    return RemoteService(base_url, api_key, user_metadata)


def models_used_together(base_url: str | None, *names: str | None) -> dict[str, str] | None:
    """Return the `models` option for a ServiceClient that uses all the named base models at once.
    With this option, an engine on a GPU divides the memory among them from the start, and replicas
    check that they fit before anything is loaded. Return None if a server is used, or without names.
    """
    distinct = {name for name in names if name is not None}
    if base_url or os.environ.get(URL_VARIABLE) or not distinct:
        return None
    return {name: name for name in distinct}


def resolve_server_url(
    base_url: str | None, api_key: str | None, engine_options: Mapping[str, Any]
) -> str | None:
    """Return the server URL: `base_url`, else that of the environment. None means an engine in this
    process.

    Raise UserError if there is a URL and also `engine_options` that only a local engine has, or an
    `api_key` without a URL.
    """
    source, url = (
        ("base_url", base_url)
        if base_url is not None
        else (URL_VARIABLE, os.environ.get(URL_VARIABLE))
    )
    engine_option_names = [
        name
        for name, value in engine_options.items()
        if value is not None and (value != "auto" or name == "ray")
    ]
    if url and engine_option_names:
        raise UserError(
            f"{source}={url!r} names a server, but {', '.join(engine_option_names)} configures an "
            "engine in this process; leave out either (`planish serve` has the options of the "
            "server's engine)"
        )
    if api_key is not None and not url:
        raise UserError("api_key is given without base_url; give both or neither")
    return url or None
