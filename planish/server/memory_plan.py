"""How much memory a server may come to use, told at its start.

Bounds, not measurements: base weights, what the samplers may reserve for keys and values, what one micro-batch keeps for its backward pass,
and what the server itself holds of adapters, requests and results. Weights that are used in the dtype of their files are mapped, so the
operating system may drop them from memory and read them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planish.engine.settings import EngineSettings, choose_device, choose_dtype
from planish.model.config import ModelConfig
from planish.model.weights import weight_files
from planish.server.exchange import ALL_BODIES
from planish.server.settings import ServerSettings

GIB = 1 << 30
_RUNTIME_BYTES = 1300 << 20
"""The interpreter with torch and transformers, and the kernels that oneDNN makes and keeps."""


@dataclass(frozen=True)
class ModelMemory:
    """Of one base model, in bytes, at most."""

    name: str
    weights: int
    keys_values: int
    """Of running samples and known prefixes."""
    training: int
    """Of one micro-batch."""

    @property
    def total(self) -> int:
        return self.weights + self.keys_values + self.training


@dataclass(frozen=True)
class MemoryPlan:
    """Of the whole server."""

    device: str
    """Where models and adapters are: "cpu", or the name of a GPU, whose memory is then another than that of the rest."""
    models: Sequence[ModelMemory]
    adapters: int
    requests: int
    """Requests and results."""

    @property
    def computing(self) -> int:
        """On the device."""
        return sum(model.total for model in self.models) + self.adapters

    @property
    def serving(self) -> int:
        """Besides, always in main memory."""
        return _RUNTIME_BYTES + self.requests

    def __str__(self) -> str:
        if self.device == "cpu":
            first = f"memory: up to {_gib(self.computing + self.serving)}"
        else:
            first = f"memory: up to {_gib(self.computing)} of {self.device}, and {_gib(self.serving)} of main memory"
        lines = [
            f"  {model.name}: weights {_gib(model.weights)}, keys and values up to {_gib(model.keys_values)}, "
            f"a training step {_gib(model.training)}"
            for model in self.models
        ]
        lines.append(f"  adapters up to {_gib(self.adapters)}, requests and results up to {_gib(self.requests)}")
        return "\n".join([first, *lines])


def memory_plan(models: Sequence[tuple[str, Path]], engine: EngineSettings, settings: ServerSettings) -> MemoryPlan:
    """Of a server of `models`, names and directories."""
    return MemoryPlan(
        str(choose_device(engine.device)),
        [model_memory(name, path, engine) for name, path in models],
        settings.adapter_memory_bytes,
        settings.request_memory_bytes + settings.result_memory_bytes + ALL_BODIES,
    )


def model_memory(name: str, directory: Path, settings: EngineSettings) -> ModelMemory:
    """DamagedFileError and its kin if the directory is no model that can be served."""
    config = ModelConfig.from_directory(directory)
    device = choose_device(settings.device)
    itemsize = choose_dtype(settings.dtype, device).itemsize
    # Beside the file, which stays mapped, a CPU has narrow weights packed for its products, and packed once more for gradients (model/linear.py).
    copies = 3 if device.type == "cpu" and itemsize == 2 else 1
    return ModelMemory(
        name,
        weights=copies * sum((directory / file).stat().st_size for file in weight_files(directory)),
        keys_values=settings.sampler.kv_cache_bytes + settings.sampler.prefix_cache_bytes,
        training=settings.trainer(config).held_bytes(config, itemsize, None if device.type == "cpu" else 4),
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
