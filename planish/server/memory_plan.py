"""How much memory a server may come to use, told at its start.

Bounds, not measurements: what each base model has of its device (engine/memory.py), and what the
server itself holds of adapters, requests and results. On a CPU weights that are used in the dtype
of their files are mapped, so the operating system may drop them from memory and read them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planish.engine.memory import RUNTIME_BYTES, DeviceMemory, ModelMemory, gib
from planish.engine.settings import EngineSettings
from planish.model.weights import weight_files
from planish.server.exchange import ALL_BODIES
from planish.server.settings import ServerSettings


@dataclass(frozen=True)
class MemoryPlan:
    """Of the whole server."""

    device: str
    """Where models and adapters are: "cpu", or the name of a GPU, whose memory is then another than
    that of the rest.
    """
    models: Mapping[str, ModelMemory]
    """By name; two names of one directory share what it has."""
    adapters: int
    requests: int
    """Requests and results."""

    @property
    def computing(self) -> int:
        """On the device."""
        return (
            sum({id(model): model.total for model in self.models.values()}.values()) + self.adapters
        )

    @property
    def serving(self) -> int:
        """Besides, always in main memory."""
        return RUNTIME_BYTES + self.requests

    def __str__(self) -> str:
        if self.device == "cpu":
            first = f"memory: up to {gib(self.computing + self.serving)}"
        else:
            first = f"memory: up to {gib(self.computing)} of {self.device}, and {gib(self.serving)} of main memory"
        lines = [
            f"  {name}: weights {gib(model.weights)}, keys and values up to {gib(model.keys_values)}, "
            f"a sampling step {gib(model.sampling)}, a training step {gib(model.training)}"
            for name, model in self.models.items()
        ]
        lines.append(
            f"  adapters up to {gib(self.adapters)}, requests and results up to {gib(self.requests)}"
        )
        return "\n".join([first, *lines])


def device_memory(
    models: Mapping[str, Path], engine: EngineSettings, settings: ServerSettings
) -> DeviceMemory:
    """Of a server of `models`, directories by name."""
    return DeviceMemory(engine, list(models.values()), settings.adapter_memory_bytes)


def memory_plan(
    models: Mapping[str, Path], memory: DeviceMemory, settings: ServerSettings
) -> MemoryPlan:
    """UserError if one of the models has too little; UnknownModelError and its kin if one cannot be
    served.
    """
    for path in models.values():
        weight_files(path)
    return MemoryPlan(
        str(memory.device),
        {name: memory.claim(path) for name, path in models.items()},
        settings.adapter_memory_bytes,
        settings.request_memory_bytes + settings.result_memory_bytes + ALL_BODIES,
    )
