"""Questions about a device, and what has to be done on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """A CPU or a GPU of this machine."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU, with memory of its own."""
        return self.device.type != "cpu"
