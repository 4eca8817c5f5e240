"""Kill or stop replicas at random moments while a fleet trains, and compare with an undisturbed run.

    python tests/fleet/kill_replicas.py --count 30 --seed 1

The victims are the replicas that are not the home of the model. Half of them get SIGKILL, and half
SIGSTOP. With --homes, homes get SIGKILL too; the run then continues from its last checkpoint. After
SIGTERM, the program begins no more disturbances, and compares. The program ends with status 1 if a
step was lost or repeated, or if any token, logprob, loss or weight differs from that of one engine.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fleet_runs import SETTINGS, pid_of, ray_fleet, run_grpo

from planish import EngineClosedError, ServiceClient
from planish.fleet.fleet import Fleet
from planish.fleet.ray_link import leave_cluster, start_cluster
from planish.fleet.replica import Replica
from planish.testing import tiny_model

NUM_REPLICAS = 3
SAVE_EVERY = 5
SILENT_SECONDS = 20.0


class Killer:
    """Disturbs a replica at a random moment, whenever all replicas are there."""

    def __init__(self, fleet: Fleet, count: int, seed: int, kills_homes: bool) -> None:
        self._fleet = fleet
        self._count = count
        self._random = random.Random(seed)
        self._kills_homes = kills_homes
        self._stop = threading.Event()
        self.victims: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all disturbances are over."""
        return len(self.victims) >= self._count or self._stop.is_set()

    def end(self, *_: object) -> None:
        """Begin no more disturbances."""
        self._stop.set()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.is_done and not self._stop.wait(self._random.uniform(0.2, 3.0)):
            replicas = self._fleet.replicas.replicas
            candidates = [r for r in replicas if self._kills_homes or not r.num_models]
            if any(r.is_lost for r in replicas) or not candidates:
                continue
            victim = self._random.choice(candidates)
            number = (
                signal.SIGKILL
                if victim.num_models or self._random.random() < 0.5
                else signal.SIGSTOP
            )
            self._disturb(victim, number)

    def _disturb(self, victim: Replica, number: signal.Signals) -> None:
        os.kill(pid_of(victim), number)
        role = "home" if victim.num_models else "other"
        self.victims.append(f"{number.name} {role}")
        print(f"{len(self.victims)}: {number.name} to replica {victim.number} ({role})", flush=True)
        while not victim.is_lost and not self._stop.wait(0.2):
            pass


def disturbed_run(client: ServiceClient, killer: Killer, max_steps: int) -> list[Any]:
    """Run steps until the killer is done and a few more. Return their rows."""
    rows: list[Any] = []
    state: str | None = None
    while True:
        first = len(rows)
        saved: dict[int, str] = {}
        num_steps = min(max_steps, first + SAVE_EVERY)
        try:
            done = run_grpo(
                client,
                num_steps,
                state=state,
                first_step=first,
                save_every=SAVE_EVERY,
                on_save=saved.__setitem__,
            )
        except EngineClosedError as error:
            print(f"    {error}", flush=True)
            continue  # from the last state, with none of this attempt's rows
        rows += done
        state = saved[num_steps]
        if len(rows) >= max_steps or killer.is_done:
            return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--homes", action="store_true")
    parser.add_argument("--max-steps", type=int, default=100_000)
    arguments = parser.parse_args()
    begun = time.monotonic()
    start_cluster(num_cpus=2 * NUM_REPLICAS, num_gpus=0, object_store_bytes=100 << 20)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = tiny_model(Path(directory) / "tiny")
        fleet = ray_fleet(
            model_dir, Path(directory) / "data", NUM_REPLICAS, silent_seconds=SILENT_SECONDS
        )
        killer = Killer(fleet, arguments.count, arguments.seed, arguments.homes)
        signal.signal(signal.SIGTERM, killer.end)
        try:
            rows = disturbed_run(ServiceClient(service=fleet), killer, arguments.max_steps)
        finally:
            killer.stop()
            fleet.close(finish=False)
        models = {"tiny": str(model_dir)}
        with ServiceClient(models=models, data_dir=Path(directory) / "own", **SETTINGS) as client:
            expected = run_grpo(client, len(rows))
    leave_cluster()
    differing = [number for number, row in enumerate(rows) if row != expected[number]]
    print(
        f"{len(killer.victims)} disturbances in {len(rows)} steps and "
        f"{time.monotonic() - begun:.0f} s; steps that differ: {differing or 'none'}"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
