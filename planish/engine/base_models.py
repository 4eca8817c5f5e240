"""The base models of one engine: each is loaded at its first use and shared by all adapters and
samplers on it.

A name is resolved once; two names of one directory share its weights. Loading happens in the
caller's thread, so that a name that cannot be loaded is an error of the call that gave it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from planish.engine.memory import DeviceMemory, ModelMemory, gib
from planish.engine.numerics import Numerics, describe
from planish.engine.sampler import Sampler
from planish.engine.settings import (
    EngineSettings,
    choose_device,
    choose_dtype,
    choose_tiling,
    head_shape,
    kernel_shapes,
)
from planish.engine.trainer import Trainer
from planish.errors import UserError
from planish.model.config import ModelConfig
from planish.model.decoder import Decoder
from planish.model.sources import checked_mapping, resolve_model
from planish.model.weights import weights_fingerprint
from planish.native.gpu_check import admit_checked
from planish.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BaseModel:
    """One set of base weights on the device, with what trains and what samples on them."""

    def __init__(self, directory: Path, settings: EngineSettings, memory: ModelMemory) -> None:
        device = choose_device(settings.device)
        _make_current(device)  # what is pinned for it would else take memory of the first GPU too
        config = ModelConfig.from_directory(directory)
        dtype = choose_dtype(settings.dtype, device)
        if device.type == "cuda":
            _multiply_exactly()
            _join_freed_memory()
            # Before the weights are loaded: the check needs memory of its own for a moment.
            shapes = kernel_shapes(config)
            admit_checked(directory, shapes, head_shape(config, dtype), device)
        self.directory = directory
        self.config = config
        self.fingerprint = weights_fingerprint(directory)
        """Of the weights; `config.fingerprint()` is that of the architecture."""
        self.decoder = Decoder.load(directory, dtype, device)
        tiling = choose_tiling(settings.deterministic, config, dtype, device)
        self._tiling = tiling
        self._must_be_invariant = settings.deterministic is True
        self.trainer = Trainer(self.decoder, memory.trainer, tiling)
        self._texts = _Texts(directory)
        # Nothing that a base model holds leads back to it: who lets go of it is to have its memory
        # at once, not when cycles are looked for.
        self.sampler = Sampler(self.decoder, memory.sampler, self._texts.decode, tiling)
        self.sampler.record()

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    def numerics(self) -> Numerics:
        """Return what to expect of the numbers: kernels, batch invariance, sampler against
        trainer.
        """
        return describe(self.config, self.dtype, self.device, self._tiling)

    def check_rank(self, rank: int) -> None:
        """UserError if `deterministic=True` cannot be kept for adapters of this rank."""
        # Asked in any case: looking at a rank for the first time would keep the engine waiting.
        is_invariant = self._tiling is None or self._tiling.is_invariant(rank)
        if self._must_be_invariant and not is_invariant:
            raise UserError(
                f"rank={rank}: deterministic=True cannot be kept, because torch's matmuls of this "
                "rank depend on the batch on this machine; give another rank, or "
                "deterministic=None"
            )

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def make_current(self) -> None:
        """For the thread that computes: Triton launches on the thread's current GPU, wherever the
        tensors are.
        """
        _make_current(self.device)

    def settle(self) -> None:
        """Wait until the device has done what this thread gave it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def is_lost(self) -> bool:
        """Whether the device takes no more work: a GPU none of a process that has touched memory
        which is not there.

        Waits for all that was begun, on other streams too: a recording that failed leaves work of
        its own behind, on memory that is free now.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._texts.tokenizer


class _Texts:
    """A model's tokenizer, read when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._directory)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens included, so that a stop string can name one."""
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _multiply_exactly() -> None:
    """Sums of bf16 products stay in float32 to their end, and float32 products are of float32: in
    the whole process, as torch has no other switch.

    By default parts of a long sum are added up in bf16, in as many parts as suits the shape, so
    that sampler and trainer would differ by more than their rounding; and containers for GPUs may
    come with TF32 as what float32 means.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")


def _join_freed_memory() -> None:
    """What is freed on a GPU is one memory again, whatever the sizes of its pieces were; in the
    whole process, unless its environment says how memory is kept.

    By default torch keeps each piece for another of its size. Pools of keys and values grow layer
    by layer, beside prefixes that stay: every size that they had would be left behind, in places
    that hold the next one no more, of memory that the plan gives away to the last.

    Not on WSL: mapping an expandable segment fails there on some GPUs (pytorch issue 192330).
    """
    told = os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    if not told and not _is_wsl():
        # Not by these variables, which torch reads when it is imported.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _is_wsl(release: Path = Path("/proc/sys/kernel/osrelease")) -> bool:
    """Whether this is the Windows Subsystem for Linux, by the name of its kernel."""
    try:
        return "microsoft" in release.read_text().lower()
    except OSError:
        return False


def _make_current(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


class BaseModels:
    """Base models by name. Thread-safe."""

    def __init__(
        self, models: Mapping[str, str] | None, settings: EngineSettings, memory: DeviceMemory
    ) -> None:
        self._mapping = checked_mapping(models)
        self._settings = settings
        self._memory = memory
        self._lock = threading.Lock()
        self._loading: dict[Path, threading.Lock] = {}
        """Held while the base model of a directory is loaded: those of others need not wait for it.
        """
        self._directories: dict[str, Path] = {}
        self._loaded: dict[Path, BaseModel] = {}

    def get(self, name: str) -> BaseModel:
        """The base model of this name, loaded now if it is not yet. UnknownModelError and its kin
        if it cannot be.
        """
        directory = self.directory(name)
        with self._lock:
            loading = self._loading.setdefault(directory, threading.Lock())
        with loading:
            if directory not in self._loaded:
                # In a thread that ends: OpenMP keeps workers for every thread that ever computed,
                # and where they are more than the cores, all of them sleep between products, which
                # takes half of the sampler's speed.
                with ThreadPoolExecutor(1, thread_name_prefix="planish-load") as thread:
                    self._loaded[directory] = thread.submit(self._load, directory).result()
            return self._loaded[directory]

    def _load(self, directory: Path) -> BaseModel:
        memory = self._memory.claim(directory)
        try:
            model = BaseModel(directory, self._settings, memory)
        except BaseException:
            self._memory.release(directory)
            raise
        names = [name for name, found in self._directories.items() if found == directory]
        logging.getLogger(__name__).info(
            "%s: %s; threads: %d; memory up to %s",
            names[0],
            model.numerics().summary,
            torch.get_num_threads(),
            gib(memory.total),
        )
        return model

    def directory(self, name: str) -> Path:
        """Where the files of this base model are."""
        # Not under a lock: it may take a download, for which others need not wait; what is found
        # twice at once is the same.
        if name in self._directories:
            return self._directories[name]
        return self._directories.setdefault(name, resolve_model(name, self._mapping))

    def loaded_contexts(self) -> dict[str, int]:
        """The context in tokens of each model that is loaded, by every name that it was asked for."""
        # Not under the lock, which is held as long as a model is being loaded.
        loaded = {
            name: self._loaded.get(directory) for name, directory in list(self._directories.items())
        }
        return {
            name: model.config.max_context for name, model in loaded.items() if model is not None
        }

    @property
    def mapping(self) -> dict[str, str]:
        return dict(self._mapping)

    def clear(self) -> None:
        """Let go of all weights."""
        with self._lock:
            loading = list(self._loading.items())
        for directory, lock in loading:
            with lock:
                self._loaded.pop(directory, None)
                self._memory.release(directory)
