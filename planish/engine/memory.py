"""The division of a device's memory among base models, and all defaults of memory limits.

The memory that the weights leave is divided into four budgets: the KV cache, cached prefixes, the
workspace of a sampler step, and one micro-batch of training.

On a GPU the budgets do not overlap, and a base model is rejected before loading if its budget is
too small. Main memory is shared with other programs and is allocated only when it is used. So on a
CPU the defaults are fixed sizes, or less if the machine has less memory. Limits given in
`EngineSettings` are used unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from pathlib import Path
from threading import Lock

import torch

from planish.engine.sampling.settings import SamplerSettings
from planish.engine.settings import EngineSettings, choose_device, choose_dtype
from planish.engine.training.trainer_settings import TrainerSettings, input_bytes
from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_sizes import (
    code_bytes,
    fused_quantized_shapes,
    linear_bytes,
    mxfp4_bytes,
    stored_scheme,
    unpacked_bytes,
    unquantized_bytes,
)
from planish.model.decoder.tensor_parallel.shards import check_shardable, shard_config
from planish.model.device import Device
from planish.model.kernels.choose import choose_backend
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.lora import LoraLayout
from planish.model.layers.quantization import DEQUANTIZATION_BYTES
from planish.model.layers.recurrence import state_bytes
from planish.model.sequences.kv_cache import max_pool_bytes, max_reservable_bytes
from planish.model.vision.tower import workspace_bytes
from planish.service import AdapterBytes
from planish.types import LoraConfig

RUNTIME_BYTES = 1300 << 20
"""Main memory that the process itself needs: the interpreter, torch, transformers, and the compiled
kernels that oneDNN caches.
"""

_MIN_KV_CACHE_TOKENS = 4096
"""Minimum default size of the KV cache, in tokens."""
_MIN_RECURRENT_STATES = 8
"""Minimum number of recurrent states for which the default KV cache has space."""
_GPU_STEP_SIZES = ((512, 8192), (256, 4096), (128, 2048), (64, 1024), (32, 512))
"""Candidates on a GPU for (max samples, max prompt tokens) per sampler step.

The first candidate whose workspace needs at most a quarter of the memory is used.
"""
_MICRO_BATCH_TOKENS = (16384, 8192, 4096, 2048, 1024)
"""Candidates for the micro-batch size in tokens, without activation checkpointing.

The first candidate that fits into the training budget is used.
"""
_RECOMPUTED_MICRO_BATCH_TOKENS = (4096, 2048, 1024, 512, 256, 128)
"""Candidates with activation checkpointing, used if none of `_MICRO_BATCH_TOKENS` fits.

Smaller micro-batches without checkpointing would be slower, because a GPU would then spend its time
on kernel launches.
"""
_DENSE_PLANNED_RANK = 32
_NUM_FLOAT32_VECTORS = 7
"""Number of float32 vectors of an adapter in training.

