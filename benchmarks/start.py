"""Time from process start to the first token: a fresh process imports planish, creates a
ServiceClient, and samples one token.

    python benchmarks/start.py                the embedded model from the cache; writes
        results/start.json

All files are in the page cache, because a first process, which is not counted, has read them.
Seconds are counted from the start of the process.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import chz
from compare import header
from report import RESULTS, start_table

from planish.files import write_atomically
from planish.model.sources.resolve import DEFAULT_MODEL

SCRIPT = """
import sys, time
reached = {"interpreter": time.time()}
import planish
reached["import_planish"] = time.time()
with planish.ServiceClient() as service_client:
    client = service_client.create_sampling_client(base_model=sys.argv[1])
    reached["sampling_client"] = time.time()
    prompt = planish.ModelInput.from_ints(list(range(1000, 1020)))
    client.sample(prompt=prompt, num_samples=1, sampling_params=planish.SamplingParams(max_tokens=1)).result()
    reached["first_token"] = time.time()
    import json
    print(json.dumps(reached))
"""


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    rounds: int = 3
    directory: Path = RESULTS


def main(options: Options) -> None:
    report = header(options)
    first, *rounds = [measure_reached_times(options.model) for _ in range(options.rounds + 1)]
    parts = {name: [reached_times[name] for reached_times in rounds] for name in first}
    report["parts"] = {
        name: {
            "median_seconds": round(statistics.median(times), 3),
            "seconds": [round(seconds, 3) for seconds in times],
        }
        for name, times in parts.items()
    }
    write_atomically(options.directory / "start.json", json.dumps(report, indent=1) + "\n")
    print(start_table(report))


def measure_reached_times(model: str) -> dict[str, float]:
    """Return when each point was reached, in seconds since the process was started."""
    start_time = time.time()
    command = [sys.executable, "-c", SCRIPT, model]
    reached_times = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {name: reached_time - start_time for name, reached_time in reached_times.items()}


if __name__ == "__main__":
    main(chz.entrypoint(Options))
