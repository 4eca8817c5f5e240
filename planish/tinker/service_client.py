"""The SDK's ServiceClient. All clients with equal options share one engine of the process."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Mapping
from typing import Any

import orjson

from planish.client.local import resolve_server_url, start_engine
from planish.client.service_client import ServiceClient as PlanishServiceClient
from planish.errors import UnsupportedError
from planish.service import Service

OPTIONS_VARIABLE = "PLANISH_RUN_OPTIONS"
"""Environment variable with the options of `planish run`, as a JSON object. They are arguments of
every ServiceClient in the script and in processes that the script starts.
"""

_ENGINE_OPTIONS = set(inspect.signature(PlanishServiceClient).parameters) - {
    "user_metadata",
    "project_id",
    "base_url",
    "api_key",
    "service",
}
_shared_engines: dict[str, Service] = {}
_lock = threading.Lock()


def run_options() -> dict[str, Any]:
    """Return the options that `planish run` was given, as arguments of ServiceClient."""
    return orjson.loads(os.environ.get(OPTIONS_VARIABLE) or "{}")


class ServiceClient(PlanishServiceClient):
    """A session on the engine of this process, or on a server of planish (`base_url`).

    The first ServiceClient starts the engine. Later clients with equal options share it. The engine
    runs until the process ends, so `close` does not stop it.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`display_name` goes into the metadata of every checkpoint. `options` are those of
        `planish.ServiceClient`, such as models={NAME: PATH} or dtype="float32".
        """
        if default_headers_overrides:
            raise UnsupportedError(
                "default_headers_overrides: planish sends no custom headers; leave it out"
            )
        metadata = user_metadata
        if display_name is not None and not isinstance(user_metadata, str):
            metadata = {**(user_metadata or {}), "display_name": display_name}
        given = {name: value for name, value in options.items() if value is not None}
        all_options = {**run_options(), **given}
        unknown = sorted({*options, *all_options} - _ENGINE_OPTIONS - {"base_url", "api_key"})
        if unknown:
            raise TypeError(f"ServiceClient got an unexpected keyword argument {unknown[0]!r}")
        base_url = base_url or all_options.pop("base_url", None)
        api_key = api_key or all_options.pop("api_key", None)
        # An API key alone does not select a server: a script that gives one still gets an engine.
        url = resolve_server_url(base_url, None, all_options)
        if url:
            super().__init__(metadata, project_id, base_url=url, api_key=api_key)
        else:
            super().__init__(metadata, project_id, service=_shared_engine(all_options))


def _shared_engine(options: Mapping[str, Any]) -> Service:
    key = repr(sorted((name, repr(value)) for name, value in options.items()))
    with _lock:
        if key not in _shared_engines:
            names = inspect.signature(start_engine).parameters
            arguments = {k: v for k, v in options.items() if k in names}
            settings = {k: v for k, v in options.items() if k not in names}
            _shared_engines[key] = start_engine(
                **{"models": None, "data_dir": None, **arguments}, settings=settings
            )
        return _shared_engines[key]
