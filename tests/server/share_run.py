"""What one tenant at its bounds leaves to another: python tests/server/share_run.py [--seconds 20]

A server in a process of its own, with the tiny model. One tenant keeps as many samples queued as
`max_queued_requests` allows, and more are rejected. A second tenant has 64 samples in progress.
The run prints the second tenant's samples per second alone and beside the first tenant, and the
samples per second of both. Two tenants that want all of the engine should get half each.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from server_process import BASE_MODEL, running_server
from wire_client import Patient, Refused, WireClient

from planish.service import CreateSampler, Sample
from planish.testing import tiny_model
from planish.types import ModelInput, SamplingParams

GREEDY, MODEST = "tml-greedy-key", "tml-modest-key"
QUEUED, IN_PROGRESS, TOKENS = 1000, 64, 32


@dataclass
class Load:
    """Samples of one tenant."""

    client: WireClient
    sampler: str
    answered: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    number: int = 0

    @classmethod
    async def start(cls, url: str, key: str) -> Load:
        client = WireClient(url, key)
        session = await client.create_session()
        sampler = f"{session}:sample:0"
        return cls(client, await client.create_sampler(CreateSampler(sampler, BASE_MODEL)))

    async def work(self, waits: bool = True) -> None:
        """Sample, one after the other. Without `waits`, submit as fast as the server accepts."""
        while True:
            self.number += 1
            params = SamplingParams(max_tokens=TOKENS, seed=self.number, stop=[])
            prompt = ModelInput.from_ints([1, 2, 3])
            try:
                accepted = await self.client.submit_sample(
                    self.number, Sample(self.sampler, prompt, 1, params)
                )
            except Refused as error:
                self.refused[error.status] += 1
                await asyncio.sleep(0.2)
                continue
            if waits:
                await Patient(self.client).answer(accepted.request_id)
            self.answered += 1

    async def rate(self, seconds: float) -> float:
        """Return the answers per second from now on."""
        before, began = self.answered, time.monotonic()
        await asyncio.sleep(seconds)
        return (self.answered - before) / (time.monotonic() - began)


async def flood(url: str, seconds: float) -> None:
    """Keep the first tenant's queue full; print what was accepted and refused in the last
    `seconds`.
    """
    load = await Load.start(url, GREEDY)
    tasks = [asyncio.create_task(load.work(waits=False)) for _ in range(8)]
    while load.refused[429] < 50:
        await asyncio.sleep(0.1)
    print("full", flush=True)
    rate = await load.rate(seconds)
    print(f"{rate:.1f} samples/s; refused {dict(load.refused)}", flush=True)
    for task in tasks:
        task.cancel()


async def measured(url: str, seconds: float) -> tuple[float, float, str]:
    """Return the second tenant's rate alone and beside the first, and what the first one printed."""
    modest = await Load.start(url, MODEST)
    running = [asyncio.create_task(modest.work()) for _ in range(IN_PROGRESS)]
    await asyncio.sleep(3)
    alone = await modest.rate(seconds)
    flooding = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--flood", url, "--seconds", str(seconds), stdout=PIPE
    )
    assert flooding.stdout is not None
    await flooding.stdout.readline()  # the queue is full
    beside = await modest.rate(seconds)
    said = (await flooding.stdout.readline()).decode().strip()
    await flooding.wait()
    for task in running:
        task.cancel()
    return alone, beside, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood is not None:
        asyncio.run(flood(options.flood, options.seconds))
        return 0
    seconds = options.seconds
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text(f"greedy {GREEDY}\nmodest {MODEST}\n")
        arguments = ("--api-key-file", str(keys), "--set", f"max_queued_requests={QUEUED}")
        model = tiny_model(Path(directory) / "model")
        with running_server(Path(directory) / "data", model, *arguments) as server:
            alone, beside, said = asyncio.run(measured(server.url, seconds))
    print(f"second tenant alone: {alone:.1f} samples/s")
    print(f"beside a tenant with {QUEUED} queued: {beside:.1f}, {beside / alone:.0%} of that")
    print(f"first tenant: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
