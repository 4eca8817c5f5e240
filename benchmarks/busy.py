"""planish on an idle machine, and on the same machine beside one busy process.

    python benchmarks/busy.py                                        W1, W2 and a served iteration,
        idle and busy
    python benchmarks/busy.py spins=default,0,300000 workloads=W1    other spin counts, alternating
    python benchmarks/busy.py name=try small=True directory=/tmp     a quick check with small
        workloads, whose times mean nothing

W1 and W2 are the workloads of workloads.py, run with planish's public API in one process. A served
iteration is what a user of the official SDK does on the machine that runs `planish serve`: publish
the weights, take 4 samples of 16 tokens, and train one step on them, waiting for each result. The
busy process is `while True: pass` in Python.

A spin is the value of GOMP_SPINCOUNT, which bounds how long torch's OpenMP threads spin before they
sleep; "default" leaves the choice to planish. Rounds of all spins are interleaved, and idle rounds
come before busy ones. A round that takes longer than `limit` seconds is aborted and recorded as
null.

Medians, machine, versions and commit go to NAME.json in `directory`; report.py makes the table.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import chz
from compare import header, say
from peer_process import PeerError, PeerProcess
from report import RESULTS, busy_table
from served import running_server
from workloads import SMALL_WORKLOADS, WORKLOADS, write_rounds

from planish.files import write_atomically
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).parent
SERVED = "served"
LOADS = ("idle", "busy")
PROMPT = list(range(1000, 1064))
SAMPLES, NEW_TOKENS, RANK = 4, 16, 32
Row = dict[str, dict[str, Any]]
"""For each load, "idle" or "busy": the seconds of each round, and their median."""


@chz.chz
class Options:
    name: str = "busy"
    """Name of the results file."""
    workloads: str = "W1,W2,served"
    spins: str = "default"
    """Values of GOMP_SPINCOUNT, separated by commas."""
    rounds: int = 3
    served_seconds: float = 45.0
    """Seconds for which served iterations are counted, for each spin and load."""
    limit: float = 900.0
    """Seconds after which a round of W1 or W2 is aborted."""
    model: str = DEFAULT_MODEL
    directory: Path = RESULTS
    small: bool = False


def main(options: Options) -> None:
    report = header(options)
    names, spins = options.workloads.split(","), options.spins.split(",")
    source = SMALL_WORKLOADS if options.small else WORKLOADS
    with tempfile.TemporaryDirectory(prefix="planish-benchmark-") as scratch:
        path, workloads = (
            Path(scratch) / "rounds.json",
            {n: source[n] for n in names if n != SERVED},
        )
        write_rounds(options.model, path, workloads, options.rounds)
        for workload in names:
            measure = measure_served if workload == SERVED else measure_workload
            report["works"][workload] = measure(options, workload, spins, path)
            text = json.dumps(report, indent=1) + "\n"
            write_atomically(options.directory / f"{options.name}.json", text)
    print(busy_table(report))


def measure_workload(
    options: Options, workload: str, spins: Sequence[str], path: Path
) -> dict[str, Row]:
    """Measure rounds of W1 or W2 by spin and load. Each process loads the model once."""
    model = resolve_model(options.model)
    seconds: dict[str, dict[str, list[float | None]]] = {
        spin: {load: [] for load in LOADS} for spin in spins
    }
    with ExitStack() as stack:
        peer_processes = {}
        for spin in spins:
            command = [sys.executable, HERE / "peers/ours.py"]
            peer_processes[spin] = PeerProcess(spin, command, path, variables(spin))
            stack.callback(peer_processes[spin].end)
            peer_processes[spin].start(model, path.parent / f"{workload}-{spin}.log")
            peer_processes[spin].run_round(workload, 0)
        for load in LOADS:
            for number in range(1, options.rounds + 1):
                for spin, peer_process in peer_processes.items():
                    elapsed = round_seconds(peer_process, workload, number, load, options.limit)
                    say(f"{workload}, GOMP_SPINCOUNT {spin}, {load}: {elapsed} s")
                    seconds[spin][load].append(elapsed)
    return {
        spin: {load: summarize(elapsed[load]) for load in LOADS}
        for spin, elapsed in seconds.items()
    }


def round_seconds(
    peer_process: PeerProcess, workload: str, number: int, load: str, limit: float
) -> float | None:
    """Return the seconds of a round. None if this or an earlier round took longer than `limit`; the
    process is then ended.
    """
    timer = Timer(limit, peer_process.end)
    try:
        with busy_process(load):
            timer.start()
            result = peer_process.run_round(workload, number)
        say(f"others used {result['others']:.0%} of the cores")
        return round(result["seconds"], 3)
    except (PeerError, ValueError, OSError):
        return None
    finally:
        timer.cancel()


def measure_served(
    options: Options, workload: str, spins: Sequence[str], path: Path
) -> dict[str, Row]:
    """Measure served iterations by spin and load. Each spin has its own server."""
    rows: dict[str, Row] = {}
    for spin in spins:
        with (
            tempfile.TemporaryDirectory(prefix="planish-") as directory,
            running_server(Path(directory), variables=variables(spin)) as url,
        ):
            command = [sys.executable, __file__, "--client", url, options.model]
            rows[spin] = {}
            for load in LOADS:
                with busy_process(load):
                    limit = "0" if options.small else str(options.served_seconds)
                    lines = subprocess.run(
                        [*command, limit], check=True, stdout=subprocess.PIPE, text=True
                    ).stdout
                rows[spin][load] = summarize(json.loads(lines.splitlines()[-1]))
                say(
                    f"{workload}, GOMP_SPINCOUNT {spin}, {load}: "
                    f"{rows[spin][load]['median_seconds']} s"
                )
    return rows


def variables(spin: str) -> Mapping[str, str]:
    return {} if spin == "default" else {"GOMP_SPINCOUNT": spin}


def summarize(seconds: Sequence[float | None]) -> dict[str, Any]:
    finished = [one for one in seconds if one is not None]
    median = round(statistics.median(finished), 4) if len(finished) == len(seconds) else None
    return {"median_seconds": median, "seconds": [one and round(one, 3) for one in seconds]}


@contextmanager
def busy_process(load: str) -> Iterator[None]:
    """Run a busy process for the block if the load is "busy"."""
    if load == "idle":
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def client(url: str, model: str, limit: str) -> None:
    """Act as a user of the official SDK and print the seconds of its iterations: as many as fit
    into `limit` seconds, at least two, after a warm-up.
    """
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    training = service.create_lora_training_client(base_model=model, rank=RANK).result()
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop=[])

    def iteration() -> float:
        start_time = time.perf_counter()
        sampler = training.save_weights_and_get_sampling_client().result()
        answers = sampler.sample(prompt, SAMPLES, params).result().sequences
        data = [datum(answer) for answer in answers]
        backward = training.forward_backward(data, "importance_sampling")
        update = training.optim_step(types.AdamParams(learning_rate=1e-5))
        for pending in (backward, update):
            pending.result()
        return time.perf_counter() - start_time

    def datum(answer: Any) -> Any:
        num_prompt_targets, num_tokens = len(PROMPT) - 1, len(answer.tokens)
        inputs: Mapping[str, Any] = {
            "target_tokens": [0] * num_prompt_targets + answer.tokens,
            "logprobs": [0.0] * num_prompt_targets + answer.logprobs,
            "advantages": [0.0] * num_prompt_targets + [1.0] * num_tokens,
        }
        model_input = types.ModelInput.from_ints(PROMPT + answer.tokens[:-1])
        return types.Datum(model_input=model_input, loss_fn_inputs=inputs)

    iteration()
    start_time, seconds = time.perf_counter(), [iteration()]
    while len(seconds) < 2 or time.perf_counter() - start_time < float(limit):
        seconds.append(iteration())
    print(json.dumps(seconds))
    sys.stdout.flush()
    os._exit(0)  # the SDK's own threads may take seconds to end


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(*sys.argv[2:])
    else:
        main(chz.entrypoint(Options))
