"""The base models of one engine, each loaded at its first use.

All adapters and samplers of a base model share its weights. A name is resolved once, and two names
of one directory share the weights. The caller waits while a model is loaded. So if the model cannot
be loaded, the call that named it raises the error.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from planish.engine.agreement import measure_difference, warn_of_difference
from planish.engine.constraints.cache import GrammarCache
from planish.engine.memory import DeviceMemory, ModelMemory, gib
from planish.engine.numerics import Numerics, describe_numerics
from planish.engine.sampling.sampler import Sampler
from planish.engine.settings import (
    EngineSettings,
    choose_device,
    choose_dtype,
    head_shape,
    kernel_shapes,
    shard_devices,
)
from planish.engine.training.trainer import Trainer
from planish.errors import UnknownModelError, UnsupportedError, UserError
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.decoder.tensor_parallel.decoder import ShardedDecoder, start_shards
from planish.model.decoder.tensor_parallel.shards import check_shardable, shard_config
from planish.model.device import Device, accumulate_in_float32
from planish.model.kernels.choose import choose_backend, fastest_backend
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.self_test.process import interrupt_self_tests
from planish.model.kernels.self_test.verdicts import Verdict
from planish.model.kernels.triton.families import supported_families
from planish.model.kernels.triton.self_test import check_kernels
from planish.model.layers.quantization import check_quantizable
from planish.model.loading import load_decoder
from planish.model.sources.resolve import checked_mapping, resolve_model
from planish.model.sources.weights import weights_fingerprint
from planish.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BaseModel:
    """One set of base weights on the device, with its trainer and sampler."""

    def __init__(self, directory: Path, settings: EngineSettings, memory: ModelMemory) -> None:
        """Load the weights in `directory`, and prepare the kernels, the trainer and the sampler.

        On a GPU this also checks the kernels and records CUDA graphs. `memory` has the budgets of
        the trainer and the sampler.
        """
        device = choose_device(settings.device)
        # torch allocates pinned memory through the current GPU. If that were still the first GPU, a
        # model on another GPU would occupy memory of the first GPU too.
        Device(device).make_current()
        config = ModelConfig.from_directory(directory)
        check_quantizable(config, settings.quantize)
        if settings.deterministic is True and config.hf is not None:
            raise UnsupportedError(
                f"deterministic=True cannot be kept for {config.hf.architecture}, because torch "
                "computes its norms, RoPE and activations, whose last bits may depend on the "
                "batch; leave deterministic out"
            )
        if Device(device).is_gpu:
            accumulate_in_float32()
            _use_expandable_segments()
        # Check the kernels before the weights are loaded, because the check itself needs temporary
        # memory.
        num_shards = settings.num_shards
        local_config = config
        if num_shards > 1:
            check_shardable(config, num_shards, settings.quantize)
            local_config = shard_config(config, num_shards)
        backend, verdicts = checked_backend(directory, local_config, settings)
        self.backend: Backend = backend
        self.directory = directory
        self.config = config
        self.fingerprint = weights_fingerprint(directory)
        """Fingerprint of the weights; `config.fingerprint()` is that of the architecture."""
        self.quantize = settings.quantize
        """The quantization scheme of the weights, or None."""
        self._sharded_decoder: ShardedDecoder | None = None
        """The decoder, if several processes share the model."""
        if num_shards > 1:
            families = [verdict.family for verdict in verdicts if verdict.passed]
            devices = shard_devices(device, num_shards)
            make_backend = partial(fastest_backend, gpu_families=families)
            self._sharded_decoder = start_shards(
                directory, config, self.backend, devices, make_backend
            )
            self.decoder: BaseDecoder = self._sharded_decoder
            self.backend = self.decoder.backend
        else:
            self.decoder = load_decoder(directory, self.backend, self.quantize)
        self._requires_batch_invariance = settings.deterministic is True
        self.trainer = Trainer(self.decoder, memory.trainer)
        self._tokenizer = _LazyTokenizer(directory)
        # Pass a method of `_LazyTokenizer`, because a method of this object would create a
        # reference cycle. Without one, the memory is freed with the last reference, not at a later
        # collection.
        self.grammars = GrammarCache(self._tokenizer.load, config.vocab_size)
        self.sampler = Sampler(
            self.decoder,
            memory.sampler,
            self._tokenizer.decode,
            self.grammars,
            shares_prefixes=settings.share_prefix_cache,
            vocabulary_entry=self._tokenizer.vocabulary_entry,
        )
        self.sampler.record_cuda_graphs()
        self._difference: float | None = None
        if config.hf is not None:
            self._difference = measure_difference(self.decoder, self.sampler, self.trainer)
        elif Device(device).is_gpu:
            self._difference = warn_of_difference(self.decoder, self.sampler, self.trainer)

    def numerics(self) -> Numerics:
        """Return a description of the numerics: kernels, batch invariance, and how closely sampler
        and trainer agree.
        """
        return describe_numerics(self.backend, self.quantize, self._difference)

    def check_rank(self, rank: int) -> None:
        """Raise UserError if `deterministic=True` is impossible for adapters of this rank."""
        # Probe the rank here even if the result is not needed. Otherwise the engine thread would
        # probe it at the first use and delay other requests.
        tiling = self.backend.tiling
        is_invariant = tiling is None or tiling.is_invariant(rank)
        if self._requires_batch_invariance and not is_invariant:
            raise UserError(
                f"rank={rank}: deterministic=True cannot be kept, because torch's matmuls of this "
                "rank depend on the batch on this machine; give another rank, or deterministic=None"
            )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.decoder.device

    def make_current(self) -> None:
        """Make this model's GPU the current GPU of the calling thread."""
        Device(self.device).make_current()

    def synchronize(self) -> None:
        """Wait until the device has finished the work on this thread's current stream."""
        Device(self.device).synchronize()

    def is_lost(self) -> bool:
        """Return whether the device is unusable, as a GPU is after an illegal memory access, or
        whether another process that shares the model has ended.
        """
        decoder = self._sharded_decoder
        return (decoder is not None and decoder.is_lost) or Device(self.device).is_lost()

    def close(self) -> None:
        """End the other processes that share the model."""
        if self._sharded_decoder is not None:
            self._sharded_decoder.close()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded at its first use."""
        return self._tokenizer.tokenizer


def _longest_sequence(memory: ModelMemory) -> str:
    longest = memory.trainer.max_sequence_tokens
    return "" if longest is None else f"; longest trainable sequence: {longest:,} tokens"


def checked_backend(
    directory: Path, config: ModelConfig, settings: EngineSettings
) -> tuple[Backend, Sequence[Verdict]]:
    """Return the backend of the model in `directory`, and the verdicts on its GPU kernels.

    On a GPU, the kernels are checked if this GPU has no stored verdicts on them.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    verdicts: Sequence[Verdict] = ()
    if Device(device).is_gpu:
        shapes, heads = kernel_shapes(config), head_shape(config, dtype)
        is_quantized = bool(settings.quantize or config.fp8 or config.mxfp4_experts)
        families = supported_families(
            config, is_quantized=is_quantized, has_experts=bool(config.num_experts)
        )
        verdicts = check_kernels(directory, shapes, heads, device, families)
    families = [verdict.family for verdict in verdicts if verdict.passed]
    return choose_backend(config, dtype, device, settings.deterministic, families), verdicts


