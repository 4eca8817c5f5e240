"""Memory and peak speeds of NVIDIA GPUs, as NVIDIA publishes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    """A kind of GPU."""

    name: str
    memory_bytes: int
    """The memory that CUDA reports, which is a little less than the nominal size."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    matmul_rate: float
    """FLOP/s of dense matmuls in `dtype` with float32 sums."""
    capability: tuple[int, int]
    """The compute capability."""

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of an engine on this GPU."""
        return torch.bfloat16 if self.capability >= (8, 0) else torch.float32


def _card(
    name: str, gib: float, gb_per_second: float, tflops: float, capability: tuple[int, int]
) -> Card:
    return Card(name, int(gib * (1 << 30)), 1e9 * gb_per_second, 1e12 * tflops, capability)


CARDS = {
    "t4": _card("Tesla T4", 14.6, 320, 8.1, (7, 5)),
    "a10": _card("NVIDIA A10", 22.0, 600, 125, (8, 6)),
    "a100": _card("NVIDIA A100 80 GB", 79.2, 2039, 312, (8, 0)),
    "a100-40gb": _card("NVIDIA A100 40 GB", 39.4, 1555, 312, (8, 0)),
    "l4": _card("NVIDIA L4", 22.0, 300, 121, (8, 9)),
    "l40s": _card("NVIDIA L40S", 44.5, 864, 362, (8, 9)),
    "rtx3090": _card("GeForce RTX 3090", 23.6, 936, 71, (8, 6)),
    "rtx4090": _card("GeForce RTX 4090", 23.5, 1008, 165, (8, 9)),
    "rtx5090": _card("GeForce RTX 5090", 31.4, 1792, 209, (12, 0)),
    "h100": _card("NVIDIA H100 SXM", 79.2, 3350, 989, (9, 0)),
    "h200": _card("NVIDIA H200", 139.8, 4800, 989, (9, 0)),
    "b200": _card("NVIDIA B200", 178.0, 8000, 2250, (10, 0)),
}
"""GPUs by the name that `--gpu` takes. The rate is that of bf16; the T4 computes in float32."""
