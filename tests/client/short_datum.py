"""One short datum, and what the engine returns for it."""

from typing import Any

from planish import AdamParams, Datum, ModelInput, TrainingClient

WAIT = 60.0
"""Seconds after which a test gives up on a result."""
STEP = AdamParams(learning_rate=1e-2)


def datum(length: int = 6, **inputs: Any) -> Datum:
    tokens = [(3 + 5 * i) % 256 for i in range(length + 1)]
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **inputs})


def logprobs(client: TrainingClient) -> list[float]:
    return (
        client.forward([datum()], "cross_entropy")
        .result(WAIT)
        .loss_fn_outputs[0]["logprobs"]
        .tolist()
    )
