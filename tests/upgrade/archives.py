"""Write the archive of this version: a server that was killed, and an RL run, on a tiny model.

    python tests/upgrade/archives.py

tests/upgrade/VERSION.tar.xz then has what this version leaves on a disk, and what a reader of it
must find:

    model/          the base model
    server/         the data directory of the server
    run/            the directory of the run, whose checkpoints are in run-data/
    expected.json   what is in them

test_upgrade.py opens the archive of every version with the present code.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).absolute().parent
sys.path[:0] = [str(HERE.parent / "server"), str(HERE)]

from server_client import BASE, Client, Model, gradient  # noqa: E402

from planish.client.service_client import ServiceClient  # noqa: E402
from planish.engine.engine import Engine  # noqa: E402
from planish.engine.settings import EngineSettings  # noqa: E402
from planish.files import read_rows  # noqa: E402
from planish.recipes import math_rl  # noqa: E402
from planish.server.server import Server  # noqa: E402
from planish.service import SaveWeightsForSampler  # noqa: E402
from planish.testing import tiny_model  # noqa: E402
from planish.wire.training import output_from_message  # noqa: E402

RUN_STEPS = 2
RUN_OPTIONS: Mapping[str, Any] = {
    "env": "arithmetic",
    "batch_size": 2,
    "group_size": 2,
    "max_tokens": 4,
    "lora_rank": 2,
    "save_every": 1,
    "eval_every": 0,
    "num_groups_to_log": 1,
}
SETTINGS = EngineSettings(deterministic=True, device="cpu", dtype="float32")


def server_of(directory: Path) -> Server:
    """Return the server of an unpacked archive, which has not started."""
    engine = Engine({BASE: str(directory / "model")}, directory / "server", SETTINGS)
    return Server(engine, directory / "server", [BASE])


def train(directory: Path, steps: int, **changes: Any) -> list[dict[str, Any]]:
    """Train the run of an unpacked archive up to a number of steps, and return its metrics."""
    changes = {**RUN_OPTIONS, **changes, "model_name": BASE, "max_steps": steps}
    with ServiceClient(
        models={BASE: str(directory / "model")}, data_dir=directory / "run-data"
    ) as service_client:
        options = math_rl.options_for(**changes, log_path=str(directory / "run"))
        run = math_rl.main(options, service_client)
    return read_rows(run / "metrics.jsonl")


async def loss_of(model: Model) -> float:
    """Return the loss of a fixed batch."""
    content = await model.run(gradient(model.model_id, seed=9, forward_only=True))
    return output_from_message(content).metrics["loss:sum"]


async def greedy_logprobs(client: Client, path: str) -> list[float]:
    """Return the logprobs of a greedy answer of a sampler checkpoint."""
    sampler = await client.sampler(None, path)
    response = await client.sample(sampler, n=1, max_tokens=4, temperature=0.0)
    return [float(value) for value in response.sequences[0].logprobs_np]


async def use_server(directory: Path) -> dict[str, Any]:
    """Train a model on a new server. The second step is only in the journal when the process ends,
    because a snapshot is written after more work than that.
    """
    server = server_of(directory)
    await server.start()
    client = await Client.start(server)
    model = await client.model()
    await model.step(0)
    state = await model.save("state")
    saved = json.loads(await model.run(SaveWeightsForSampler(model.model_id, "weights")))
    first = await loss_of(model)
    await model.step(1)
    second = await loss_of(model)
    return {
        "session": client.session_id,
        "model": model.model_id,
        "seq": model.seq,
        "state": state,
        "weights": saved["path"],
        "logprobs": await greedy_logprobs(client, saved["path"]),
        "loss of state": first,
        "loss": second,
    }


def write(path: Path) -> None:
    """Write the archive of the present code."""
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        tiny_model(
            directory / "model",
            hidden_size=16,
            layers=1,
            heads=2,
            kv_heads=1,
            head_dim=8,
            intermediate=16,
        )
        program = [sys.executable, str(HERE / "archives.py"), "server", str(directory)]
        done = subprocess.run(program, stdout=subprocess.PIPE, check=True)
        os.chdir(directory)  # command.json has the directory and the arguments
        sys.argv[:] = ["archives.py"]
        expected = json.loads(done.stdout) | {"metrics": train(directory, RUN_STEPS)}
        (directory / "expected.json").write_text(json.dumps(expected, indent=1))
        with tarfile.open(path, "w:xz") as archive:
            archive.add(directory, ".", filter=_without_locks_and_diff)


def _without_locks_and_diff(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    # code.diff names the directory of the repository.
    return None if entry.name.endswith((".lock", ".spare", "code.diff")) else entry


if __name__ == "__main__":
    if sys.argv[1:2] == ["server"]:
        print(json.dumps(asyncio.run(use_server(Path(sys.argv[2])))), flush=True)
        os._exit(0)
    path = HERE / f"{version('planish')}.tar.xz"
    write(path)
    print(f"{path}: {path.stat().st_size} bytes")
