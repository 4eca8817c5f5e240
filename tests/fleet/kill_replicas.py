"""Kill, stop or pause replicas at random moments while a fleet trains, and compare with an undisturbed
run of one engine, which runs beside it.

    python tests/fleet/kill_replicas.py --count 300 --seed 1 --minutes 60

Half of the disturbances are SIGKILL, a quarter SIGSTOP until the fleet gives the replica up, and a
quarter SIGSTOP with SIGCONT within two seconds. The victims are the replicas that are not the home
of the model. With --homes, homes get SIGKILL too; the run then continues from its last checkpoint.
After --minutes or SIGTERM, the program begins no more disturbances, and compares. It prints its
progress, and a record in JSON as its last line. The program ends with status 1 if a step was lost or
repeated, if any token, logprob, loss or weight differs from that of one engine, or if the fleet did
not notice and replace a lost replica.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fleet_runs import SETTINGS, continue_grpo, new_run, pid_of, ray_fleet, wait_until_whole

from planish import EngineClosedError, ServiceClient
from planish.fleet.fleet import Fleet
from planish.fleet.replica import Replica
from planish.processes.ray_cluster import leave_cluster, start_cluster
from planish.testing import tiny_model

SAVE_EVERY = 5
SILENT_SECONDS = 8.0
KINDS = ("kill", "kill", "stop", "pause")
MAX_PAUSE_SECONDS = 2.0
MAX_WAIT_SECONDS = 1.5
"""The longest time between two disturbances, if there is a victim."""
MAX_IDLE_LOSSES = 2
"""A replica that was lost so often before it had done any work is no victim until it has worked,
because the fleet gives up a replica that never works.
"""


class Killer:
    """Disturbs a replica at random moments."""

    def __init__(
        self, fleet: Fleet, count: int, seed: int, kills_homes: bool, seconds: float
    ) -> None:
        self._fleet = fleet
        self._count = count
        self._random = random.Random(seed)
        self._kills_homes = kills_homes
        self._deadline = time.monotonic() + seconds
        self._stop = threading.Event()
        self._ended: list[Replica] = []
        """The replicas that were killed or stopped for good."""
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all disturbances are over."""
        has_ended = self._stop.is_set() or time.monotonic() > self._deadline
        return has_ended or self.counts.total() >= self._count

    def end(self, *_: object) -> None:
        """Begin no more disturbances."""
        self._stop.set()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def unnoticed(self) -> list[int]:
        """Return the numbers of the ended replicas whose loss the fleet does not notice in time."""
        deadline = time.monotonic() + 10 * SILENT_SECONDS
        while True:
            numbers = [replica.number for replica in self._ended if not replica.is_lost]
            if not numbers or time.monotonic() > deadline:
                return numbers
            time.sleep(0.2)

    def _run(self) -> None:
        while not self.is_done and not self._stop.wait(self._random.uniform(0, MAX_WAIT_SECONDS)):
            victims = [r for r in self._fleet.replicas.replicas if self._is_victim(r)]
            if victims:
                self._disturb(self._random.choice(victims), self._random.choice(KINDS))

    def _is_victim(self, replica: Replica) -> bool:
        return (
            not replica.is_lost
            and replica not in self._ended
            and (self._kills_homes or not replica.num_models)
            and (replica.has_worked or replica.num_lost_idle < MAX_IDLE_LOSSES)
        )

    def _disturb(self, victim: Replica, kind: str) -> None:
        kind = "kill" if victim.num_models else kind
        pid = pid_of(victim)
        try:
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "pause":
                self._stop.wait(self._random.uniform(0, MAX_PAUSE_SECONDS))
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:  # the fleet has given the replica up meanwhile
            return
        if kind != "pause":
            self._ended.append(victim)
        name = f"{kind} home" if victim.num_models else kind
        self.counts[name] += 1
        running = sum(not replica.is_lost for replica in self._fleet.replicas.replicas)
        print(
            f"{self.counts.total()}: {name} replica {victim.number}; {running} replicas are not known to be lost",
            flush=True,
        )


