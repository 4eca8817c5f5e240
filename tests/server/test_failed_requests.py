"""A tenant that sends invalid requests for ever fills neither the journal nor the disk, and the
rows that are deleted early change nothing: not the numbers, not what a replay computes.
"""

import asyncio
import random
import shutil

import pytest
from server_client import TENANT, Client, adam, gradient, make_core, running, state

from planish.errors import UserError
from planish.server.durable.failed_requests import AnsweredRow, redundant_rows
from planish.server.durable.journal import request_row
from planish.server.durable.quotas import ROW_BYTES
from planish.server.results import BadRequest, Gone, Tenant, TooManyRequests
from planish.server.server import Server
from planish.server.settings import ServerSettings
from planish.service import LoadWeights, SaveWeights

OTHER = Tenant("other")
LIMIT = 20 * (ROW_BYTES + 100)
SMALL = ServerSettings(max_rejected_request_bytes=LIMIT)
WRONG = UserError("x" * 100)


async def failed_rows(server: Server, tenant: str = TENANT.name) -> int:
    query = "SELECT COUNT(*) FROM requests WHERE tenant = ? AND state IN ('failed', 'refused')"
    return await server.store.read(lambda db: db.execute(query, [tenant]).fetchone()[0])


@pytest.mark.slow
async def test_rejected_requests_have_a_bound(model_dir, data_dir):
    """They stayed until a snapshot of their model, which an idle model never takes."""
    async with running(model_dir, data_dir, SMALL) as server:
        client, other = await Client.start(server), await Client.start(server, OTHER)
        model, theirs = await client.model(), await other.model()
        await server.models.reject(OTHER, theirs.model_id, 1, WRONG)
        for number in range(1, 201):
            kind = ("forward_backward", "optim_step", "save_weights")[number % 3]
            await server.models.reject(TENANT, model.model_id, number, WRONG, kind)
            assert await failed_rows(server) <= 21
        assert await failed_rows(server, OTHER.name) == 1
        # A number whose row was deleted stays used, and the next one is free.
        with pytest.raises(Gone, match="seq_id=10 .* was answered long ago"):
            await model.submit(gradient(model.model_id), 10)
        model.seq = 200
        await model.step()


async def test_failed_requests_have_a_bound(model_dir, data_dir):
    async with running(model_dir, data_dir, SMALL) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.save("taken")
        answers = [
            await model.submit(SaveWeights(model.model_id, "taken", overwrite=False))
            for _ in range(60)
        ]
        for answer in answers:
            await client.answer(answer)
        assert await failed_rows(server) == 60
        await server.cleanup.clean()
        assert await failed_rows(server) < 20
        await model.step()


async def test_rows_that_a_replay_needs_are_kept_and_more_are_rejected(model_dir, data_dir):
    """Each of these failed steps clears a gradient that was computed."""
    async with running(model_dir, data_dir, SMALL) as server:
        client = await Client.start(server)
        model = await client.model()

        async def fill() -> None:
            for _ in range(100):
                await model.run(gradient(model.model_id))
                await server.models.reject(
                    TENANT, model.model_id, model.seq + 1, WRONG, "optim_step"
                )
                model.seq += 1

        with pytest.raises(TooManyRequests, match="max_rejected_request_bytes"):
            await fill()
        assert await failed_rows(server) <= 21
        await model.run(adam(model.model_id))  # the number is still free
        unload = await server.models.unload(TENANT, model.model_id)
        await client.done(unload.request_id)
        another = await client.model()
        server.failed_requests._full_since.clear()
        await server.models.reject(TENANT, another.model_id, 1, WRONG)


