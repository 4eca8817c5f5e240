"""A program that ends in the middle of its work, without `close()`. exit_run.py runs it.

    python tests/processes/exiting_program.py WORK END STYLE PLACE DELAY

PLACE is the URL of a server, or a directory that holds the model `tiny` and will hold checkpoints.
The program writes "working" once the work is in progress. DELAY seconds later it writes "ending"
and the time, and ends; or, with END "signal", it waits for the signal that ends it. After all other
exit callbacks it writes "finalizing" and the time.
"""

import asyncio
import atexit
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Exit callbacks run last one first: this is the last one, after which the interpreter shuts down.
atexit.register(lambda: print("finalizing", time.monotonic(), flush=True))
logging.getLogger("planish.model.kernels").setLevel(
    "ERROR"
)  # a machine may lack kernels, which is logged

from planish import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient  # noqa: E402

LENGTH = 64
SAVED = "at-the-end"


class OwnError(Exception):
    """The error that the program ends with."""


def connected(place: str) -> ServiceClient:
    if place.startswith("http"):
        return ServiceClient(base_url=place)
    directory = Path(place)
    return ServiceClient(
        models={"tiny": str(directory / "tiny")}, data_dir=directory / "data", dtype="float32"
    )


def data(count: int) -> list[Datum]:
    tokens = list(range(LENGTH))
    return [Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens})] * count


def slow_loss(data: Any, logprobs: Any) -> Any:
    """A loss that keeps its thread in torch for about a second."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        _ = sum((values * values).sum() for values in logprobs)
    return sum(values.sum() for values in logprobs), {}


def begin(work: str, training: Any, sampling: Any) -> list[Any]:
    """Submit the work and return the pending results."""
    pending = []
    if work in ("sampling", "mixed"):
        params = SamplingParams(max_tokens=1900, stop=[], seed=0)
        pending.append(sampling.sample(ModelInput.from_ints([1, 2, 3]), 8, params))
    if work in ("training", "mixed"):
        for _ in range(3):
            pending.append(training.forward_backward(data(1000), "cross_entropy"))
            pending.append(training.optim_step(AdamParams()))
    if work in ("saving", "mixed"):
        pending.append(training.forward_backward(data(8), "cross_entropy"))
        pending.append(training.optim_step(AdamParams()))
        pending.append(training.save_state(SAVED))
    if work == "custom loss":
        pending.append(training.forward_backward_custom(data(4), slow_loss))
    return pending


def end(how: str) -> None:
    if how == "signal":
        return
    print("ending", time.monotonic(), flush=True)
    if how == "exit":
        sys.exit(3)
    if how == "error":
        raise OwnError("its own")


def blocking(work: str, how: str, place: str, delay: float) -> None:
    """Keep every object in a global variable, as a script without functions does."""
    scope: dict[str, Any] = globals()
    scope["service"] = connected(place)
    scope["training"] = scope["service"].create_lora_training_client("tiny", rank=4)
    scope["sampling"] = scope["training"].save_weights_and_get_sampling_client()
    scope["sampling"].sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=2)).result()
    scope["pending"] = begin(work, scope["training"], scope["sampling"])
    print("working", scope["training"].model_id, flush=True)
    if how == "signal":
        while True:  # a signal that comes just before a sleep begins does not end that
            time.sleep(0.05)
    time.sleep(delay)
    end(how)


async def asynchronous(work: str, how: str, place: str, delay: float) -> None:
    service = connected(place)
    training = await service.create_lora_training_client_async("tiny", rank=4)
    sampling = await training.save_weights_and_get_sampling_client_async()
    await sampling.sample_async(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=2))
    pending = begin(work, training, sampling)
    if pending:  # somebody waits for one of the results
        waiting = asyncio.ensure_future(pending[-1].result_async())
        await asyncio.sleep(0)
        assert not waiting.done() or waiting.result()
    print("working", training.model_id, flush=True)
    await asyncio.sleep(3600 if how == "signal" else delay)
    end(how)


def main(work: str, how: str, style: str, place: str, delay: str) -> None:
    if how == "handled":  # SIGTERM by the program's own handler
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        how = "signal"
    run: Callable[..., Any] = blocking
    if style == "asyncio":
        asyncio.run(asynchronous(work, how, place, float(delay)))
    else:
        run(work, how, place, float(delay))


main(*sys.argv[1:])
