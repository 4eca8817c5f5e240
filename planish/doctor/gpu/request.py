"""What the process of a part of the GPU report is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from planish.doctor.gpu.cards import Card
from planish.engine.settings import choose_device
from planish.files import cache_home
from planish.model.device import Device


def models_home() -> Path:
    """Return the directory of the random models of the report."""
    return cache_home() / "random-models"


@dataclass(frozen=True)
class Request:
    """What the process does."""

    part: str
    """"machine", "limits", "self-test" or "model"."""
    device: str
    parent: int
    """The process that reads the results. This one ends with it."""
    model: str = ""
    """A name in SHAPES; empty for a part without a model."""
    scheme: str | None = None
    """The quantization of the base weights, or None."""
    small: bool = False
    """Whether the work is tiny, for tests."""
    limits: tuple[float, float] | None = None
    """The measured bandwidth and matmul rate; None: no time is expected."""

    @property
    def torch_device(self) -> torch.device:
        """The device of the measurements."""
        return choose_device(self.device)

    def card(self) -> Card | None:
        """Return this GPU with its measured speeds, or None if they are not known."""
        if self.limits is None:
            return None
        device, (bandwidth, rate) = self.torch_device, self.limits
        if not Device(device).is_gpu:
            return Card("CPU", 1 << 34, bandwidth, rate, (8, 0))
        found = torch.cuda.get_device_properties(device)
        return Card(found.name, found.total_memory, bandwidth, rate, (found.major, found.minor))