@pytest.mark.slow
async def test_a_restart_computes_the_same_without_the_deleted_rows(model_dir, data_dir, tmp_path):
    """The server is copied while it runs, as a crash would leave it."""
    random.seed(3)
    plan = [
        random.choice(("step", "gradient", "optim", "bad gradient", "bad optim", "bad load"))
        for _ in range(120)
    ]

    async def play(settings: ServerSettings, place) -> tuple[dict[str, bytes], int]:
        async with running(model_dir, place, settings) as server:
            client = await Client.start(server)
            model = await client.model()
            for seed, what in enumerate(plan):
                if what == "step":
                    for operation in (gradient(model.model_id, seed), adam(model.model_id)):
                        await client.answer(await model.submit(operation))
                elif what == "gradient":
                    await client.answer(await model.submit(gradient(model.model_id, seed)))
                elif what == "optim":
                    await client.answer(await model.submit(adam(model.model_id)))
                elif what == "bad load":
                    with pytest.raises((BadRequest, UserError)):
                        await model.submit(LoadWeights(model.model_id, "tinker://no/weights/no"))
                else:
                    kind = "forward_backward" if what == "bad gradient" else "optim_step"
                    model.seq += 1
                    try:
                        await server.models.reject(TENANT, model.model_id, model.seq, WRONG, kind)
                    except TooManyRequests:
                        server.failed_requests._full_since.clear()
                        model.seq -= 1
            await server.failed_requests.trim()
            await asyncio.sleep(0.1)
            rows = await failed_rows(server)
            copy = place.with_name(place.name + " copy")
            shutil.copytree(place, copy)
        server = make_core(model_dir, copy)
        await server.start()
        try:
            client.server = server
            await client.answer(await model.submit(adam(model.model_id)))
            path = await model.save("last")
            return state(copy, path), rows
        finally:
            await server.stop(20)

    expected, many = await play(ServerSettings(), tmp_path / "all")
    found, few = await play(
        ServerSettings(max_rejected_request_bytes=30 * (ROW_BYTES + 100)), tmp_path / "few"
    )
    assert few < 31 < many
    assert found == expected


def replayed(rows: list[AnsweredRow]) -> tuple[list[int], list[int], bool]:
    """Return what a replay of these rows leaves: the gradients of each step, the pending gradient,
    and whether a part of it is missing.
    """
    steps: list[int] = []
    pending: list[int] = []
    is_incomplete = False
    for row in rows:
        if row.kind == "forward_backward":
            if row.has_failed:
                is_incomplete = True
            else:
                pending.append(row.seq)
        elif row.kind == "optim_step":
            if not (row.has_failed or is_incomplete):
                steps += [*pending, -1]
            pending, is_incomplete = [], False
        elif not row.has_failed:
            steps.append(row.seq)
    return steps, pending, is_incomplete


def test_deleting_redundant_rows_never_changes_a_replay():
    source = random.Random(1)
    kinds = ("forward_backward", "optim_step", "load_weights", "save_weights")
    deleted = 0
    for _ in range(2000):
        rows: list[AnsweredRow] = []
        is_incomplete = False
        for seq in range(1, 14):
            kind = source.choice(kinds)
            fails = source.random() < 0.6 or (kind == "optim_step" and is_incomplete)
            if kind in ("forward_backward", "optim_step"):
                is_incomplete = kind == "forward_backward" and (fails or is_incomplete)
            is_answered = seq < 12 or source.random() < 0.5
            rows.append(
                AnsweredRow(
                    str(seq), kind, seq, "failed" if fails else "done", 1.0 if is_answered else None
                )
            )
        if source.random() < 0.3:
            del rows[source.randrange(len(rows))]  # it has not arrived
        found = list(redundant_rows(rows, 1, 0))
        expected = replayed([row for row in rows if row.finished is not None])
        for count in range(len(found) + 1):
            left = [row for row in rows if row not in found[:count] and row.finished is not None]
            assert replayed(left) == expected, (rows, found[:count])
        assert all(row.has_failed for row in found)
        deleted += len(found)
    assert deleted > 3000


def test_a_number_that_may_still_arrive_ends_the_search():
    rows = [AnsweredRow(str(seq), "save_weights", seq, "refused", 1.0) for seq in (1, 2, 4, 5)]
    assert [row.seq for row in redundant_rows(rows, 1, 0)] == [1, 2]
    assert [row.seq for row in redundant_rows(rows, 1, 4)] == [1, 2, 4, 5]


async def test_the_sizes_are_counted_again_after_a_restart(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        for number in range(1, 41):
            await server.models.reject(TENANT, model.model_id, number, WRONG, "save_weights")
    async with running(model_dir, data_dir, SMALL) as server:
        assert await failed_rows(server) == 40
        await server.models.reject(TENANT, model.model_id, 41, WRONG)
        assert await failed_rows(server) < 20
        assert await server.store.read(request_row, f"{model.model_id}:41") is not None
        plan = await server.store.read(
            lambda db: db.execute(
                "EXPLAIN QUERY PLAN SELECT SUM(512 + LENGTH(CAST(message AS BLOB))) FROM "
                "requests WHERE state IN ('failed', 'refused') AND tenant = ?",
                ["t"],
            ).fetchall()
        )
        assert "failed_requests" in plan[0]["detail"]