class _LazyTokenizer:
    """A model's tokenizer, loaded at its first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._directory)

    def load(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""
        return self.tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`.

        Special tokens are part of the text, so that stop strings can contain special tokens.
        """
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def vocabulary_entry(self, token: int) -> str | None:
        """Return the raw vocabulary entry of a token id, or None if the id has no entry."""
        text = self.tokenizer.convert_ids_to_tokens(token)
        return text if isinstance(text, str) else None


def _use_expandable_segments() -> None:
    """Make torch's caching allocator use expandable segments, which prevents fragmentation.

    The setting applies to the whole process, unless environment variables configure the allocator.
    By default the allocator caches each freed block for requests of a similar size. When a KV cache
    pool grows, it replaces the tensors of each layer by larger ones. The freed blocks are too small
    for the next growth. The allocator cannot merge them, because cached prefixes lie between them.
    The memory budgets (memory.py) do not include such blocks.

    The function does nothing on WSL, where mapping an expandable segment fails on some GPUs
    (pytorch issue 192330).
    """
    configured = os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    if not configured and not is_wsl():
        # Setting these variables now has no effect, because torch reads them at import.
        torch._C._accelerator_setAllocatorSettings(  # pyright: ignore[reportPrivateUsage]
            "expandable_segments:True"
        )


def is_wsl(release: Path = Path("/proc/sys/kernel/osrelease")) -> bool:
    """Return whether this is the Windows Subsystem for Linux, according to the kernel's name."""
    try:
        return "microsoft" in release.read_text().lower()
    except OSError:
        return False


