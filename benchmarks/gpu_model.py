"""Computed speeds of a model on all GPUs, as a table.

    python benchmarks/gpu_model.py                              Qwen3-8B in all schemes
    python benchmarks/gpu_model.py model=Qwen3-0.6B context=4096

Nothing is measured (planish/doctor/gpu/roofline.py). `planish doctor --plan` prints more about one
GPU.
"""

from __future__ import annotations

import chz

from planish.doctor.gpu.cards import CARDS, Card
from planish.doctor.gpu.plan import NOTE, card_memory, model_directory, samples_in_memory
from planish.doctor.gpu.roofline import decode_estimate, training_estimate
from planish.errors import UserError
from planish.model.architecture.config import ModelConfig

SCHEMES = (None, "int8", "nf4")
ROWS = (1, 16, 128, 512)
TRAINED_TOKENS, LENGTH = 131_072, 1024


@chz.chz
class Options:
    model: str = "Qwen3-8B"
    """A base model on this machine, or Qwen3-8B or Qwen3-0.6B."""
    context: int = 1024
    """Positions of each sample."""


def main(options: Options) -> None:
    print(f"{options.model}, {options.context:,} positions; {NOTE}\n")
    heading = [
        "GPU",
        "weights",
        "samples",
        *(f"{rows} rows, tokens/s" for rows in ROWS),
        "training",
    ]
    print(f"| {' | '.join(heading)} |")
    print(f"| {' | '.join('---' for _ in heading)} |")
    with model_directory(options.model) as directory:
        config = ModelConfig.from_directory(directory)
        for card in CARDS.values():
            for scheme in SCHEMES:
                cells = [card.name, scheme or str(card.dtype).removeprefix("torch.")]
                try:
                    planned = card_memory(card, scheme).claim(directory)
                except UserError:
                    cells += ["does not fit"] + [""] * (len(heading) - 3)
                else:
                    most = samples_in_memory(config, card, planned, options.context)
                    cells += [
                        str(most),
                        *(step(config, card, rows, most, options.context, scheme) for rows in ROWS),
                    ]
                    trainer = planned.trainer
                    estimate = training_estimate(
                        config,
                        card,
                        TRAINED_TOKENS,
                        LENGTH,
                        trainer.micro_batch_tokens,
                        scheme,
                        recompute=trainer.recomputes(LENGTH),
                    )
                    cells.append(f"{TRAINED_TOKENS / estimate.seconds:,.0f}")
                print(f"| {' | '.join(cells)} |")


def step(
    config: ModelConfig, card: Card, rows: int, most: int, context: int, scheme: str | None
) -> str:
    """Return the computed tokens per second, or nothing if the rows do not fit."""
    if rows > most:
        return ""
    return f"{rows / decode_estimate(config, card, rows, context, scheme).seconds:,.0f}"


if __name__ == "__main__":
    main(chz.entrypoint(Options))