They are the master weights, two moments and the gradient, plus a second copy of the first three
during an optimizer step.
"""


@dataclass(frozen=True)
class ModelMemory:
    """The memory budgets of one base model in bytes, and the settings that enforce them."""

    weight_bytes: int
    adapter_bytes: int
    """Memory planned for adapters; this size is not enforced."""
    sampler: SamplerSettings
    cache_bytes: int
    """Maximum size of the KV cache of running samples and cached prefixes."""
    sampling_bytes: int
    """Temporary workspace of one sampler step."""
    trainer: TrainerSettings
    training_bytes: int
    """Memory of one training micro-batch."""

    @property
    def divided_bytes(self) -> int:
        """The memory for the KV cache, the sampler workspace and training."""
        return self.cache_bytes + self.sampling_bytes + self.training_bytes

    @property
    def total_bytes(self) -> int:
        """The maximum memory of the base model with its adapters."""
        return self.weight_bytes + self.adapter_bytes + self.divided_bytes


class DeviceMemory:
    """The memory budgets of all base models of an engine. The class is thread-safe."""

    def __init__(
        self,
        settings: EngineSettings,
        expected_directories: Sequence[Path] = (),
        adapter_bytes: int | None = None,
        *,
        reserves_for_next: bool = False,
        device: torch.device | None = None,
        device_bytes: int | None = None,
    ) -> None:
        """Create the budgets of an engine with these settings.

        `expected_directories`: directories of all base models that will be loaded, if they are
        known.

        `adapter_bytes`: maximum memory of all adapters together. None: each base model reserves
        memory to train one adapter and to sample from it. The rank of that adapter is 32, or less
        for a mixture of experts (`_planned_rank`).

        `reserves_for_next`: on a GPU, each base model leaves a third of the free memory for further
        base models, if a base model of the same size would fit into that third. Otherwise a base
        model reserves all free memory.

        `device`, `device_bytes`: another device than that of the settings, and its usable memory,
        for a plan for a GPU that this machine need not have.
        """
        self._settings = settings
        self.device = device or choose_device(settings.device)
        self._device_bytes = device_bytes
        self._expected_directories = {directory.resolve() for directory in expected_directories}
        self._adapter_bytes = adapter_bytes
        self._reserves_for_next = reserves_for_next
        self._claims: dict[Path, ModelMemory] = {}
        self._lock = Lock()

    def claim(self, directory: Path) -> ModelMemory:
        """Reserve and return the budget of this base model, until `release`.

        Raises UserError if too little memory is left. Raises DamagedFileError or a similar error if
        the directory does not contain a model.
        """
        directory = directory.resolve()
        with self._lock:
            if directory not in self._claims:
                self._claims[directory] = self._budget_for(directory)
            return self._claims[directory]

    def release(self, directory: Path) -> None:
        """Free the budget of this base model; without a budget, do nothing."""
        with self._lock:
            self._claims.pop(directory.resolve(), None)

    @cached_property
    def _usable_bytes(self) -> int | None:
        """The usable memory of the device, measured once before the first base model is loaded.

        The ranks of tensor parallelism on a CPU divide the main memory equally.
        """
        usable = self._device_bytes or usable_bytes(self.device)
        if usable is None or Device(self.device).is_gpu:
            return usable
        return usable // self._settings.num_shards

    def _budget_for(self, directory: Path) -> ModelMemory:
        """Return the budget of a base model, given the base models that are loaded or expected."""
        needs = self._model_needs(directory)
        if self._usable_bytes is None:
            return needs.budget_for(inf)
        other_needs = [
            self._model_needs(path)
            for path in self._expected_directories.difference(self._claims, [directory])
        ]
        available_bytes = (
            self._usable_bytes
            - needs.fixed_bytes
            - sum(other.fixed_bytes for other in other_needs)
            - (self._adapter_bytes or 0)
        )
        if not Device(self.device).is_gpu:
            self._check_weights_fit(directory, needs, self._usable_bytes)
            return needs.budget_for(
                available_bytes
                - RUNTIME_BYTES
                - sum(claim.weight_bytes for claim in self._claims.values())
            )
        available_bytes -= sum(claim.total_bytes for claim in self._claims.values())
        if other_needs:  # divide in proportion to the minimum needs of the expected base models
            available_bytes = (
                available_bytes
                * needs.minimum_bytes
                // (needs.minimum_bytes + sum(other.minimum_bytes for other in other_needs))
            )
        elif self._reserves_for_next and not self._expected_directories:
            next_model_bytes = needs.fixed_bytes + 2 * needs.minimum_bytes
            available_bytes -= (
                available_bytes // 3 if next_model_bytes <= available_bytes // 3 else 0
            )
        self._check_minimum(directory, needs, available_bytes, self._usable_bytes)
        return needs.budget_for(available_bytes)

    def _model_needs(self, directory: Path) -> _ModelNeeds:
        # The plan for another machine assumes that its main memory is large enough.
        is_planned = self._device_bytes is not None
        offload_bytes = inf if is_planned else (main_memory_bytes() or 0) // 2
        return _ModelNeeds.from_directory(
            directory,
            self._settings,
            self.device,
            reserves_adapters=self._adapter_bytes is None,
            offload_bytes=offload_bytes,
        )

    def _check_weights_fit(self, directory: Path, needs: _ModelNeeds, usable: int) -> None:
        """Raise UserError if one copy of the weights exceeds the usable main memory."""
        if needs.weight_bytes > usable:
            raise UserError(
                f"{directory} does not fit into main memory: its weights take "
                f"{gib(needs.weight_bytes)} as {self._settings.quantize or needs.backend.dtype}, "
                f"and {gib(usable)} are "
                "usable; use a smaller base model, or give quantize='int8' or 'nf4'"
            )

    def _check_minimum(
        self, directory: Path, needs: _ModelNeeds, available: int, usable: int
    ) -> None:
        """Raise UserError if less than the minimum is left, unless all four limits are given."""
        memory_limits = self._settings.memory_limits
        if available >= needs.minimum_bytes or None not in memory_limits.values():
            return
        given_limits = [
            f"{name}={value:,}" for name, value in memory_limits.items() if value is not None
        ]
        limits = f" (with {', '.join(given_limits)})" if given_limits else ""
        weights = f"its weights and adapters take {gib(needs.fixed_bytes)}"
        if self._adapter_bytes:
            weights = (
                f"its weights take {gib(needs.fixed_bytes)}, the adapters of all base models take "
                f"{gib(self._adapter_bytes)} (adapter_memory_bytes)"
            )
        raise UserError(
            f"{directory} does not fit on {self.device}: {gib(usable)} of the device are usable, "
            f"{weights}, and other base models leave {gib(max(0, available))} for sampling and "
            f"training, which need at least {gib(needs.minimum_bytes)}{limits}. {self._remedy}Use "
            "a smaller base model or fewer base models, quantize='int8' or 'nf4', or "
            "tensor_parallel=N in place of replicas, which divides the base model among N GPUs; "
            f"lower {', '.join(memory_limits)}, or end other programs on the device. If all four "
            "of these limits are given, planish uses them without this check"
        )

    @property
    def _remedy(self) -> str:
        if self._expected_directories or self._reserves_for_next or not self._claims:
            return ""
        return (
            "The first base model reserved all of the memory: name all base models that you use "
            "together in models= or PLANISH_MODELS, so that each leaves memory for the next. "
        )


@dataclass(frozen=True)
class _ModelNeeds:
    """The memory needs of one base model on a device."""

    backend: Backend
    settings: EngineSettings
    weight_bytes: int
    """Size of one copy of the weights."""
    all_copies_bytes: int
    """Size of all copies of the weights. Quantized weights have a single copy."""
    adapter_bytes: int
    """Memory reserved for adapters."""
    vision_bytes: int
    """Memory of a vision tower beside its weights. 0 without images, and in main memory."""
    offload_bytes: float
    """Main memory for the layers' inputs of long sequences."""

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        settings: EngineSettings,
        device: torch.device,
        reserves_adapters: bool,
        offload_bytes: float,
    ) -> _ModelNeeds:
        config, dtype = ModelConfig.from_directory(directory), choose_dtype(settings.dtype, device)
        backend = choose_backend(config, dtype, device, deterministic=False)
        adapter = adapter_bytes(backend, LoraConfig(rank=_planned_rank(config)))
        num_vocabulary_values = 0
        if settings.num_shards > 1:
            # The needs are those of rank 0, which has the whole optimizer state of an adapter and
            # a part of everything else.
            check_shardable(config, settings.num_shards, settings.quantize)
            num_vocabulary_values = config.vocab_size * config.hidden_size
            num_vocabulary_values *= 1 if config.tied_head else 2
            num_vocabulary_values -= num_vocabulary_values // settings.num_shards
            config = shard_config(config, settings.num_shards)
            backend = choose_backend(config, dtype, device, deterministic=False)
        reserved_adapter_bytes = adapter.training + adapter.sampling if reserves_adapters else 0
        scheme = settings.quantize or stored_scheme(config)
        # Weights that the checkpoint stores as MXFP4 codes have a single copy: the packed codes.
        mxfp4_code_bytes = mxfp4_bytes(config)
        unquantized = unquantized_bytes(config, dtype.itemsize, scheme) - mxfp4_code_bytes
        unquantized -= num_vocabulary_values * dtype.itemsize
        codes = mxfp4_code_bytes + (linear_bytes(config, scheme) if scheme is not None else 0)
        one_copy_bytes = unquantized + codes
        all_copies_bytes = backend.weight_copies * unquantized + codes
        all_copies_bytes -= (backend.weight_copies - 1) * unpacked_bytes(config, dtype.itemsize)
        if scheme is not None or config.mxfp4_experts:
            shapes = _dequantized_shapes(config, backend, is_fp8=scheme == "fp8")
            packed_bytes = sum(map(prod, shapes)) * dtype.itemsize
            one_copy_bytes += packed_bytes
            all_copies_bytes += max(1, backend.weight_copies - 1) * packed_bytes
            # The codes of fp8 stay in the memory-mapped file. Codes of other schemes are freed where
            # the weights can be restored from packed ones, which are float32 then.
            if scheme == "fp8":
                one_copy_bytes -= code_bytes(config, scheme, shapes)
            elif scheme is not None and dtype == torch.float32:
                one_copy_bytes -= code_bytes(config, scheme, shapes)
                all_copies_bytes -= code_bytes(config, scheme, shapes)
            if not backend.can_pack(config.hidden_size, config.hidden_size) and not shapes:
                # A matmul of many rows first dequantizes all linears that it computes.
                largest = max(sum(map(prod, fused)) for fused in fused_quantized_shapes(config))
                all_copies_bytes += largest * dtype.itemsize + DEQUANTIZATION_BYTES
        vision = None if backend.uses_main_memory else config.vision
        vision_bytes = 0 if vision is None else workspace_bytes(vision, dtype.itemsize)
        return cls(
            backend,
            settings,
            one_copy_bytes,
            all_copies_bytes,
            reserved_adapter_bytes,
            vision_bytes,
            offload_bytes,
        )

    @property
    def fixed_bytes(self) -> int:
        """The memory of the weights, the adapters and the vision tower, in bytes."""
        return self.all_copies_bytes + self.adapter_bytes + self.vision_bytes

    @property
    def minimum_bytes(self) -> int:
        """The minimum memory in addition to weights and adapters, in bytes."""
        return self._divide(0, 0).divided_bytes

    def budget_for(self, available_bytes: float) -> ModelMemory:
        """Return the budgets for `available_bytes` of memory.

        The sizes of sampler steps and micro-batches are chosen for `available_bytes`. If the
        KV cache does not fit in addition, the smallest sizes are used instead.
        """
        budget = self._divide(available_bytes, sizing_bytes=available_bytes)
        if budget.divided_bytes > available_bytes:
            budget = self._divide(available_bytes, sizing_bytes=0)
        if self.backend.uses_main_memory or available_bytes == inf:
            return budget
        # The KV cache of a sampler that runs at the same time is not subtracted, because it may be
        # empty.
        trainer = self._offloading(budget.trainer, available_bytes)
        longest = trainer.longest_sequence(self.backend, available_bytes)
        if trainer.offload_above is not None:
            longest = min(longest, self._max_offloaded_tokens())
        return replace(budget, trainer=replace(trainer, max_sequence_tokens=longest))

    def _offloading(self, trainer: TrainerSettings, available_bytes: float) -> TrainerSettings:
        """Return the settings that offload the layers' inputs of sequences that do not fit."""
        longest = trainer.longest_sequence(self.backend, available_bytes)
        if longest >= min(self.backend.config.max_context, self._max_offloaded_tokens()):
            return trainer
        return replace(trainer, offload_above=longest)

    def _max_offloaded_tokens(self) -> int:
        """Return the longest sequence whose layer inputs fit into main memory."""
        config = self.backend.config
        if self.offload_bytes == inf:
            return config.max_context
        # Torch allocates pinned memory in powers of two.
        layer_bytes = int(self.offload_bytes) // config.num_layers
        return (1 << layer_bytes.bit_length()) // 2 // input_bytes(self.backend)

    def _divide(self, available_bytes: float, sizing_bytes: float) -> ModelMemory:
        """Divide `available_bytes` among the budgets.

        The sizes of sampler steps and micro-batches are chosen as if `sizing_bytes` were available,
        so `sizing_bytes` = 0 gives the smallest sizes. The KV cache gets the remainder of
        `available_bytes`, or its minimum. Limits that the user has set are used unchanged.
        """
        user_limits = {
            name: value for name, value in self.settings.memory_limits.items() if value is not None
        }
        sampler = self._sampler_settings(sizing_bytes, user_limits.get("max_batch"))
        sampling_bytes = sampler.workspace_bytes(self.backend)
        prefix_cache_bytes = user_limits.get(
            "prefix_cache_bytes", self._limit_on_cpu(sampler.prefix_cache_bytes, sizing_bytes / 8)
        )
        kv_cache_bytes = user_limits.get("kv_cache_bytes")
        cache_bytes = prefix_cache_bytes + (
            max_pool_bytes(kv_cache_bytes) if kv_cache_bytes is not None else 0
        )
        if "micro_batch_tokens" in user_limits:
            trainer = TrainerSettings(user_limits["micro_batch_tokens"])
        else:
            trainer = self._trainer_settings(
                (sizing_bytes - sampling_bytes) / 2
                if kv_cache_bytes is None
                else sizing_bytes - sampling_bytes - cache_bytes
            )
        training_bytes = trainer.reserved_bytes(self.backend)
        if kv_cache_bytes is None:
            fitting_bytes = self._limit_on_cpu(
                sampler.kv_cache_bytes,
                max_reservable_bytes(
                    available_bytes - sampling_bytes - cache_bytes - training_bytes
                ),
            )
            min_state_bytes = _MIN_RECURRENT_STATES * state_bytes(
                self.backend.config, self.backend.dtype
            )
            min_position_bytes = _MIN_KV_CACHE_TOKENS * self.backend.kv_spec.bytes_per_position
            kv_cache_bytes = max(fitting_bytes, min_position_bytes + min_state_bytes)
        return ModelMemory(
            weight_bytes=self.all_copies_bytes,
            adapter_bytes=self.adapter_bytes,
            sampler=replace(
                sampler, kv_cache_bytes=kv_cache_bytes, prefix_cache_bytes=prefix_cache_bytes
            ),
            cache_bytes=max_pool_bytes(kv_cache_bytes) + prefix_cache_bytes,
            sampling_bytes=sampling_bytes,
            trainer=trainer,
            training_bytes=training_bytes,
        )

    def _sampler_settings(self, sizing_bytes: float, max_batch: int | None) -> SamplerSettings:
        """Return the largest settings whose workspace fits into a quarter of `sizing_bytes`."""
        default = SamplerSettings()
        step_sizes = (
            ((default.max_batch, default.max_prefill_tokens_per_step),)
            if self.backend.uses_main_memory
            else _GPU_STEP_SIZES
        )
        candidates = [
            replace(default, max_batch=max_batch or rows, max_prefill_tokens_per_step=tokens)
            for rows, tokens in step_sizes
        ]
        fitting = (
            candidate
            for candidate in candidates
            if candidate.workspace_bytes(self.backend) <= sizing_bytes / 4
        )
        return next(fitting, candidates[-1])

    def _trainer_settings(self, available_bytes: float) -> TrainerSettings:
        """Return the largest micro-batches that fit into `available_bytes`, else the smallest."""
        max_tokens = TrainerSettings().micro_batch_tokens if self.backend.uses_main_memory else inf
        candidates = [
            TrainerSettings(tokens) for tokens in _MICRO_BATCH_TOKENS if tokens <= max_tokens
        ]
        candidates += [
            TrainerSettings(tokens, recompute=True) for tokens in _RECOMPUTED_MICRO_BATCH_TOKENS
        ]
        fitting = (
            candidate
            for candidate in candidates
            if candidate.reserved_bytes(self.backend) <= available_bytes
        )
        return next(fitting, candidates[-1])

    def _limit_on_cpu(self, default: int, available: float) -> int:
        """Return the default size of a budget in bytes, at least 0.

        It is `available` on a GPU, and the smaller of `available` and `default` on a CPU.
        """
        return int(max(0, min(available, default) if self.backend.uses_main_memory else available))


