"""Device helpers: detect a GPU, select it, synchronize it, and set the precision of matmuls."""

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
