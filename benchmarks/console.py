"""What the console costs: opening a long run, the index of rollouts, and reading a run that trains.

    python benchmarks/console.py            prints the figures

A long run has 100,000 rows of metrics. The index is that of a step with 512 rollouts. For the last
figure, two processes that write a row of metrics and the rollouts of a step again and again take
turns: one is read by a console with a page open, the other by nobody.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / path) for path in ("tests", "tests/console", "tests/rl")]

from sample_runs import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    advantages_of,
    questions_of_step,
    rl_metrics,
)

from planish.console.answers import Answers, Parameters  # noqa: E402
from planish.console.catalog import Catalog  # noqa: E402
from planish.reports.rollout_files import RolloutFiles  # noqa: E402
from planish.reports.rollout_index import append_to_index, index_rows  # noqa: E402
from planish.testing import save_byte_tokenizer  # noqa: E402
from planish.tokenizer import load_tokenizer  # noqa: E402

ROWS, PAIRS, STEPS = 100_000, 8, 40
METRICS = ("env/all/reward/total", "env/all/correct", "optim/entropy", "optim/grad_norm")
WRITER = """
import shutil, sys, time
sys.path += sys.argv[2:]
from pathlib import Path
from sample_runs import write_run
from planish.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]).parent / "tokenizer")
for _ in sys.stdin:
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    start = time.perf_counter()
    write_run(Path(sys.argv[1]), tokenizer, steps=%d)
    print(time.perf_counter() - start, flush=True)
"""


def open_long_run(directory: Path) -> tuple[float, float]:
    """Return the seconds until the first curves, and until all rows are read."""
    (directory / "long").mkdir(parents=True)
    with open(directory / "long/metrics.jsonl", "w") as file:
        for step in range(ROWS):
            file.write(json.dumps({"step": step, **rl_metrics(step, ROWS)}) + "\n")
    answers = Answers(Catalog([directory]))
    run = ("run", f"{directory.name}/long")
    start = time.perf_counter()
    answers.run(Parameters([run]))
    first = None
    while True:
        metrics = [("metric", name) for name in METRICS]
        answer = answers.curves(Parameters([run, *metrics]))
        first = first or time.perf_counter() - start
        if not answer["runs"][0]["is_partial"]:
            return first, time.perf_counter() - start


def index_seconds(directory: Path, tokenizer) -> tuple[float, float]:
    """Return the seconds that the files of a step with 512 rollouts take, and those of its index."""
    groups = questions_of_step(0, groups=64, size=8)
    advantages = advantages_of(groups)
    files = RolloutFiles(directory, "flat", 1, True, tokenizer)
    whole, index = [], []
    for step in range(5):
        start = time.perf_counter()
        files.write("train", step, groups, advantages)
        whole.append(time.perf_counter() - start)
        start = time.perf_counter()
        append_to_index(directory, list(index_rows("train", step, groups, advantages, (), {})))
        index.append(time.perf_counter() - start)
    return statistics.median(whole), statistics.median(index)


def slowdown(directory: Path) -> list[float]:
    """Return the ratio of the times with and without a reader, for each pair."""
    paths = [str(ROOT / path) for path in ("tests", "tests/console", "tests/rl")]
    command = [sys.executable, "-c", WRITER % STEPS, str(directory / "run"), *paths]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def seconds(is_read: bool) -> float:
            done = threading.Event()
            reader = threading.Thread(target=read_until, args=(directory, done))
            if is_read:
                reader.start()
            stdin.write("\n")
            stdin.flush()
            result = float(stdout.readline())
            done.set()
            if is_read:
                reader.join()
            return result

        seconds(False)
        ratios = [seconds(True) / seconds(False) for _ in range(PAIRS)]
        stdin.close()
    return ratios


def read_until(directory: Path, done: threading.Event) -> None:
    """Ask what a page of curves and one of rollouts ask, as often as they do."""
    answers = Answers(Catalog([directory]))
    run = ("run", f"{directory.name}/run")
    while not done.wait(1.0):
        try:
            answers.curves(Parameters([run, *[("metric", name) for name in METRICS]]))
            answers.rollouts(Parameters([run]))
        except LookupError:
            continue


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "tokenizer").mkdir()
        tokenizer = load_tokenizer(save_byte_tokenizer(directory / "tokenizer"))
        first, whole = open_long_run(directory / "runs")
        print(f"{ROWS} rows: first curves after {first:.2f} s, all rows after {whole:.2f} s")
        write, index = index_seconds(directory / "index", tokenizer)
        print(f"512 rollouts: {write:.3f} s to write, of which the index {index:.4f} s")
        ratios = slowdown(directory)
        print(
            f"a run that is read takes {statistics.median(ratios):.3f} of the time of one that is "
            f"not ({min(ratios):.3f} to {max(ratios):.3f}, {PAIRS} pairs)"
        )


if __name__ == "__main__":
    main()