def _dequantized_shapes(
    config: ModelConfig, backend: Backend, *, is_fp8: bool
) -> list[tuple[int, int]]:
    """Return the shapes (out, in) of the quantized weights that the backend packs dequantized."""
    return [
        shape
        for shapes in fused_quantized_shapes(config)
        if backend.packs_dequantized(
            sum(fan_out for fan_out, _ in shapes), shapes[0][1], is_fp8=is_fp8
        )
        for shape in shapes
    ]


def _planned_rank(config: ModelConfig) -> int:
    """Return the rank of the adapter for which memory is planned.

    In a mixture of experts every expert has its own matrices, so an adapter of rank 32 may be
    larger than the base model. So its rank is 32 divided by the number of experts per token, and at
    least 1.
    """
    return max(1, _DENSE_PLANNED_RANK // max(1, config.experts_per_token))


def usable_bytes(device: torch.device) -> int | None:
    """Return the bytes of device memory for base models and their work, or None if unknown.

    On a GPU that is 95% of the memory, limited by the memory that is free now. The rest is for the
    driver and for fragmentation. On a CPU it is 80% of the main memory.
    """
    if not Device(device).is_gpu:
        total = main_memory_bytes()
        return None if total is None else total * 4 // 5
    free, total = torch.cuda.mem_get_info(device)
    # Also count the blocks that torch's caching allocator has reserved but does not use.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total * 19 // 20, free - total // 40)


def main_memory_bytes() -> int | None:
    """Return the main memory in bytes, limited by this process's control group (cgroup).

    Return None if the system does not report it.
    """
    limits: list[int] = []
    with suppress(ValueError, OSError, AttributeError):  # not every system supports sysconf
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError):
        limits += _control_group_limits(
            Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text()
        )
    return min(limits, default=None)


def _control_group_limits(root: Path, membership: str) -> list[int]:
    """Return the memory limits in bytes of this process's control groups and their ancestors.

    `root`: the mount point of cgroups. `membership`: the content of /proc/self/cgroup. The value
    "max" means no limit.
    """
    limits: list[int] = []
    for line in membership.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root_group, name = (
            (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        )
        own_group = root_group / group.lstrip("/")
        for directory in (own_group, *own_group.parents):
            with suppress(OSError, ValueError):
                limits.append(int((directory / name).read_text()))
            if directory == root_group:
                break
    return limits


def adapter_bytes(backend: Backend, lora: LoraConfig) -> AdapterBytes:
    """Return the memory that an adapter needs for training and for sampling, in bytes.

    The part for training includes the part for sampling.
    """
    layout, itemsize = LoraLayout(backend.config, lora), backend.dtype.itemsize
    forward, backward = backend.packed_adapter_sizes(layout)
    sampling = itemsize * (layout.size + forward)
    return AdapterBytes(
        4 * _NUM_FLOAT32_VECTORS * layout.size + sampling + itemsize * backward, sampling
    )


def gib(size: float) -> str:
    """Format a size in bytes for people, such as "1.5 GiB" or "300 MiB"."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
