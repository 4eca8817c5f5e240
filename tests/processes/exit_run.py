"""Programs that end in the middle of their work, at random moments; each must end cleanly.

    python tests/processes/exit_run.py --runs 300
    python tests/processes/exit_run.py --runs 300 --load 2 --record exits.json

Every run is a new process (exiting_program.py) that samples, trains, saves, computes a loss of its own or
is idle, in process or as a client of `planish serve`, and then returns, calls `sys.exit`, raises,
or gets Ctrl-C or SIGTERM, without `close()`. Its exit status and stderr must be its own, it must
reach the interpreter's own shutdown within two seconds, and a checkpoint that it asked for must be
on disk, whole. `--load` starts so many processes that keep a core busy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from planish.files import cache_home
from planish.testing import tiny_model

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "server"))

from server_process import running_server  # noqa: E402  # pyright: ignore[reportMissingImports]

ACTIVITIES = ("idle", "sampling", "training", "saving", "custom loss", "mixed")
ENDS = ("return", "exit", "error", "ctrl-c", "sigterm", "handled")
STYLES = ("asyncio", "blocking")
PLACES = ("engine", "server")
SECONDS = 2.0
SAVING_SECONDS = 60.0
"""A program that saves ends when the checkpoint is on disk."""
TIMEOUT_SECONDS = 180.0

TRACEBACK = r"(Traceback \(most recent call last\):\n(  .*\n)+"
OWN_STDERR: Mapping[str, str] = {
    "error": TRACEBACK + r"(\w+\.)?OwnError: its own\n)",
    "ctrl-c": "(" + TRACEBACK + r"[\w.]*(CancelledError|KeyboardInterrupt)\n)"
    r"(\nDuring handling of the above exception, another exception occurred:\n\n)?)+",
}
ANNOUNCED = r"(waiting for checkpoints that are still being saved .*\n)?"
"""What planish says when a checkpoint takes more than a second."""
STATUS = {
    "return": 0,
    "exit": 3,
    "error": 1,
    "ctrl-c": -signal.SIGINT,
    "sigterm": -signal.SIGTERM,
    "handled": 143,
}


@dataclass(frozen=True)
class Run:
    work: str
    end: str
    style: str
    place: str
    delay: float
    """Seconds from the moment at which the work is in progress to the program's end."""


@dataclass(frozen=True)
class Outcome:
    run: Run
    status: int
    stderr: str
    seconds: float
    """From the program's own end, or the signal, to the interpreter's shutdown."""
    to_exit: float
    """From there to the end of the process."""
    fault: str | None


def random_runs(count: int, seed: int) -> Iterator[Run]:
    """Yield every combination equally often, in a random order and with random delays."""
    rng = random.Random(seed)
    combinations = [
        (work, end, style, place)
        for work in ACTIVITIES
        for end in ENDS
        for style in STYLES
        for place in PLACES
    ]
    order: list[tuple[str, str, str, str]] = []
    for _ in range(count):
        if not order:
            order = rng.sample(combinations, len(combinations))
        yield Run(*order.pop(), delay=rng.choice((0.0, rng.uniform(0, 0.05), rng.random())))


def program(run: Run, directory: Path, url: str) -> Outcome:
    """Run the program and return its outcome."""
    home = directory / f"{time.monotonic_ns()}"
    home.mkdir()
    (home / "tiny").symlink_to(directory / "tiny")
    end_mode = {"ctrl-c": "signal", "sigterm": "signal"}.get(run.end, run.end)
    place = url if run.place == "server" else str(home)
    process = subprocess.Popen(
        [
            sys.executable,
            str(HERE / "exiting_program.py"),
            run.work,
            end_mode,
            run.style,
            place,
            f"{run.delay}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PLANISH_HOME": str(directory / "home")},
        # A suite that a shell runs in the background ignores Ctrl-C, and so would this program.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    working = process.stdout.readline()
    ended = time.monotonic()
    if working and end_mode in ("signal", "handled"):
        time.sleep(run.delay)
        ended = time.monotonic()
        process.send_signal(signal.SIGINT if run.end == "ctrl-c" else signal.SIGTERM)
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        stderr += f"killed after {TIMEOUT_SECONDS} s\n"
    now = time.monotonic()
    times = {name: float(time) for name, time in re.findall(r"(\w+) ([\d.]+)\n", stdout)}
    ended, finalizing = times.get("ending", ended), times.get("finalizing", now)
    seconds, status = finalizing - ended, process.returncode
    found = fault(run, working, status, stderr, seconds, home)
    return Outcome(run, status, stderr, seconds, now - finalizing, found)


def fault(
    run: Run, working: str, status: int, stderr: str, seconds: float, home: Path
) -> str | None:
    if not working:
        return "it did not begin to work"
    if status != STATUS[run.end]:
        return f"exit status {status}, not {STATUS[run.end]}"
    saves = is_saving(run)
    if not re.fullmatch(OWN_STDERR.get(run.end, "") + (ANNOUNCED if saves else ""), stderr):
        return "stderr is not the program's own"
    if saves and run.place == "engine" and not list(home.glob("data/*/*/at-the-end/*.json")):
        return "the checkpoint is missing"
    if seconds > (SAVING_SECONDS if saves else SECONDS):
        return f"it ended after {seconds:.1f} s"
    return None


def is_saving(run: Run) -> bool:
    """Return whether the program requests a checkpoint, which planish writes before the process
    ends.
    """
    return run.work in ("saving", "mixed") and run.end != "sigterm"


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep this number of cores busy during the block."""
    program = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def exits(count: int, seed: int, load: int, at_once: int = 1) -> Iterator[Outcome]:
    """Run this number of programs and yield the outcome of each."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        tiny = tiny_model(directory / "tiny")
        home = directory / "home"  # without the embedded model, which a server would load
        home.mkdir()
        if (cache_home() / "kernels").exists():
            (home / "kernels").symlink_to(cache_home() / "kernels")
        with (
            running_server(
                directory / "served",
                tiny,
                *("--model", f"tiny={tiny}"),
                environment={"PLANISH_HOME": str(home)},
            ) as server,
            busy_processes(load),
            ThreadPoolExecutor(at_once) as pool,
        ):
            yield from pool.map(
                lambda run: program(run, directory, server.url), random_runs(count, seed)
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Programs that end in the middle of their work.")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--load", type=int, default=0, help="processes that keep a core busy")
    parser.add_argument("--at-once", type=int, default=1, help="programs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a JSON file for the outcomes")
    arguments = parser.parse_args()
    # So that the processes which it started end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcomes = []
    for outcome in exits(arguments.runs, arguments.seed, arguments.load, arguments.at_once):
        outcomes.append(outcome)
        if outcome.fault:
            print(f"{outcome.run}\n{outcome.fault}\n{outcome.stderr}", flush=True)
    faults = Counter(outcome.fault for outcome in outcomes if outcome.fault)
    print(f"{len(outcomes)} runs, {faults.total()} with a fault: {dict(faults)}")
    saved = [outcome for outcome in outcomes if is_saving(outcome.run)]
    others = [outcome for outcome in outcomes if not is_saving(outcome.run)]
    for name, seconds in (
        ("to the interpreter's shutdown", [outcome.seconds for outcome in others]),
        ("to the same with a checkpoint", [outcome.seconds for outcome in saved]),
        ("of the interpreter's shutdown", [outcome.to_exit for outcome in outcomes]),
    ):
        print(f"seconds {name}: median {statistics.median(seconds):.2f}, most {max(seconds):.2f}")
    if arguments.record:
        rows = [asdict(outcome) for outcome in outcomes]
        arguments.record.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
