"""Helpers that the Triton kernels share.

Import this module only if Triton is installed. Triton comes with torch for CUDA.

With TRITON_INTERPRET=1, set before the first import, Triton interprets the kernels on a CPU with
numpy. The tests use this on machines without a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


HOPPER_SHARED = 227 << 10
"""The shared memory in bytes that a program may use on an H100 or H200.

The largest block sizes of the kernels are chosen for this amount.
"""
SHARED_MARGIN = 2 << 10
"""The bytes of shared memory left free, because compilers add a varying small amount."""
SHARED_RESERVE = 1 << 10
"""The bytes of shared memory of a multiprocessor that each program takes in addition to its own."""
PAIRS_OF_LARGE_TILE = 64
"""The mean number of pairs of an expert from which tiles have 128 pairs."""


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use on this device."""
    if device.type != "cuda":
        return HOPPER_SHARED  # The interpreter has no limit.
    active: Any = driver.active  # Its static type lacks the attributes of GPU drivers.
    return int(active.utils.get_device_properties(device.index)["max_shared_mem"])


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def quotient(n: int, size: int) -> int:
    """Return n / size, rounded up."""
    return -(-n // size)


def are_contiguous(*tensors: torch.Tensor | None) -> bool:
    """Return whether all given tensors are contiguous."""
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


@cache
def multiprocessors(device: torch.device, if_interpreted: int = 1) -> int:
    """Return the number of multiprocessors, or `if_interpreted` if a CPU interprets the kernels."""
    if device.type != "cuda":
        return if_interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def dot(a, b):
    """Return the matmul of two tiles, accumulated in float32, without TF32."""
    if INTERPRETED:  # The interpreter of Triton 3.6 multiplies bf16 operands as integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Return the float32 `x` in `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # The interpreter of Triton 3.6 truncates instead.
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + (0x7FFF + ((bits >> 16) & 1))
        up = tl.where(x == x, up, bits | 0x400000)
        return (up >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def bound(number):
    """Convert a scalar that a kernel computed or loaded, so that `range` accepts it."""
    if INTERPRETED:
        # In the interpreter of Triton 3.6 such a scalar is an array with one entry. numpy 2.4 does
        # not accept the array as an index.
        return number.handle.data.item()
    return number


@triton.jit
def tile_of_expert(starts, stops, tile, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile of at most ROWS pairs, its first pair, and the expert's last + 1.

    All three are 0 or more, and the first pair is not below the last one if the tile is empty.
    """
    expert = tl.arange(0, EXPERTS)
    is_real = expert < num_experts
    start = tl.load(starts + expert, is_real, other=0)
    stop = tl.load(stops + expert, is_real, other=0)
    tiles = (stop - start + ROWS - 1) // ROWS
    after = tl.cumsum(tiles, 0)
    index = tl.sum((after <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(expert == index, start + (tile - after + tiles) * ROWS, 0), 0)
    return index, first, tl.sum(tl.where(expert == index, stop, 0), 0)
