"""`planish doctor --plan MODEL --gpu NAME`: what a model should do on a GPU, computed on paper."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from planish.doctor.findings import Finding, Report, Section
from planish.doctor.gpu.cards import CARDS, Card
from planish.doctor.gpu.random_model import SHAPES, config_directory
from planish.doctor.gpu.roofline import Estimate, decode_estimate, training_estimate
from planish.doctor.models import plan_finding
from planish.engine.memory import DeviceMemory, ModelMemory, gib
from planish.engine.settings import EngineSettings
from planish.errors import UnknownModelError
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend
from planish.model.sources.resolve import resolve_model

CONTEXTS = (1024, 4096, 16384)
ROWS = (1, 16, 64, 128, 256, 512)
LENGTHS = (1024, 8192)
TRAINED_TOKENS = 131_072
USABLE_SHARE = 0.95
"""The share of a GPU's memory that planish uses (see `usable_bytes`)."""
NOTE = (
    "computed from published speeds, bytes, FLOPs and counted launches; nothing here is measured, "
    "and planish has not run on a GPU yet"
)


def plan(model: str, card_name: str, scheme: str | None) -> Report:
    """Return the memory plan and the computed times of a base model on a GPU.

    `model`: a base model on this machine, or a name in SHAPES. `card_name`: a name in CARDS.
    `scheme`: the quantization of the base weights, or None. Raises UnknownModelError if the model
    is neither.
    """
    start_time, card = time.monotonic(), CARDS[card_name]
    with model_directory(model) as directory:
        memory = card_memory(card, scheme)
        sections = [
            Section.gather("gpu", lambda: _card_findings(card)),
            Section("memory", (plan_finding(model, directory, memory, scheme),)),
        ]
        if not sections[-1].findings[0].needs_attention:
            config, planned = ModelConfig.from_directory(directory), memory.claim(directory)
            sections += [
                Section.gather("decoding", lambda: decode_findings(config, card, planned, scheme)),
                Section.gather(
                    "training", lambda: _training_findings(config, card, planned, scheme)
                ),
            ]
    return Report(tuple(sections), time.monotonic() - start_time)


@contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """Yield a directory with the config of a base model.

    A model of SHAPES that is not on this machine has a temporary directory without weights.
    """
    try:
        directory = resolve_model(name, fetch=False)
    except UnknownModelError as error:
        if name not in SHAPES:
            known = [shape for shape in SHAPES if not shape.startswith("tiny")]
            raise UnknownModelError(
                f"--plan {name}: not on this machine; give the path of a model, a name that "
                f"`planish models` lists, or one of {', '.join(known)}"
            ) from error
        with config_directory(name) as directory:
            yield directory
        return
    yield directory


def card_memory(card: Card, scheme: str | None) -> DeviceMemory:
    """Return the memory budgets of an engine on this GPU."""
    dtype = str(card.dtype).removeprefix("torch.")
    return DeviceMemory(
        EngineSettings(device="cpu", dtype=dtype, quantize=scheme),
        device=torch.device("cuda", 0),
        device_bytes=int(card.memory_bytes * USABLE_SHARE),
    )


def _card_findings(card: Card) -> Iterator[Finding]:
    dtype = str(card.dtype).removeprefix("torch.")
    text = (
        f"{card.name}, {gib(card.memory_bytes)}, {card.bandwidth / 1e9:,.0f} GB/s, "
        f"{card.matmul_rate / 1e12:,.0f} TFLOP/s in {dtype}"
    )
    yield Finding("card", text)
    yield Finding("source", NOTE)


def samples_in_memory(config: ModelConfig, card: Card, planned: ModelMemory, context: int) -> int:
    """Return how many samples of `context` positions run at the same time."""
    backend = choose_backend(config, card.dtype, torch.device("cuda", 0), deterministic=False)
    position_bytes = max(1, backend.kv_spec.bytes_per_position)
    return min(
        planned.sampler.max_batch, planned.sampler.kv_cache_bytes // (position_bytes * context)
    )


def decode_findings(
    config: ModelConfig, card: Card, planned: ModelMemory, scheme: str | None
) -> Iterator[Finding]:
    """Yield, for each context, the samples that fit and the times of decoding steps."""
    for context in CONTEXTS:
        if context > config.max_context:
            continue
        most = samples_in_memory(config, card, planned, context)
        name = f"context_{context}"
        if not most:
            yield Finding(name, f"no sample of {context:,} tokens fits", {"samples": 0})
            continue
        sizes = sorted({rows for rows in ROWS if rows < most} | {most})
        steps = {rows: decode_estimate(config, card, rows, context, scheme) for rows in sizes}
        text = f"{most} samples fit; " + "; ".join(
            f"{rows}: {rows / step.seconds:,.0f} tokens/s ({1e3 * step.seconds:.1f} ms a step)"
            for rows, step in steps.items()
        )
        value = {
            "samples": most,
            "steps": {str(rows): _seconds(step) for rows, step in steps.items()},
        }
        yield Finding(name, text, value)


def _training_findings(
    config: ModelConfig, card: Card, planned: ModelMemory, scheme: str | None
) -> Iterator[Finding]:
    trainer, longest = planned.trainer, planned.trainer.max_sequence_tokens or config.max_context
    for length in LENGTHS:
        if length > longest:
            yield Finding(
                f"length_{length}", f"does not fit: the longest trainable sequence is {longest:,}"
            )
            continue
        recompute = trainer.recomputes(length)
        estimate = training_estimate(
            config,
            card,
            TRAINED_TOKENS,
            length,
            trainer.micro_batch_tokens,
            scheme,
            recompute=recompute,
        )
        rate = TRAINED_TOKENS / estimate.seconds
        text = f"{rate:,.0f} tokens/s{', with activation checkpointing' if recompute else ''}"
        yield Finding(f"length_{length}", text, {"tokens_per_second": rate, **_seconds(estimate)})


def _seconds(estimate: Estimate) -> dict[str, object]:
    return {"seconds": estimate.seconds, "parts": dict(estimate.parts)}
