"""The one place where a client reaches for the engine, which is imported at its first use: `import planish` loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish.service import Service


def start_engine(models: Mapping[str, str] | None, data_dir: str | Path | None, settings: Mapping[str, Any]) -> Service:
    """An engine in this process; `settings` are the fields of EngineSettings."""
    from planish.engine.engine import Engine
    from planish.engine.settings import EngineSettings

    return Engine(models, data_dir, EngineSettings(**settings))
