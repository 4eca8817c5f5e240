"""From the host to the device without waiting for it.

torch copies ordinary memory to a GPU only when all work before it is done, and comes back when the
copy is. A decode step that sends a dozen small tensors so has the GPU idle while each of its last
kernels is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.tensor(numbers, dtype=dtype, device=device)`."""
    return sent(torch.tensor(numbers, dtype=dtype), device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """`x.to(device)` for x of the host, which may be written to at once."""
    return staged(x, device).to(device, non_blocking=True)


def staged(x: Tensor, device: torch.device) -> Tensor:
    """x of the host, to be copied to the device with non_blocking=True: for a GPU a copy in pinned
    memory, which torch hands out again only when that is done.
    """
    return x.pin_memory() if device.type == "cuda" else x
