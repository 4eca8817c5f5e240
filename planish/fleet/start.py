"""Starts engines outside of the caller's process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish.engine.checkpoints.store import data_directory
from planish.engine.settings import EngineSettings
from planish.fleet.fleet import Fleet
from planish.fleet.link import EngineOptions
from planish.fleet.plan import check_replicas, plan_fleet
from planish.fleet.process import ProcessLink
from planish.fleet.remote_engine import RemoteEngine
from planish.model.sources.resolve import checked_mapping


def start_process(
    models: Mapping[str, str] | None, data_dir: str | Path | None, settings: Mapping[str, Any]
) -> RemoteEngine:
    """Start an engine in a process of its own. `settings` are the fields of EngineSettings."""
    return RemoteEngine(ProcessLink(checked_options(models, data_dir, settings)))


def start_fleet(
    models: Mapping[str, str] | None,
    data_dir: str | Path | None,
    settings: Mapping[str, Any],
    replicas: int | None,
    ray: str | None,
) -> Fleet:
    """Start a fleet on Ray. Raise UserError before any replica starts, if an option is invalid.
    See `plan_fleet`.
    """
    device = settings.get("device", "auto")
    check_replicas(device, replicas, settings.get("tensor_parallel"))
    return plan_fleet(device, replicas, ray).start(checked_options(models, data_dir, settings))


def checked_options(
    models: Mapping[str, str] | None, data_dir: str | Path | None, settings: Mapping[str, Any]
) -> EngineOptions:
    """Return the options of an engine. Raise UserError before any process starts, if an option is
    invalid.
    """
    EngineSettings(**settings)
    return EngineOptions(checked_mapping(models) or None, str(data_directory(data_dir)), settings)