class BaseModels:
    """The base models of an engine by name. The class is thread-safe."""

    def __init__(
        self,
        models: Mapping[str, str] | None,
        settings: EngineSettings,
        memory: DeviceMemory,
        only_these: bool = False,
    ) -> None:
        """Create the collection without loading anything.

        `models` maps names to directories or .gguf files; an invalid mapping raises UserError. With
        `only_these`, every other name is unknown. Without `only_these`, another name may be a path
        or the name of a model to download.
        """
        self._only_these = only_these
        self._mapping = checked_mapping(models)
        self._settings = settings
        self._memory = memory
        self._lock = threading.Lock()
        self._load_locks: dict[Path, threading.Lock] = {}
        """One lock per directory, locked while its base model is loaded. So different base models
        can be loaded at the same time.
        """
        self._directories: dict[str, Path] = {}
        self._loaded: dict[Path, BaseModel] = {}

    def get(self, name: str) -> BaseModel:
        """Return the base model of this name; load it if necessary.

        Raises UnknownModelError or a similar error if the model cannot be loaded.
        """
        directory = self.directory(name)
        with self._lock:
            load_lock = self._load_locks.setdefault(directory, threading.Lock())
        with load_lock:
            if directory not in self._loaded:
                # Load in a short-lived thread. OpenMP keeps workers for every living thread that
                # has computed. If there are more workers than cores, all of them sleep between
                # matmuls, which halves the sampler's speed.
                with ThreadPoolExecutor(1, thread_name_prefix="planish-load") as executor:
                    loading = executor.submit(self._load, directory)
                    try:
                        self._loaded[directory] = loading.result()
                    except KeyboardInterrupt:
                        # The executor waits for its thread, and the first self-test of a GPU takes
                        # a minute or two.
                        interrupt_self_tests()
                        raise
            return self._loaded[directory]

    def _load(self, directory: Path) -> BaseModel:
        memory = self._memory.claim(directory)
        try:
            model = BaseModel(directory, self._settings, memory)
        except BaseException:
            self._memory.release(directory)
            raise
        names_of_directory = [
            name for name, found in self._directories.items() if found == directory
        ]
        logging.getLogger(__name__).info(
            "%s: %s; threads: %d; memory up to %s%s",
            names_of_directory[0],
            model.numerics().summary,
            torch.get_num_threads(),
            gib(memory.total_bytes),
            _longest_sequence(memory),
        )
        return model

    def directory(self, name: str) -> Path:
        """Return the directory with the files of this base model; download them if necessary."""
        # Resolve the name without a lock, because it may need a download. Two threads that resolve
        # the same name find the same directory.
        if name in self._directories:
            return self._directories[name]
        if self._only_these and name not in self._mapping:
            raise UnknownModelError(
                f"base_model={name[:200]!r} is not served by this process, which was started with "
                f"{', '.join(self._mapping)}; its operator can start it with --model "
                f"{name[:200]}=PATH"
            )
        return self._directories.setdefault(name, resolve_model(name, self._mapping))

    def check_memory(self, names: Sequence[str]) -> dict[str, ModelMemory]:
        """Return the memory of these base models, by name. Raise UserError unless they fit on the
        device together. Nothing is loaded.
        """
        directories = {name: self.directory(name) for name in names}
        try:
            return {name: self._memory.claim(path) for name, path in directories.items()}
        finally:
            for directory in directories.values():
                self._memory.release(directory)

    def loaded_configs(self) -> dict[str, ModelConfig]:
        """Return the config of each loaded model, by every name in use."""
        # Read without the locks, because a lock stays locked while a model is being loaded.
        loaded = {
            name: self._loaded.get(directory) for name, directory in list(self._directories.items())
        }
        return {name: model.config for name, model in loaded.items() if model is not None}

    def loaded(self) -> list[BaseModel]:
        """Return the base models that are loaded."""
        return list(self._loaded.values())

    @property
    def mapping(self) -> dict[str, str]:
        """A copy of the configured mapping from names to directories or .gguf files."""
        return dict(self._mapping)

    def clear(self) -> None:
        """Drop all base models and release their memory claims."""
        with self._lock:
            load_locks = list(self._load_locks.items())
        for directory, lock in load_locks:
            with lock:
                model = self._loaded.pop(directory, None)
                if model is not None:
                    model.close()
                self._memory.release(directory)
