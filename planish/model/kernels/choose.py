"""The choice of a backend: C++ on CPUs with AVX2 or AVX-512, Triton on GPUs, or torch.

A family of Triton kernels is used on a GPU only if its self-test passed on that GPU
(triton/self_test.py). The C++ kernels test themselves when they are first loaded
(cpp/self_test.py). torch computes the families that failed.

PLANISH_KERNELS=torch turns all kernels off. PLANISH_KERNELS=triton is for tests: Triton is then
used without a self-test, also on a CPU, where it is interpreted (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import torch

from planish.model.config import ModelConfig
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.backend import CppBackend
from planish.model.kernels.device import Device
from planish.model.kernels.reference.backend import TorchBackend
from planish.model.kernels.reference.row_tiling import FIXED, RowTiling, probe
from planish.model.kernels.triton.backend import TritonBackend
from planish.model.kernels.triton.families import FAMILIES


def choose_backend(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool | None,
    gpu_families: Collection[str] = (),
) -> TorchBackend:
    """Return the backend of a base model.

    `deterministic`: whether results are batch-invariant. The default (None) depends on the device.
    On a GPU, results are not batch-invariant. On a CPU, results are batch-invariant if padding the
    matmuls is enough, because padding costs almost nothing.
    `gpu_families`: the families of Triton kernels that passed their self-test for this model on
    this GPU.
    """
    backend = _fastest(config, dtype, device, gpu_families)
    backend.make_batch_invariant(_row_tiling(backend, deterministic))
    return backend


def _fastest(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, gpu_families: Collection[str]
) -> TorchBackend:
    wanted = ops.kernels_setting()
    if dtype in (torch.float32, torch.bfloat16):
        if wanted == "triton":
            return TritonBackend(config, dtype, device, FAMILIES)
        if Device(device).is_gpu:
            if gpu_families and wanted != "torch":
                return TritonBackend(config, dtype, device, gpu_families)
        elif wanted != "torch" and ops.load_library() is not None:
            return CppBackend(config, dtype, device)
    return TorchBackend(config, dtype, device)


def _row_tiling(backend: TorchBackend, deterministic: bool | None) -> RowTiling | None:
    if deterministic is False or (deterministic is None and Device(backend.device).is_gpu):
        return None
    found = _probed(
        backend.config,
        backend.dtype,
        backend.device,
        backend.families,
        torch.get_num_threads(),
        bool(deterministic),
    )
    # Fixed tiles make a rollout more than 10% slower, so use them only with deterministic=True.
    return FIXED if found is None and deterministic else found


@lru_cache(maxsize=32)
def _probed(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    families: frozenset[str],
    _threads: int,
    at_any_cost: bool,
) -> RowTiling | None:
    """Return the cached result of `probe`; the number of threads is part of the cache key."""
    # The probe gets its own backend, because a cached backend would keep its weights in memory.
    return probe(_fastest(config, dtype, device, families), at_any_cost=at_any_cost)
