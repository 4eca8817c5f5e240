"""A data directory that an older version of planish left is still replayed.

`recorded/unanswered_requests.sql` is the database of a server (commit 040126d, version 3 of the
tables) that was killed while it computed: a model with two steps, and two unanswered requests.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import orjson
from server_client import (
    BASE,
    RANK,
    Client,
    Model,
    adam,
    gradient,
    run,
    running,
    sampled_bits,
    state,
)

from planish.types import LoraConfig
from planish.wire.sampling import sample_response_from_message
from planish.wire.training import output_from_message

RECORDED = Path(__file__).parent / "recorded" / "unanswered_requests.sql"
SESSION = "1db807fd3d593a67"


def restore(data_dir: Path) -> None:
    data_dir.mkdir()
    with sqlite3.connect(data_dir / "server.db") as database:
        database.executescript(RECORDED.read_text())
    database.close()


def logprobs(content: bytes) -> list[list[float]]:
    return [
        output["logprobs"].to_numpy().tolist()
        for output in output_from_message(content).loss_fn_outputs
    ]


def test_a_journal_of_an_older_version_is_replayed(model_dir, data_dir, tmp_path):
    async def recorded() -> tuple[list[list[float]], float, list[tuple[list[int], bytes]]]:
        async with running(model_dir, data_dir) as server:
            client = Client(server, SESSION)
            model = Model(client, f"{SESSION}:train:0", seq=5)
            gradients = logprobs(await client.done(f"{model.model_id}:5"))
            step = orjson.loads(await model.run(adam(model.model_id)))["metrics"]
            response = sample_response_from_message(await client.done(f"{SESSION}:sample:0:1"))
            return gradients, step["grad_norm"], sampled_bits(response)

    async def repeated() -> tuple[list[list[float]], float, list[tuple[list[int], bytes]]]:
        async with running(model_dir, tmp_path / "fresh") as server:
            client = await Client.start(server)
            model = await client.model(seed=3, lora=LoraConfig(RANK, 3), base_model=BASE)
            for seed in (1, 2):
                await model.step(seed)
            gradients = logprobs(await model.run(gradient(model.model_id, 3)))
            step = orjson.loads(await model.run(adam(model.model_id)))["metrics"]
            response = await client.sample(await client.sampler(), seq_id=1, seed=6)
            return gradients, step["grad_norm"], sampled_bits(response)

    restore(data_dir)
    found, expected = run(recorded()), run(repeated())
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert found[1:] == expected[1:]


def test_an_answer_that_an_older_version_wrote_out_of_order(model_dir, data_dir, tmp_path):
    """Older versions could lose the answer of a gradient in a crash and keep that of its step. The
    gradient runs again, before the step is replayed.
    """

    async def before(directory: Path) -> tuple[Client, Model]:
        async with running(model_dir, directory) as server:
            client = await Client.start(server)
            model = await client.model(seed=3)
            await model.step(1)
            await model.step(2)
            await model.run(gradient(model.model_id, 3))  # prevents a snapshot at the stop
            return client, model

    async def after(
        directory: Path, client: Client, model: Model
    ) -> tuple[bytes, dict[str, bytes]]:
        async with running(model_dir, directory) as server:
            client.server = server
            answer = await client.done(f"{model.model_id}:3")
            await model.run(adam(model.model_id))
            return answer, state(directory, await model.save("end"))

    ends = []
    for directory in (data_dir, tmp_path / "undisturbed"):
        client, model = run(before(directory))
        if directory == data_dir:
            with sqlite3.connect(directory / "server.db") as database:
                changed = database.execute(
                    "UPDATE requests SET state = 'accepted', finished = NULL, result = NULL, "
                    "result_bytes = 0 WHERE id = ? AND body IS NOT NULL",
                    [f"{model.model_id}:3"],
                )
                assert changed.rowcount == 1
            database.close()
        ends.append(run(after(directory, client, model)))
    assert ends[0] == ends[1]
