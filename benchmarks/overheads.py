"""What a GRPO iteration (W3) costs outside the engine, and what publishing weights to a sampling
client costs.

    python benchmarks/overheads.py            writes results/overheads.json

The engine does all of its work in one thread. That thread uses no processor time while it waits for
the script or for the interpreter lock. So the share outside the engine is the iteration's time
minus the thread's processor time. This holds on an idle machine only. Publishing is the call
save_weights_and_get_sampling_client after an optimizer step. The first token from the new client is
measured too, and compared with that of a client that was used before, so that deferred work would
be visible.
"""

import json
import random
import statistics
import threading
import time
from pathlib import Path

import chz
from compare import header
from iteration import run_iteration
from report import RESULTS, overheads_table
from workloads import SMALL_WORKLOADS, WORKLOADS, Shape, make_prompts, make_round

import planish
from planish.files import write_atomically
from planish.model.sources.resolve import DEFAULT_MODEL

ENGINE_THREAD = "planish-engine"
NUM_PUBLICATIONS = 5
"""Number of times that weights are published."""


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    rounds: int = 3
    small: bool = False
    directory: Path = RESULTS


def main(options: Options) -> None:
    report = header(options)
    shape = (SMALL_WORKLOADS if options.small else WORKLOADS)["W3"].shape
    with planish.ServiceClient() as service_client:
        client = service_client.create_lora_training_client(
            base_model=options.model, rank=32, train_unembed=False
        )
        shares_outside_engine = [
            share_outside_engine(client, shape, number) for number in range(options.rounds + 1)
        ]
        publications = [time_publication(client, number) for number in range(NUM_PUBLICATIONS + 1)]
    call_seconds, new_sampler_seconds, used_sampler_seconds = zip(*publications[1:], strict=True)
    report["parts"] = {
        "outside_engine": report_part(
            "of an iteration outside the engine's thread", "%", shares_outside_engine[1:], 100
        ),
        "publishing": report_part(
            "save_weights_and_get_sampling_client after an optimizer step", "ms", call_seconds, 1e3
        ),
        "first_token_new": report_part(
            "a prompt's first token from that new sampler", "ms", new_sampler_seconds, 1e3
        ),
        "first_token_used": report_part(
            "a prompt's first token from the same sampler after that",
            "ms",
            used_sampler_seconds,
            1e3,
        ),
    }
    write_atomically(options.directory / "overheads.json", json.dumps(report, indent=1) + "\n")
    print(overheads_table(report))


def report_part(
    title: str, unit: str, values: tuple[float, ...] | list[float], scale: float
) -> dict[str, object]:
    scaled = [round(scale * value, 3) for value in values]
    return {"title": title, "unit": unit, "median": statistics.median(scaled), "values": scaled}


def share_outside_engine(client: planish.TrainingClient, shape: Shape, number: int) -> float:
    """Return the share of one iteration in which the engine thread did not run."""
    round_spec = make_round(client.get_tokenizer(), f"overheads {number}", shape, number)
    start_time, used_seconds = time.perf_counter(), engine_thread_seconds()
    run_iteration(client, round_spec)
    return 1 - (engine_thread_seconds() - used_seconds) / (time.perf_counter() - start_time)


def engine_thread_seconds() -> float:
    """Return the processor time of the engine thread so far, or of all engine threads."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name == ENGINE_THREAD]
    assert threads
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(ident))
        for ident in threads
        if ident is not None
    )


def time_publication(client: planish.TrainingClient, number: int) -> tuple[float, float, float]:
    """Return the seconds of publishing, of the new sampler's first token, and of its first token
    for another prompt.
    """
    rng = random.Random(number)
    prompts = [make_prompts(client.get_tokenizer(), rng, Shape(1, 1, 1))[0] for _ in range(2)]
    run_iteration(
        client, make_round(client.get_tokenizer(), f"publishing {number}", Shape(1, 2, 2), number)
    )
    start_time = time.perf_counter()
    sampler = client.save_weights_and_get_sampling_client()
    call_seconds = time.perf_counter() - start_time
    first, second = (time_first_token(sampler, prompt) for prompt in prompts)
    return call_seconds, first, second


def time_first_token(sampler: planish.SamplingClient, prompt: list[int]) -> float:
    start_time = time.perf_counter()
    params = planish.SamplingParams(max_tokens=1, stop=[])
    sampler.sample(
        prompt=planish.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params
    ).result()
    return time.perf_counter() - start_time


if __name__ == "__main__":
    main(chz.entrypoint(Options))
