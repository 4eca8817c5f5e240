"""The choice of the backend of a base model.

CPUs with AVX2 or AVX-512 get the C++ kernels, and GPUs get the Triton kernels. All other devices,
and other dtypes than float32 and bfloat16, get torch.

Each family of kernels is tested before its first use: the Triton kernels by triton/self_test.py,
and the C++ kernels by cpp/self_test.py when they are loaded. torch computes the families that
failed.

With PLANISH_KERNELS=torch, the choice is always torch. PLANISH_KERNELS=triton is for tests. Triton
kernels are then used without a self-test. On a CPU, Triton interprets them (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import torch

from planish.model.config import ModelConfig
from planish.model.kernels.backend import Backend
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.backend import CppBackend
from planish.model.kernels.device import Device
from planish.model.kernels.reference.backend import TorchBackend
from planish.model.kernels.reference.probe import probe
from planish.model.kernels.row_tiling import FIXED, RowTiling
from planish.model.kernels.triton.backend import TritonBackend
from planish.model.kernels.triton.families import FAMILIES


def choose_backend(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool | None,
    gpu_families: Collection[str] = (),
) -> Backend:
    """Return the backend of a base model.

    `deterministic`: whether results must be batch-invariant. None: results on a GPU are not
    batch-invariant. Results on a CPU are batch-invariant if padding the matmuls achieves that,
    because padding costs almost nothing.
    `gpu_families`: the families of Triton kernels that passed their self-test for this model on
    this GPU.
    """
    backend = _fastest_backend(config, dtype, device, gpu_families)
    backend.make_batch_invariant(_row_tiling(backend, deterministic))
    return backend


def _fastest_backend(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, gpu_families: Collection[str]
) -> TorchBackend:
    setting = ops.kernels_setting()
    if dtype in (torch.float32, torch.bfloat16):
        if setting == "triton":
            return TritonBackend(config, dtype, device, FAMILIES)
        if Device(device).is_gpu:
            if gpu_families and setting != "torch":
                return TritonBackend(config, dtype, device, gpu_families)
        elif setting != "torch" and ops.load_library() is not None:
            return CppBackend(config, dtype, device)
    return TorchBackend(config, dtype, device)


def _row_tiling(backend: TorchBackend, deterministic: bool | None) -> RowTiling | None:
    if deterministic is False or (deterministic is None and Device(backend.device).is_gpu):
        return None
    tiling = _cached_probe(
        backend.config,
        backend.dtype,
        backend.device,
        backend.families,
        torch.get_num_threads(),
        bool(deterministic),
    )
    # Fixed tiles make a rollout more than 10% slower, so use them only with deterministic=True.
    return FIXED if tiling is None and deterministic else tiling


@lru_cache(maxsize=32)
def _cached_probe(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    families: frozenset[str],
    _threads: int,
    at_any_cost: bool,
) -> RowTiling | None:
    """Return the result of `probe`, which is cached.

    The number of threads is part of the cache key, because it may change the results of matmuls.
    """
    # The model's backend is not an argument, because the cache would keep it in memory, with the
    # model's weights. So the probe gets a backend of its own.
    return probe(_fastest_backend(config, dtype, device, families), at_any_cost=at_any_cost)
