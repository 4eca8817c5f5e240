"""Findings of `planish doctor` about base models and the memory that they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from planish.doctor.findings import Finding, first_line
from planish.engine.memory import DeviceMemory, gib, main_memory_bytes, usable_bytes
from planish.engine.settings import EngineSettings
from planish.errors import PlanishError, UnknownModelError
from planish.files import short_path
from planish.model.architecture.config import ModelConfig
from planish.model.device import Device
from planish.model.layers.quantization import check_quantizable
from planish.model.sources.listing import list_models
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model


def model_findings() -> Iterator[Finding]:
    """Yield a finding for each known base model and each unusable entry of PLANISH_MODELS."""
    for entry in list_models():
        value = {"source": entry.source, "path": str(entry.path) if entry.path else None}
        if entry.problem is not None:
            text = f"{entry.source}: {first_line(entry.problem)}"
            yield Finding(entry.name, text, value, "correct the entry of PLANISH_MODELS")
        elif entry.path is None:
            text = (
                "not on this machine; downloaded at its first use, or by `planish models --fetch`"
            )
            yield Finding(entry.name, text, value)
        else:
            yield Finding(entry.name, f"{entry.source}, {short_path(entry.path)}", value)


def local_directory(name: str | None) -> Path | None:
    """Return the directory of the base model `name`, or None if it cannot be loaded.

    `name` None stands for the default model, SmolLM2-135M-Instruct.
    """
    try:
        return resolve_model(name or DEFAULT_MODEL, fetch=False)
    except PlanishError:
        return None


def memory_findings(name: str | None, settings: EngineSettings) -> Iterator[Finding]:
    """Yield the memory of this machine, and how an engine would divide it for a base model.

    `name`: the base model. None stands for the default model, if it is on this machine.
    """
    total_bytes = main_memory_bytes()
    if total_bytes is not None:
        yield Finding("main_memory", gib(total_bytes), total_bytes)
    plan = DeviceMemory(settings)
    usable_memory_bytes = usable_bytes(plan.device)
    if usable_memory_bytes is not None:
        place = f"the memory of {plan.device}" if Device(plan.device).is_gpu else "main memory"
        yield Finding("usable", f"{gib(usable_memory_bytes)} of {place}", usable_memory_bytes)
    try:
        directory = resolve_model(name or DEFAULT_MODEL, fetch=False)
    except UnknownModelError as error:
        yield _missing_model_finding(name, error)
        return
    except PlanishError as error:
        remedy = "name a directory that `planish models` lists"
        yield Finding("plan", f"{name or DEFAULT_MODEL}: {error}", {"error": str(error)}, remedy)
        return
    yield plan_finding(name or DEFAULT_MODEL, directory, plan, settings.quantize)


def _missing_model_finding(name: str | None, error: UnknownModelError) -> Finding:
    if name is None:
        text = f"no memory plan, because {DEFAULT_MODEL} is not on this machine yet"
        return Finding("plan", text, {"model": DEFAULT_MODEL})
    value = {"model": name, "error": str(error)}
    remedy = (
        "give the path of a model, or a name that `planish models` lists; `planish models --fetch "
        f"{name}` downloads a model from the hub"
    )
    return Finding("plan", f"--model {name}: not on this machine", value, remedy)


def plan_finding(
    name: str, directory: Path, device_memory: DeviceMemory, scheme: str | None
) -> Finding:
    """Return how an engine would divide the memory for the base model in `directory`.

    `scheme`: the quantization of its weights, or None.
    """
    remedy = "use the other scheme, or none"
    try:
        check_quantizable(ModelConfig.from_directory(directory), scheme)
        remedy = "use a smaller base model, or lower the sizes that the message names"
        plan = device_memory.claim(directory)
    except PlanishError as error:
        value = {"model": name, "quantize": scheme, "error": str(error)}
        return Finding("plan", f"{name}: {error}", value, remedy)
    weights = f"{scheme} weights" if scheme else "weights"
    text = (
        f"{name}: up to {gib(plan.total_bytes)}: {weights} {gib(plan.weight_bytes)}, an adapter in "
        f"training {gib(plan.adapter_bytes)}, keys and values {gib(plan.cache_bytes)}, a sampling "
        f"step {gib(plan.sampling_bytes)}, a training step {gib(plan.training_bytes)} "
        f"({plan.trainer.micro_batch_tokens:,} tokens); at most {plan.sampler.max_batch} samples "
        "at once"
    )
    if plan.trainer.max_sequence_tokens is not None:
        text += f"; longest trainable sequence: {plan.trainer.max_sequence_tokens:,} tokens"
    if plan.trainer.offload_above is not None:
        text += (
            f" (above {plan.trainer.offload_above:,}, the layers' inputs are kept in main memory)"
        )
    value = {
        "model": name,
        "quantize": scheme,
        "total": plan.total_bytes,
        "weights": plan.weight_bytes,
        "adapters": plan.adapter_bytes,
        "sampler": asdict(plan.sampler),
        "keys_values": plan.cache_bytes,
        "sampling": plan.sampling_bytes,
        "trainer": asdict(plan.trainer),
        "training": plan.training_bytes,
    }
    return Finding("plan", text, value)
