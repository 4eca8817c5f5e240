"""What the Triton kernels share. Only what runs on a GPU imports this: Triton comes with torch for
CUDA and is absent elsewhere.

TRITON_INTERPRET=1, set before the first import, makes Triton compute on a CPU with numpy: so the
kernels' logic is tested on machines without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


HOPPER_SHARED = 227 << 10
"""Bytes of shared memory that a program may have on an H100 or H200, for which block sizes are
chosen first.
"""
SHARED_MARGIN = 2 << 10
"""Bytes of shared memory left free: compilers add a little, and not the same in each version."""


def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may have on this device."""
    if device.type != "cuda":
        return HOPPER_SHARED  # interpreted, where there is no limit
    active: Any = driver.active  # its type lacks what GPU drivers have
    return int(active.utils.get_device_properties(device.index)["max_shared_mem"])


@triton.jit
def dot(a, b):
    """The product of two tiles, added up in float32; float32 operands are not shortened to TF32."""
    if INTERPRETED:  # whose products of bf16 are those of its bits (Triton 3.6)
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A float32, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # whose own conversion cuts bits off (Triton 3.6)
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + (0x7FFF + ((bits >> 16) & 1))
        up = tl.where(x == x, up, bits | 0x400000)
        return (up >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def bound(number):
    """A number of the device, for `range`."""
    if INTERPRETED:
        # where it is an array of one entry, which numpy 2.4 takes for no number (Triton 3.6)
        return number.handle.data.item()
    return number
