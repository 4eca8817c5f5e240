"""The choice of the backend of a base model, part by part.

Every part is first the torch implementation, for any device. CPUs with AVX2 or AVX-512 then get the
parts with C++ kernels, and GPUs those with Triton kernels, in place of the families of kernels that
passed their self-test. Other dtypes than float32 and bfloat16 keep torch.

Each family of kernels is tested before its first use: the Triton kernels by triton/self_test.py,
and the C++ kernels by cpp/self_test.py when they are loaded. torch computes the families that
failed.

With PLANISH_KERNELS=torch, the choice is always torch. PLANISH_KERNELS=triton is for tests. Triton
kernels are then used without a self-test. On a CPU, Triton interprets them (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

import torch

from planish.model.architecture.config import ModelConfig
from planish.model.device import Device
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.attention import CppAttention
from planish.model.kernels.cpp.decode_pass import CppDecodePasses
from planish.model.kernels.cpp.head import CppHead, CppSampling
from planish.model.kernels.cpp.lora import CppLora
from planish.model.kernels.cpp.packing import CppPacker
from planish.model.kernels.cpp.recurrences import CppRecurrences, supports_scan
from planish.model.kernels.cpp.self_test import FAMILIES as CPP_FAMILIES
from planish.model.kernels.interface.backend import Backend, KernelUse, Parts
from planish.model.kernels.interface.norms import CompiledNorms, SeparateQkNormRope
from planish.model.kernels.interface.parts import Attention, WeightPacker
from planish.model.kernels.interface.setting import kernels_setting
from planish.model.kernels.reference.attentions import TorchAttention, layered, score_bytes
from planish.model.kernels.reference.elementwise import TorchActivations, TorchNorms, TorchRope
from planish.model.kernels.reference.head import TorchHead
from planish.model.kernels.reference.log_sum_exp import TorchLogSumExp
from planish.model.kernels.reference.lora import TorchLora
from planish.model.kernels.reference.matmuls import FrozenMatmuls, TorchPacker
from planish.model.kernels.reference.probe import probe
from planish.model.kernels.reference.recurrences import TorchRecurrences
from planish.model.kernels.reference.token_sampling import (
    SORTING_BYTES,
    TorchSampling,
)
from planish.model.kernels.triton.families import FAMILIES as TRITON_FAMILIES, supported_families
from planish.model.kernels.triton.parts import (
    TritonActivations,
    TritonAttention,
    TritonLogSumExp,
    TritonPacker,
    TritonWeightSampler,
    elementwise_kernels,
    expert_kernels,
    single_logits,
    weight_filter,
)
from planish.model.layers.row_tiling import FIXED, RowTiling, RowTilings


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
    backend = fastest_backend(config, dtype, device, gpu_families)
    tiling = _row_tiling(backend, deterministic)
    return (
        backend if tiling is None else fastest_backend(config, dtype, device, gpu_families, tiling)
    )


def fastest_backend(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    gpu_families: Collection[str] = (),
    tiling: RowTiling | None = None,
) -> Backend:
    """Return the backend with the fastest kernels for this device.

    `tiling`: the row counts of torch's matmuls; None: any row counts.
    """
    setting = kernels_setting()
    if dtype in (torch.float32, torch.bfloat16):
        if setting == "triton":
            return triton_backend(config, dtype, device, TRITON_FAMILIES, tiling)
        if Device(device).is_gpu:
            if gpu_families and setting != "torch":
                return triton_backend(config, dtype, device, gpu_families, tiling)
        elif setting != "torch" and ops.load_library() is not None:
            return cpp_backend(config, dtype, device, tiling)
    return reference_backend(config, dtype, device, tiling)


def reference_backend(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, tiling: RowTiling | None = None
) -> Backend:
    """Return the backend in which torch computes everything: the reference implementation."""
    parts = _torch_parts(config, dtype, device, RowTilings(tiling))
    return _compose(config, dtype, device, tiling, parts, KernelUse())


def cpp_backend(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, tiling: RowTiling | None = None
) -> Backend:
    """Return the backend with the C++ kernels that passed their self-test on this CPU.

    `dtype`: float32 or bfloat16. `device`: a CPU. torch computes what the kernels do not support:

    - weights with an odd number of inputs
    - adapters of linears whose sizes are not multiples of 16
    - attention heads whose size is not a multiple of 16
    - families of kernels that failed their self-test
    """
    library = ops.load_library()
    assert library is not None
    families = frozenset(family for family in CPP_FAMILIES if ops.is_supported(family))
    if not library.uses_amx:
        families -= {"amx"}
    parts = _cpp_parts(config, dtype, device, RowTilings(tiling), families)
    return _compose(config, dtype, device, tiling, parts, _cpp_use(config, parts, families))


def _cpp_parts(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tilings: RowTilings,
    families: frozenset[str],
) -> Parts:
    packer = CppPacker(dtype, TorchPacker(dtype, device))
    matmuls = FrozenMatmuls(packer, dtype, device, tilings)
    parts = _torch_parts(config, dtype, device, tilings, matmuls)
    has_single_logits = dtype == torch.bfloat16 and "sampling" in families
    head = CppHead(parts.head, tilings.sampling, has_single_logits=has_single_logits)
    parts = replace(parts, lora=CppLora(config, dtype, parts.lora), head=head)
    if "norms" in families:
        parts = replace(parts, norms=CompiledNorms(ops, dtype))
    if "rope" in families:
        parts = replace(parts, rope=ops)
    parts = replace(parts, qk_norm_rope=SeparateQkNormRope(parts.norms, parts.rope))
    if "swiglu" in families:
        parts = replace(parts, activations=ops)
    if "log_sum_exp" in families:
        parts = replace(parts, log_sum_exp=ops)
    sampling = TorchSampling(parts.log_sum_exp, device)
    parts = replace(parts, sampling=CppSampling(sampling) if "sampling" in families else sampling)
    scanned = config.delta_net or config.mamba2
    if scanned is not None and supports_scan(scanned):
        parts = replace(parts, recurrences=CppRecurrences(scanned, device))
    if ops.supports_attention(config.head_dim) and config.score_cap is None:
        parts = replace(parts, attention=CppAttention(dtype, config.attention_windows))
        if parts.lora.packs_layer_adapters and "decode" in families:
            parts = replace(parts, decode_passes=CppDecodePasses(config))
    return parts


def _cpp_use(config: ModelConfig, parts: Parts, families: frozenset[str]) -> KernelUse:
    """Return which of the `families` that work on this CPU the parts use for this model."""
    size, scanned = config.hidden_size, config.delta_net or config.mamba2
    supported = {
        "matmul": parts.matmuls.can_pack(size, size),
        "lora": parts.lora.packs_layer_adapters,
        "attention": parts.attention.attention_is_batch_invariant,
        "delta_net": scanned is None or supports_scan(scanned),
    }
    replaced = frozenset(
        family
        for family in CPP_FAMILIES
        if family != "amx" and not (family in families and supported.get(family, True))
    )
    return KernelUse(
        f"C++ kernels ({ops.instructions()}{', AMX' if 'amx' in families else ''})",
        families,
        replaced,
        uses_compiled_kernels=replaced.isdisjoint(("matmul", "lora", "attention")),
    )


def triton_backend(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    families: Collection[str],
    tiling: RowTiling | None = None,
) -> Backend:
    """Return the backend with Triton kernels. Tests use it on a CPU, where Triton interprets them.

    `families`: the families of kernels that passed their self-test for this model.
    """
    used = frozenset(families).intersection(supported_families(config))
    parts = _triton_parts(config, dtype, device, tiling, used)
    use = KernelUse(
        "Triton kernels",
        used,
        frozenset(TRITON_FAMILIES) - used,
        supports_graph_runner=tiling is None and {"attention", "lora"} <= used,
    )
    return _compose(config, dtype, device, tiling, parts, use)


def _triton_parts(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tiling: RowTiling | None,
    families: frozenset[str],
) -> Parts:
    kernels, tilings = elementwise_kernels(), RowTilings(tiling)
    packer: WeightPacker = TorchPacker(dtype, device)
    if "quantized" in families:
        packer = TritonPacker(dtype, packer, is_batch_invariant=tiling is not None)
    matmuls = FrozenMatmuls(packer, dtype, device, tilings)
    parts = _torch_parts(config, dtype, device, tilings, matmuls)
    attention: Attention = TorchAttention(config, dtype, device, tilings)
    if tiling is None:
        attention = TritonAttention(config, device, families, attention)
    parts = replace(parts, attention=attention)
    if "norms" in families:
        parts = replace(parts, norms=CompiledNorms(kernels, dtype))
    if "rope" in families:
        parts = replace(parts, rope=kernels)
    # One kernel normalizes and rotates all heads, because launches take longer than the work.
    fuses_qk = {"norms", "rope"} <= families
    qk_norm_rope = kernels if fuses_qk else SeparateQkNormRope(parts.norms, parts.rope)
    parts = replace(parts, qk_norm_rope=qk_norm_rope)
    if "swiglu" in families:
        parts = replace(parts, activations=TritonActivations(parts.activations))
    if "experts" in families and tiling is None:
        parts = replace(parts, expert_kernels=expert_kernels())
    if "log_sum_exp" in families:
        parts = replace(parts, log_sum_exp=TritonLogSumExp())
        if tiling is None and dtype == torch.bfloat16:
            head = TorchHead(matmuls, dtype, device, tilings, single_logits())
            parts = replace(parts, head=head)
    if "sampling" not in families:
        return replace(parts, sampling=TorchSampling(parts.log_sum_exp, device))
    sampling = TorchSampling(parts.log_sum_exp, device, TritonWeightSampler(), weight_filter())
    return replace(parts, sampling=sampling)


def _torch_parts(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tilings: RowTilings,
    matmuls: FrozenMatmuls | None = None,
) -> Parts:
    """Return parts that torch computes. `matmuls`: the matmuls if other weights are packed."""
    if matmuls is None:
        matmuls = FrozenMatmuls(TorchPacker(dtype, device), dtype, device, tilings)
    norms, rope, log_sum_exp = TorchNorms(dtype), TorchRope(), TorchLogSumExp(device)
    # torch's bf16 matmuls on a CPU would round scores and weighted sums to bf16.
    wide_dtype = torch.promote_types(dtype, torch.float32)
    kv_dtype = dtype if Device(device).is_gpu else wide_dtype
    return Parts(
        matmuls=matmuls,
        lora=TorchLora(config, tilings),
        norms=norms,
        rope=rope,
        qk_norm_rope=SeparateQkNormRope(norms, rope),
        activations=TorchActivations(),
        attention=TorchAttention(config, kv_dtype, device, tilings),
        recurrences=TorchRecurrences(config.recurrence, device),
        head=TorchHead(matmuls, dtype, device, tilings),
        log_sum_exp=log_sum_exp,
        sampling=TorchSampling(log_sum_exp, device),
    )


def _compose(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tiling: RowTiling | None,
    parts: Parts,
    use: KernelUse,
) -> Backend:
    workspace_bytes = SORTING_BYTES if Device(device).is_gpu else score_bytes(config)
    parts = replace(parts, attention=layered(parts.attention, config))
    return Backend(config, dtype, device, tiling, parts, use, workspace_bytes)


def _row_tiling(backend: Backend, deterministic: bool | None) -> RowTiling | None:
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
    return probe(fastest_backend(config, dtype, device, families), at_any_cost=at_any_cost)
