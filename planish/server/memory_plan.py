"""How much memory a server may use at most."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planish.engine.memory import RUNTIME_BYTES, DeviceMemory, ModelMemory, gib
from planish.engine.settings import EngineSettings
from planish.fleet.link import EngineMemory
from planish.fleet.served import ServedFleet
from planish.model.architecture.config import ModelConfig
from planish.model.sources.weights import weight_files
from planish.server.http.budgets import MAX_TOTAL_BODIES
from planish.server.openai.models import (
    MAX_CHARACTERS_PER_TOKEN,
    MAX_TOKENIZED_BYTES,
    TOKENIZER_BYTES_PER_CHARACTER,
)
from planish.server.settings import MemorySettings


@dataclass(frozen=True)
class MemoryPlan:
    """An upper bound on the memory of a server. The bound is computed, not measured. It is the sum
    of the device memory of each base model (engine/memory.py) and of the limits for adapters,
    requests and results, in bytes. On a CPU, weights that are used in the dtype of their files are
    memory-mapped, so the operating system may evict and reread them.
    """

    device: str
    """The device of the base models and adapters: "cpu", or the name of a GPU."""
    models: Mapping[str, ModelMemory]
    """The memory of each base model, by name. Names with the same directory share one object."""
    adapters: int
    """The limit for adapters."""
    requests: int
    """The limit for requests, their tokenization, and results."""

    @property
    def computing(self) -> int:
        """Bytes for base models and adapters, on the device."""
        return (
            sum({id(model): model.total_bytes for model in self.models.values()}.values())
            + self.adapters
        )

    @property
    def serving(self) -> int:
        """Bytes for the process, requests and results. They are in main memory on every device."""
        return RUNTIME_BYTES + self.requests

    @property
    def main_memory(self) -> int:
        """Bytes of main memory."""
        return self.serving + (self.computing if self.device == "cpu" else 0)

    def __str__(self) -> str:
        if self.device == "cpu":
            first = f"memory: up to {gib(self.main_memory)}"
        else:
            first = (
                f"memory: up to {gib(self.computing)} of {self.device}, "
                f"and {gib(self.serving)} of main memory"
            )
        lines = [
            f"  {name}: weights {gib(model.weight_bytes)}, keys and values up to "
            f"{gib(model.cache_bytes)}, a sampling step {gib(model.sampling_bytes)}, a training "
            f"step {gib(model.training_bytes)}"
            for name, model in self.models.items()
        ]
        lines.append(f"  adapters up to {gib(self.adapters)}")
        if self.requests:
            lines[-1] += f", requests and results up to {gib(self.requests)}"
        return "\n".join([first, *lines])


@dataclass(frozen=True)
class FleetMemoryPlan:
    """An upper bound on the memory of a server's replicas, which each of them has computed for its
    own device, and of the server's process.
    """

    replicas: Mapping[int, EngineMemory]
    """The memory of each replica, by number."""
    num_here: int
    """The number of replicas on the machine of the server's process."""
    adapters: int
    """The limit for adapters of each replica."""
    requests: int
    """See `MemoryPlan`."""

    @property
    def main_memory(self) -> int:
        """Bytes of main memory of the server's machine."""
        plans = [self._plan_of(memory).main_memory for memory in self.replicas.values()]
        return RUNTIME_BYTES + self.requests + self.num_here * max(plans, default=0)

    def __str__(self) -> str:
        numbers: dict[str, list[int]] = {}
        for number, memory in self.replicas.items():
            numbers.setdefault(str(self._plan_of(memory)), []).append(number)
        lines = [
            f"replicas {', '.join(map(str, equal))}, each: {text}"
            for text, equal in numbers.items()
        ]
        own = gib(RUNTIME_BYTES + self.requests)
        return "\n".join([*lines, f"the server's process: up to {own} of main memory"])

    def _plan_of(self, memory: EngineMemory) -> MemoryPlan:
        return MemoryPlan(memory.device, memory.models, self.adapters, 0)


def device_memory(
    models: Mapping[str, Path], engine: EngineSettings, settings: MemorySettings
) -> DeviceMemory:
    """Return the device memory of a server. `models` maps names to directories."""
    return DeviceMemory(engine, list(models.values()), settings.adapter_memory_bytes)


def memory_plan(
    models: Mapping[str, Path], memory: DeviceMemory, settings: MemorySettings
) -> MemoryPlan:
    """Return the memory plan of a server. Raise UserError if the memory does not suffice for a base
    model, or if a base model cannot be served.
    """
    requests = request_bytes(models, settings)
    return MemoryPlan(
        str(memory.device),
        {name: memory.claim(path) for name, path in models.items()},
        settings.adapter_memory_bytes,
        requests,
    )


def fleet_memory_plan(
    fleet: ServedFleet, settings: MemorySettings, requests: int
) -> FleetMemoryPlan:
    """Return the memory plan of a server with replicas. `requests`: see `request_bytes`."""
    here = [row for row in fleet.status() if row["host"] == socket.gethostname()]
    return FleetMemoryPlan(fleet.memory(), len(here), settings.adapter_memory_bytes, requests)


def request_bytes(models: Mapping[str, Path], settings: MemorySettings) -> int:
    """Return the limit for requests, their tokenization, and results. Raise UserError if a base
    model cannot be served.
    """
    for path in models.values():
        weight_files(path)
    contexts = [ModelConfig.from_directory(path).max_context for path in models.values()]
    text = max([MAX_TOKENIZED_BYTES, *(MAX_CHARACTERS_PER_TOKEN * context for context in contexts)])
    return (
        settings.request_memory_bytes
        + settings.result_memory_bytes
        + MAX_TOTAL_BODIES
        + text * TOKENIZER_BYTES_PER_CHARACTER
    )
