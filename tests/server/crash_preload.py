"""What every crash server needs before it is forked: all modules, and the measured properties of
this machine's matmuls.

Only the fork server imports it (crash_server.py).
"""

import tempfile
from pathlib import Path

import crash_server  # noqa: F401
import torch

from planish.engine.base_models import BaseModels
from planish.engine.memory import DeviceMemory
from planish.engine.settings import EngineSettings
from planish.testing import tiny_model

torch.set_num_threads(1)
with tempfile.TemporaryDirectory(prefix="planish-crash-") as directory:
    settings = EngineSettings(deterministic=True, device="cpu")
    models = BaseModels(
        {"tiny": str(tiny_model(Path(directory) / "model"))}, settings, DeviceMemory(settings)
    )
    models.get("tiny")
