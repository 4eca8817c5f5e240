"""Kill a server again and again while clients use it, and check that nothing was lost or done
twice.

    python tests/server/crash_run.py --kills 300 --record crash_run.json
    python tests/server/crash_run.py --kills 300 --power-loss --kills-per-round 40

Every round has a new data directory and runs the whole script of crash_history.py. The server is
killed at each crash point of planish/server/durable/store.py in turn, and at random moments, as
often as fits into the round. At the end of a round, the answers of the clients, and the weights and
optimizer states of all models, must equal those of a round without kills, bit for bit.

With --power-loss, the server is killed at random file calls, and the disk forgets then what was not
synced, in one of the many ways that power_loss.py describes. This needs a C compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crash_history import CrashClient, cancel_and_wait, run_concurrently, script
from crash_server import CrashServer, Start
from disk_shim import Shim, compiler
from power_loss import LOSSES, Disk
from server_client import record, state
from server_process import free_port
from wire_client import WireClient

from planish.server.durable.crash_points import CRASH_POINTS
from planish.server.settings import ServerSettings
from planish.testing import tiny_model

# Small, so that snapshots are taken, adapters leave memory, and large bodies go to files, all
# within seconds; by requests too, as a quick machine computes for less than that.
SETTINGS = ServerSettings(
    max_replay_seconds=0.2,
    max_replay_requests=3,
    adapter_idle_timeout=0.4,
    adapter_memory_bytes=3_000_000,
)
CALM = ServerSettings()
KEYS = {"tml-crash-one": "one", "tml-crash-two": "two"}
"""Each client is a tenant."""

SYNC_MICROSECONDS = (0, 500)
"""The time of a sync, by round. While a sync lasts, other threads can write."""

OFTEN = {
    "before commit",
    "after commit",
    "before acknowledging",
    "before running",
    "before recording a result",
}
"""Crash points that are reached so often that the first time would always be the same."""


@dataclass
class Round:
    """The outcome of one round."""

    facts: list[dict[str, Any]]
    states: list[dict[str, bytes]]
    kills: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Kill:
    """The next kill: at the nth time that a crash point is reached, after a time, or at the nth
    file call, whichever comes first.
    """

    crash_at: str | None = None
    crash_after: float | None = None
    crash_call: int | None = None
    """Needs a `Power`."""

    @property
    def place(self) -> str:
        if self.crash_call is not None:
            return "at a file call"
        return "at random" if self.crash_at is None else self.crash_at.rpartition(":")[0]


def kills(seed: int, places: Sequence[str] = CRASH_POINTS) -> Iterator[Kill]:
    """Yield every crash point in turn, and a random moment between two of them. A crash point that
    is not reached becomes a random moment.
    """
    rng = random.Random(seed)
    while True:
        for name in rng.sample(places, len(places)):
            count = rng.randrange(1, 30) if name in OFTEN else 1
            yield Kill(f"{name}:{count}", rng.uniform(0.4, 1.4))
            yield Kill(None, rng.uniform(0.03, 0.6))


def power_losses(seed: int) -> Iterator[Kill]:
    """Yield kills at random file calls, most of them soon after the start. A start that did not
    become ready within 3 seconds of computing is not waited for.
    """
    rng = random.Random(seed)
    while True:
        yield Kill(None, 3.0, int(2 ** rng.uniform(4, 9.5)))


class PowerLosses:
    """Makes each kill a power loss: the disk forgets what was not synced."""

    def __init__(
        self, data_dir: Path, seed: int, sync_delay: int = 0, ignores_syncs: bool = False
    ) -> None:
        """`sync_delay` is the time of a sync in microseconds. With `ignores_syncs`, no sync has
        an effect.
        """
        data_dir.mkdir(parents=True, exist_ok=True)
        self._shim = Shim(data_dir.with_name(f"{data_dir.name} shim"), data_dir)
        self._shim.fields.sync_delay = sync_delay
        self._shim.fields.ignores_syncs = ignores_syncs
        self._disk = Disk(data_dir)
        self._rng = random.Random(seed)
        self.losses: list[str] = []
        """The power losses so far, for the report of a failure."""

    def begin(self, kill: Kill) -> tuple[Path, Path, Path]:
        """Return how the shim of the next server process is configured."""
        self._shim.begin_log()
        self._shim.heal()
        if kill.crash_call is not None:
            self._shim.fail(kill.crash_call, 0)
        return self._shim.files

    def fail(self) -> None:
        """Let the disk forget. The server must have ended."""
        self._disk.replay(self._shim.log)
        loss = self._rng.choice(LOSSES)
        self.losses.append(str(loss))
        self._disk.lose_power(loss, self._rng)


class ServerSupervisor:
    """Starts the server, and restarts it at the same address when it dies."""

    def __init__(
        self,
        model_dir: Path,
        data_dir: Path,
        kills_to_come: Iterator[Kill],
        max_kills: int,
        settings: ServerSettings,
        power: PowerLosses | None = None,
    ) -> None:
        self.kills: Counter[str] = Counter()
        self._start = Start(model_dir, data_dir, settings, free_port(), KEYS)
        self._kills_to_come = kills_to_come
        self._max_kills = max_kills
        self._power = power
        self._server: CrashServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._start.port}"

    async def run(self) -> None:
        while True:
            kill = next(self._kills_to_come) if self.kills.total() < self._max_kills else Kill()
            start = replace(self._start, crash_at=kill.crash_at, crash_after=kill.crash_after)
            if self._power is not None:
                start = replace(start, shim=self._power.begin(kill))
            self._server = CrashServer(start)
            status = await self._server.died()
            assert status == -signal.SIGKILL, f"the server ended by itself, with status {status}"
            was_timer = start.timer_mark.exists()
            start.timer_mark.unlink(missing_ok=True)
            if self._power is not None:
                self._power.fail()
            self.kills["at random" if was_timer else kill.place] += 1

    async def end(self) -> None:
        if self._server is not None:
            self._server.kill()
            await self._server.died()


async def run_round(
    model_dir: Path,
    data_dir: Path,
    kills_to_come: Iterator[Kill],
    max_kills: int,
    settings: ServerSettings,
    number: int = len(KEYS),
    power: PowerLosses | None = None,
) -> Round:
    """Run one round of the script with up to `max_kills` kills; with `power`, each is a power loss."""
    supervisor = ServerSupervisor(model_dir, data_dir, kills_to_come, max_kills, settings, power)
    wires = [WireClient(supervisor.url, key) for key in list(KEYS)[:number]]
    clients = [CrashClient(wire) for wire in wires]
    scripts = [script(client, 100 * index) for index, client in enumerate(clients)]
    work = asyncio.create_task(run_concurrently(*scripts))
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(300 + 20 * max_kills):
            await asyncio.wait([work, running], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        paths = work.result()
    finally:
        await cancel_and_wait(work, running)
        await supervisor.end()
        await asyncio.gather(*(wire.close() for wire in wires))
    states = [state(data_dir, path) for own in paths for path in own]
    return Round([client.history.facts for client in clients], states, supervisor.kills)


def differences(observed: Round, expected: Round) -> list[str]:
    """Return where a round differs from the expected one."""
    found = []
    for index, (ours, theirs) in enumerate(zip(observed.facts, expected.facts, strict=True)):
        found += [
            f"client {index}: {key}"
            for key in theirs.keys() | ours.keys()
            if ours.get(key) != theirs.get(key)
        ]
    for index, (ours, theirs) in enumerate(zip(observed.states, expected.states, strict=True)):
        found += [f"state {index}: {name}" for name in theirs if ours.get(name) != theirs[name]]
    return found


async def campaign(
    directory: Path,
    wanted: int,
    seed: int,
    max_kills: int,
    places: Sequence[str],
    with_power_loss: bool,
    ignores_syncs: bool,
) -> dict[str, Any]:
    """Run rounds until there were `wanted` kills."""
    model_dir = tiny_model(directory / "model")
    start_time, rounds, total = time.monotonic(), 0, Counter[str]()
    expected = await run_round(model_dir, directory / "calm", iter(()), 0, CALM)
    kills_to_come = power_losses(seed) if with_power_loss else kills(seed, places)
    while total.total() < wanted:
        data_dir = directory / f"round {rounds}"
        power = None
        if with_power_loss:
            power = PowerLosses(
                data_dir, seed + rounds, SYNC_MICROSECONDS[rounds % 2], ignores_syncs
            )
        try:
            observed = await run_round(
                model_dir, data_dir, kills_to_come, max_kills, SETTINGS, power=power
            )
        except BaseException:
            if power is not None:
                print(f"power losses of round {rounds}:", *power.losses, sep="\n  ")
            raise
        found = differences(observed, expected)
        total += observed.kills
        rounds += 1
        print(
            f"round {rounds}: {observed.kills.total()} kills, {total.total()} in all, {len(found)} "
            "differences",
            flush=True,
        )
        if found:
            raise SystemExit("\n".join(found[:20]))
        shutil.rmtree(data_dir)
    return {
        "kills": total.total(),
        "rounds": rounds,
        "seconds": round(time.monotonic() - start_time),
        "seed": seed,
        "by place": dict(sorted(total.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--kills-per-round", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--place",
        action="append",
        choices=CRASH_POINTS,
        help="kill there only, and at random; may be repeated",
    )
    parser.add_argument(
        "--power-loss", action="store_true", help="let the disk forget what was not synced"
    )
    parser.add_argument(
        "--ignore-syncs",
        action="store_true",
        help="with --power-loss: let no sync have an effect, so that there must be differences",
    )
    parser.add_argument("--record", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    if arguments.power_loss and compiler() is None:
        parser.error("--power-loss needs a C compiler (cc or gcc)")
    with tempfile.TemporaryDirectory(prefix="planish-crash-") as directory:
        result = asyncio.run(
            campaign(
                Path(directory),
                arguments.kills,
                arguments.seed,
                arguments.kills_per_round,
                arguments.place or CRASH_POINTS,
                arguments.power_loss,
                arguments.ignore_syncs,
            )
        )
    record(result, arguments.record)


if __name__ == "__main__":
    sys.exit(main())
