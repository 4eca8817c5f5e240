"""Device helpers: detect, select and synchronize a GPU, set the precision of matmuls, and copy to
and from a device without waiting.

A copy from pageable memory to a GPU starts only after all queued work, and the caller waits until
the copy is done. A decoding step that copies a dozen small tensors this way would leave the GPU
idle while the next kernels are launched. A copy from pinned memory is asynchronous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Device:
    """A CPU or a GPU of this machine."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU, with memory of its own."""
        return self.device.type != "cpu"

    def make_current(self) -> None:
        """Make a GPU the current GPU of the calling thread.

        Triton launches kernels on the thread's current GPU, even if the tensors are on another.
        """
        if self.is_gpu:
            torch.cuda.set_device(self.device)

    def synchronize(self, *, all_streams: bool = False) -> None:
        """Wait until the device has finished the work on this thread's current stream.

        `all_streams`: wait for the work on all streams instead.
        """
        if self.is_gpu and all_streams:
            torch.cuda.synchronize(self.device)
        elif self.is_gpu:
            torch.cuda.current_stream(self.device).synchronize()

    def is_lost(self) -> bool:
        """Return whether the device is unusable, as a GPU is after an illegal memory access.

        The call waits for all streams. A failed CUDA graph capture can leave work on its own
        stream, and that work may use memory that has been freed.
        """
        try:
            self.synchronize(all_streams=True)
        except RuntimeError:
            return True
        return False


def accumulate_in_float32() -> None:
    """Make bf16 matmuls accumulate in float32, and disable TF32 for float32 matmuls.

    torch has only process-wide switches for this. By default cuBLAS may add the parts of a long sum
    in bf16, and the number of parts depends on the shape. Sampler and trainer would then differ by
    more than their rounding. Some GPU containers enable TF32 for float32 matmuls.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")


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


class HostCopies:
    """Copies of device tensors in host memory. Of a GPU they are asynchronous."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Begin to copy tensors of `device`, after the work on this thread's current stream."""
        # torch puts the result of such a copy from a GPU into pinned memory.
        self._copies = {name: x.to("cpu", non_blocking=True) for name, x in tensors.items()}
        self._event = torch.cuda.Event() if Device(device).is_gpu else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> Mapping[str, Tensor]:
        """Wait for the copies, but not for later work of the device, and return them by name."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies
