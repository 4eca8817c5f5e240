"""The settings of an engine: device, dtype, determinism and memory limits.

All values are checked before anything is loaded.
"""

# pyright: reportUnnecessaryIsInstance=false

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_sizes import SCHEMES
from planish.model.device import Device
from planish.model.kernels.cpp import matmul
from planish.model.kernels.triton.families import HeadShape, wants_graphs
from planish.service import checked_substitutes

_NVIDIA_DRIVER_FILES = (
    Path("/proc/driver/nvidia/version"),
    Path("/dev/nvidiactl"),
    Path("/usr/lib/wsl/lib/libcuda.so.1"),
)
"""Files of the NVIDIA driver. At least one of them exists if the driver is installed.

The last one exists on WSL.
"""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""The supported dtypes by the names that `EngineSettings.dtype` accepts."""


@dataclass(frozen=True)
class EngineSettings:
    """The settings of one engine.

    Raises UserError for an invalid value. For the four memory limits, None means a default that
    fits into the device's memory (memory.py).
    """

    dtype: str = "auto"
    """The dtype of the matmuls: "bfloat16", "float32", or "auto".

    "auto" means bfloat16 if the device supports it natively, else float32.
    """
    device: str = "auto"
    """The device: "cpu", "cuda", "cuda:N", or "auto", which is a GPU if there is one."""
    deterministic: bool | None = None
    """Whether samples are batch-invariant: their bits do not depend on other work of the engine.

    None: samples are batch-invariant only if that costs almost nothing. That is the case on a CPU
    where the matmuls of planish's kernels or of torch are batch-invariant.
    """
    micro_batch_tokens: int | None = None
    """Maximum number of tokens per training micro-batch."""
    kv_cache_bytes: int | None = None
    """Maximum size of the KV cache of running samples."""
    prefix_cache_bytes: int | None = None
    """Maximum size of the cached prefixes; 0 turns the prefix cache off."""
    max_batch: int | None = None
    """Maximum number of samples per sampler step."""
    share_prefix_cache: bool = False
    """Whether requests of different owners (`Sample.owner`) use each other's cached prefixes.

    Then the reported cache hits, and the time of a request, tell whether another owner has sent a
    prompt with the same beginning. So an owner can guess the prompts of others, chunk by chunk.
    """
    substitute_losses: Mapping[str, str] | None = None
    """Maps losses that planish does not support to the losses that are computed instead."""
    quantize: str | None = None
    """The quantization of the base weights: "int8", "nf4", or None for the model's dtype.

    Sampler and trainer read the same quantized weights. Embeddings, head and norms are not
    quantized. See layers/quantization.py for the schemes.
    """
    tensor_parallel: int | None = None
    """The number of devices of this machine that share each base model; None is 1. On a CPU, the
    number of processes.
    """

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"dtype={self.dtype!r}: give 'auto', {', '.join(map(repr, DTYPES))}")
        if self.deterministic not in (None, True, False):
            raise UserError(f"deterministic={self.deterministic!r}: give True, False or None")
        if self.quantize not in (None, *SCHEMES):
            raise UserError(
                f"quantize={self.quantize!r}: give {', '.join(map(repr, SCHEMES))}, or None for "
                "weights in the model's dtype"
            )
        numbers = {**self.memory_limits, "tensor_parallel": self.tensor_parallel}
        for name, value in numbers.items():
            minimum = 0 if name == "prefix_cache_bytes" else 1
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < minimum
            ):
                raise UserError(
                    f"{name}={value!r}: give a whole number of at least {minimum}, or None for the "
                    "default"
                )
        checked_substitutes(self.substitute_losses or {})
        wants_graphs()
        shard_devices(choose_device(self.device), self.num_shards)

    @property
    def num_shards(self) -> int:
        """The number of parts into which each base model is divided."""
        return 1 if self.tensor_parallel is None else self.tensor_parallel

    @property
    def memory_limits(self) -> dict[str, int | None]:
        """The values of the four memory limits by name."""
        names = ("kv_cache_bytes", "prefix_cache_bytes", "max_batch", "micro_batch_tokens")
        return {name: getattr(self, name) for name in names}


def choose_device(name: str) -> torch.device:
    """Return the device of this name; a GPU always gets an index.

    Raises UserError if the device does not exist.
    """
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
    if Device(device).is_gpu and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; give "
            "'auto' or 'cpu'" + (f". {problem}" if (problem := unused_gpu()) else "")
        )
    # torch.cuda.set_device needs an index. Without an index, "cuda" could be a different GPU in
    # each thread.
    return torch.device("cuda", device.index or 0) if Device(device).is_gpu else device


def shard_devices(device: torch.device, tensor_parallel: int) -> list[torch.device]:
    """Return the devices that share a base model: `device` and the GPUs after it.

    Raises UserError if there are not enough of them.
    """
    if not Device(device).is_gpu:
        return [device] * tensor_parallel
    first, num_gpus = device.index or 0, torch.cuda.device_count()
    if first + tensor_parallel > num_gpus:
        raise UserError(
            f"tensor_parallel={tensor_parallel} needs {tensor_parallel} GPUs from {device} on, and "
            f"this process sees {num_gpus}; give at most {num_gpus - first}"
        )
    return [torch.device("cuda", first + rank) for rank in range(tensor_parallel)]


def unused_gpu() -> str | None:
    """Return why torch cannot use the NVIDIA GPU of this machine, and what to do.

    Return None if there is no such GPU, or if torch can use it.
    """
    if not any(path.exists() for path in _NVIDIA_DRIVER_FILES) or torch.cuda.is_available():
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
    """Log a warning, once per process, if device="auto" uses the CPU despite an NVIDIA GPU."""
    problem = unused_gpu()
    if problem is not None:
        logging.getLogger(__name__).warning(
            "device='auto' takes the CPU. %s; device='cpu' silences this", problem
        )


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matmuls.

    "auto" is bfloat16 on a GPU with native support. It is bfloat16 on a CPU with AMX or
    AVX512-BF16, or if the native kernels support bfloat16. Otherwise it is float32.
    """
    if name != "auto":
        return DTYPES[name]
    if Device(device).is_gpu:
        is_native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        is_native = _cpu_multiplies_bfloat16()
    return torch.bfloat16 if is_native else torch.float32


def head_shape(config: ModelConfig, dtype: torch.dtype) -> HeadShape:
    """Return the shape of the model's attention heads, for which GPU kernels are compiled."""
    return HeadShape(config.head_dim, config.num_heads // config.num_kv_heads, dtype)


def kernel_shapes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes for which GPU kernels are compiled, by name, in addition to `head_shape`."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "vocab_size",
        "qk_norm",
        "attention_sinks",
        "num_experts",
        "experts_per_token",
        "expert_size",
    )
    sizes = {name: int(getattr(config, name)) for name in names}
    return sizes | {"windows": int(any(config.windows))}


def _cpu_multiplies_bfloat16() -> bool:
    # The oldest supported torch does not have the public torch.cpu.get_capabilities.
    cpu = torch.cpu
    return (
        cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
        or cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
        or matmul.supports_bf16_matmul()
    )