class Reference:
    """The same steps on one engine that nobody disturbs. They run beside the fleet's."""

    def __init__(self, client: ServiceClient) -> None:
        self._training_client = new_run(client)
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(1)
        self._comparisons: list[Future[list[int]]] = []

    def compare(self, rows: list[Any]) -> None:
        """Begin to run and to compare the next steps of the fleet."""
        self._comparisons.append(self._thread.submit(self._compare, rows))

    def differing(self) -> list[int]:
        """Return the numbers of the steps that differ, once all are compared."""
        return [step for comparison in self._comparisons for step in comparison.result()]

    def _compare(self, rows: list[Any]) -> list[int]:
        first, self._num_steps = self._num_steps, self._num_steps + len(rows)
        expected = continue_grpo(self._training_client, self._num_steps, first_step=first)
        differing = [first + i for i, row in enumerate(rows) if row != expected[i]]
        if differing:
            print(f"    steps that differ: {differing}", flush=True)
        return differing


def disturbed_run(
    client: ServiceClient, killer: Killer, reference: Reference, max_steps: int
) -> int:
    """Run steps until the killer is done, and a few more. Return their number."""
    num_steps = 0
    training_client, state = None, None
    while num_steps < max_steps:
        is_last = killer.is_done
        saved: dict[int, str] = {}
        next_steps = min(max_steps, num_steps + SAVE_EVERY)
        try:
            if training_client is None:
                training_client = new_run(client, state)
            rows = continue_grpo(
                training_client,
                next_steps,
                first_step=num_steps,
                save_every=SAVE_EVERY,
                on_save=saved.__setitem__,
            )
        except EngineClosedError as error:
            print(f"    {error}", flush=True)
            training_client = None  # from the last state, with none of this attempt's rows
            continue
        num_steps, state = next_steps, saved.get(next_steps)
        reference.compare(rows)
        if is_last:
            break
    return num_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--homes", action="store_true")
    parser.add_argument("--max-steps", type=int, default=100_000)
    arguments = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        # Without bytecode, each new replica compiles Ray, which takes longer than all the rest of
        # its start.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        start_cluster(num_cpus=2 * arguments.replicas, num_gpus=0, object_store_bytes=100 << 20)
        model_dir = tiny_model(Path(directory) / "tiny")
        fleet = ray_fleet(
            model_dir, Path(directory) / "data", arguments.replicas, silent_seconds=SILENT_SECONDS
        )
        own = ServiceClient(
            models={"tiny": str(model_dir)}, data_dir=Path(directory) / "own", **SETTINGS
        )
        reference = Reference(own)
        killer = Killer(
            fleet, arguments.count, arguments.seed, arguments.homes, 60 * arguments.minutes
        )
        signal.signal(signal.SIGTERM, killer.end)
        try:
            num_steps = disturbed_run(
                ServiceClient(service=fleet), killer, reference, arguments.max_steps
            )
            killer.stop()
            unnoticed = killer.unnoticed()
            wait_until_whole(fleet)
            replicas = fleet.replicas.replicas
            failures = [replica.failure for replica in replicas if replica.failure is not None]
            num_lost_processes = sum(replica.num_lost_processes for replica in replicas)
        finally:
            killer.stop()
            fleet.close(finish=False)
        differing = reference.differing()
        own.close()
    leave_cluster()
    record = {
        "disturbances": killer.counts.total(),
        **killer.counts,
        "losses": num_lost_processes,
        "replicas": arguments.replicas,
        "steps": num_steps,
        "steps_that_differ": differing,
        "unnoticed_losses": unnoticed,
        "failed_replicas": failures,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - begun),
    }
    print(json.dumps(record))
    return 1 if differing or unnoticed or failures else 0


if __name__ == "__main__":
    sys.exit(main())
