"""Copies from host memory to the device that do not wait for the device.

A copy from pageable memory to a GPU starts only after all queued work, and the caller waits until
the copy is done. A decoding step that copies a dozen small tensors this way would leave the GPU
idle while the next kernels are launched. A copy from pinned memory is asynchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planish.model.kernels.device import Device


def on_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `torch.tensor(numbers, dtype=dtype, device=device)`, copied asynchronously."""
    return copy_async(torch.tensor(numbers, dtype=dtype), device)


def copy_async(x: Tensor, device: torch.device) -> Tensor:
    """Return `x.to(device)` for a host tensor `x`, without waiting for the copy.

    For a GPU the caller may overwrite `x` at once. For a CPU the result is `x` itself.
    """
    return pinned(x, device).to(device, non_blocking=True)


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor with the contents of `x`, ready to be copied with non_blocking=True.

    For a GPU this is a copy of `x` in pinned memory. torch reuses this memory only after the
    asynchronous copy is done. For a CPU this is `x` itself.
    """
    return x.pin_memory() if Device(device).is_gpu else x
