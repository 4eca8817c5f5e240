"""Profile of a GPU (see planish/doctor/gpu/kernel_profile.py).

Unlike the other benchmarks this calls the sampler and the trainer directly, in one thread, so that
steps can be separated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from iteration import datum
from limits import DEVICE, RANK

from planish.doctor.gpu.kernel_profile import Profile, profile_run
from planish.engine.base_models import BaseModel
from planish.engine.memory import DeviceMemory
from planish.engine.settings import EngineSettings
from planish.engine.training.adapters import Adapter
from planish.model.layers.lora import LoraLayout
from planish.service import Sample
from planish.types import Datum, LoraConfig, ModelInput, SampleResponse, SamplingParams

WARM_UP_STEPS, STEPS = 8, 4
"""Decode steps before the profile, and in each timing."""


def profiles(
    directory: Path, settings: EngineSettings, round_spec: Mapping[str, Any]
) -> list[Profile]:
    """Profile one decode step of all samples of the round, and one training micro-batch."""
    base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    return [decode_profile(base, round_spec), training_profile(base, round_spec)]


def decode_profile(base: BaseModel, round_spec: Mapping[str, Any]) -> Profile:
    sampler = base.sampler
    # Prompts with a common prefix are computed in two waves.
    prompt_steps = 2 * math.ceil(
        sum(map(len, round_spec["prompts"])) / sampler.settings.max_prefill_tokens_per_step
    )
    params = SamplingParams(max_tokens=prompt_steps + WARM_UP_STEPS + 4 * STEPS, stop=[], seed=0)
    futures: list[Future[SampleResponse]] = []
    for prompt in round_spec["prompts"]:
        operation = Sample("profile", ModelInput.from_ints(prompt), round_spec["samples"], params)
        sampler.validate(operation)
        futures.append(Future())
        sampler.submit(operation, None, "base", futures[-1])
    for _ in range(prompt_steps + WARM_UP_STEPS):
        sampler.step()

    def run_steps() -> None:
        for _ in range(STEPS):
            sampler.step()

    profile_of_steps = profile_run(
        f"a decode step of {len(round_spec['prompts']) * round_spec['samples']} rows",
        run_steps,
        STEPS,
        DEVICE,
    )
    if any(future.done() for future in futures):
        raise SystemExit(
            "samples ended before the profile did, so not all ran at once: raise kv_cache_gib or "
            "max_batch"
        )
    while sampler.busy:
        sampler.step()
    return profile_of_steps


def training_profile(base: BaseModel, round_spec: Mapping[str, Any]) -> Profile:
    layout = LoraLayout(base.config, LoraConfig(rank=RANK, seed=0))
    adapter = Adapter(layout, base.backend)
    data = micro_batch(round_spec, base.trainer.settings.micro_batch_tokens)
    row_counts: list[float] = []

    def train() -> None:
        call = base.trainer.forward_backward(adapter, data, "importance_sampling")
        while True:
            try:
                next(call)
            except StopIteration as end:
                row_counts.append(end.value.metrics["computed_tokens:sum"])
                return

    profile_of_batch = profile_run("a micro-batch", train, 1, DEVICE)
    return replace(profile_of_batch, title=f"a micro-batch of {row_counts[0]:,.0f} rows")


def micro_batch(round_spec: Mapping[str, Any], budget: int) -> list[Datum]:
    """Return datums for as many of the round's prompts as fit, with answers of random tokens. Their
    logprobs do not matter.
    """
    generator = torch.Generator().manual_seed(0)
    new_tokens, data, rows = round_spec["new_tokens"], [], 0
    for prompt in round_spec["prompts"]:
        rows += len(prompt) + round_spec["samples"] * new_tokens
        if data and rows > budget:
            break
        answers = torch.randint(
            min(prompt), max(prompt) + 1, (round_spec["samples"], new_tokens), generator=generator
        ).tolist()
        data += [datum(prompt, answer, [0.0] * new_tokens, 1.0) for answer in answers]
    return data
