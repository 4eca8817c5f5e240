"""How an engine runs: device, dtype, and the sizes that bound its memory. Every name is checked
before anything is loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from planish.engine.row_tiling import FIXED, RowTiling, probe
from planish.errors import UserError
from planish.model.config import ModelConfig
from planish.native import cpu_products
from planish.native.kernels import HeadShape, wants_graphs
from planish.service import checked_substitutes

_GPU_FILES = (
    Path("/proc/driver/nvidia/version"),
    Path("/dev/nvidiactl"),
    Path("/usr/lib/wsl/lib/libcuda.so.1"),
)
"""One of them exists where the driver of an NVIDIA GPU is installed; the last one on WSL."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class EngineSettings:
    dtype: str = "auto"
    """Of the products: "bfloat16", "float32", or "auto": bfloat16 where the device multiplies it
    natively.
    """
    device: str = "auto"
    """"cpu", "cuda", "cuda:N", or "auto": a GPU if there is one."""
    deterministic: bool | None = None
    """A sample's bits do not depend on what else runs. None: where it costs next to nothing: with
    the CPU's own kernels, and where torch's products allow it.
    """
    micro_batch_tokens: int | None = None
    kv_cache_bytes: int | None = None
    prefix_cache_bytes: int | None = None
    max_batch: int | None = None
    """None: what the memory of the device is enough for, see memory.py."""
    substitute_losses: Mapping[str, str] | None = None
    """Losses that planish refuses, each with the loss that is computed in its place."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"dtype={self.dtype!r}: give 'auto', {', '.join(map(repr, DTYPES))}")
        if self.deterministic not in (None, True, False):
            raise UserError(f"deterministic={self.deterministic!r}: give True, False or None")
        for name, value in self.bounds.items():
            least = 0 if name == "prefix_cache_bytes" else 1
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < least
            ):
                raise UserError(
                    f"{name}={value!r}: give a whole number of at least {least}, or None for the default"
                )
        checked_substitutes(self.substitute_losses or {})
        wants_graphs()
        choose_device(self.device)

    @property
    def bounds(self) -> dict[str, int | None]:
        """What bounds memory, by name."""
        names = ("kv_cache_bytes", "prefix_cache_bytes", "max_batch", "micro_batch_tokens")
        return {name: getattr(self, name) for name in names}


def choose_device(name: str) -> torch.device:
    """The device of this name, a GPU with its number; UserError if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu":
            _warn_of_unused_gpu()
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device={name!r}: give 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name!r}: planish runs on 'cpu' and 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; give 'auto' or 'cpu'"
            + (f". {problem}" if (problem := unused_gpu()) else "")
        )
    # torch makes no GPU current that has no number, and without one "cuda" would be another GPU in
    # another thread.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def unused_gpu() -> str | None:
    """Return why torch does not use the NVIDIA GPU of this machine, and what to do; None if there
    is no such GPU, or if torch uses it.
    """
    if not any(path.exists() for path in _GPU_FILES) or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            "This machine has an NVIDIA GPU, but the installed torch is for CPUs only: "
            "install a torch for CUDA"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        torch.cuda.init()
        reason = "torch finds no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
    return (
        f"This machine has an NVIDIA GPU that torch for CUDA {torch.version.cuda} cannot use "
        f"({reason}): update the NVIDIA driver, or install a torch for the CUDA of the driver"
    )


@cache
def _warn_of_unused_gpu() -> None:
    """Once: device="auto" would else take the CPU without a word."""
    problem = unused_gpu()
    if problem is not None:
        logging.getLogger(__name__).warning(
            "device='auto' takes the CPU. %s; device='cpu' silences this", problem
        )


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of products. "auto": bfloat16 on a GPU that has it, on a CPU with AMX or
    AVX512-BF16 or where our kernels multiply it; else float32.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        native = _cpu_multiplies_bfloat16()
    return torch.bfloat16 if native else torch.float32


def head_shape(config: ModelConfig, dtype: torch.dtype) -> HeadShape:
    """The attention heads of this model, for which the GPU's kernels are compiled."""
    return HeadShape(config.head_dim, config.num_heads // config.num_kv_heads, dtype)


def kernel_shapes(config: ModelConfig) -> dict[str, int]:
    """What else of this model the GPU's kernels are compiled for."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "vocab_size",
        "qk_norm",
    )
    return {name: int(getattr(config, name)) for name in names}


def choose_tiling(
    deterministic: bool | None, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> RowTiling | None:
    """The row tiling of the sampler; None if it is not deterministic."""
    if deterministic is False or (deterministic is None and device.type != "cpu"):
        return None
    found = _probed(config, dtype, device, torch.get_num_threads(), bool(deterministic))
    # Fixed tiles cost more than a tenth of a rollout, so they are for those who ask.
    return FIXED if found is None and deterministic else found


@lru_cache(maxsize=32)
def _probed(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    _threads: int,
    at_any_cost: bool,
) -> RowTiling | None:
    """Products of equal shapes are looked at once in a process for each number of threads."""
    return probe(config, dtype, device, at_any_cost=at_any_cost)


def _cpu_multiplies_bfloat16() -> bool:
    # The public torch.cpu.get_capabilities is younger than the oldest torch that planish runs on.
    has_instructions = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return has_instructions or cpu_products.multiplies_bfloat16()
