import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from planish.engine.engine_thread import EngineThread
from planish.server.http import access
from planish.testing import tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data_dir(tmp_path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def kept_logging() -> Iterator[None]:
    """Restore the loggers and the switch interval, which `serve` sets for the whole process."""
    kept = [logging.getLogger(name) for name in ("", "planish", *access._LIBRARY_LOGGERS)]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in kept]
    interval = sys.getswitchinterval()
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.captureWarnings(False)
    sys.setswitchinterval(interval)


@pytest.fixture
def slow_engine(monkeypatch) -> None:
    """Let a sample of 1,500 tokens take seconds on a machine of any speed."""
    run_turn = EngineThread._run_turn
    monkeypatch.setattr(
        EngineThread, "_run_turn", lambda engine: (time.sleep(0.005), run_turn(engine))
    )
