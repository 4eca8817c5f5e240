"""Accepted requests: they run even if the sender left, failures are sent once they are on disk, and
bodies go when nothing needs them.
"""

import asyncio
import time
from typing import Any

import orjson
import pytest
from server_client import (
    BASE,
    RANK,
    TENANT,
    Client,
    adam,
    gradient,
    running,
    sample,
    submit_training,
)

from planish.server.durable import journal
from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.models import submission
from planish.server.models.model import ModelActor
from planish.server.models.replay import Replay
from planish.server.request import Request, failed_from_error
from planish.server.results import (
    OUT_OF_MEMORY,
    BadRequest,
    Done,
    Failed,
    Gone,
    TryAgain,
    Unavailable,
)
from planish.server.samplers import Sampler
from planish.server.sampling import Sampling
from planish.server.settings import ServerSettings
from planish.service import CreateModel, ForwardBackward, LoadWeights, Operation, SaveWeights
from planish.types import Datum, LoraConfig, ModelInput


def bad_gradient(model_id: str) -> ForwardBackward:
    data = [Datum(ModelInput.from_ints([99999]), {"target_tokens": [1], "weights": [1.0]})]
    return ForwardBackward(model_id, data, "cross_entropy")


def steps_of(model_id: str) -> list[Operation[Any]]:
    return [gradient(model_id), gradient(model_id, forward_only=True), adam(model_id)]


async def test_a_journaled_request_runs_after_its_client_disconnected(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model, sampler = await client.model(), await client.sampler()
        calls = [
            submit_training(server, TENANT, 1, gradient(model.model_id)),
            server.sampling.submit(TENANT, 0, sample(sampler)),
            server.models.create(
                TENANT, CreateModel(f"{client.session_id}:train:7", BASE, LoraConfig(RANK))
            ),
        ]
        for call in calls:
            task = asyncio.create_task(call)
            while not server.request_log.queued_counts() and not task.done():
                await asyncio.sleep(0)
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while server.request_log.queued_counts():
                await asyncio.sleep(0.01)
        for request_id in (
            f"{model.model_id}:1",
            f"{sampler}:0",
            f"{client.session_id}:train:7:0",
        ):
            assert isinstance(await client.answer(request_id), Done)


async def test_a_sample_can_be_cancelled_before_it_starts(model_dir, data_dir, monkeypatch):
    start = Sampling.start

    def start_and_cancel(sampling: Sampling, sampler: Sampler, request: Request) -> None:
        start(sampling, sampler, request)
        sampling.cancel(TENANT, request.id)  # before its task had a step

    monkeypatch.setattr(Sampling, "start", start_and_cancel)

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        accepted = await server.sampling.submit(TENANT, 0, sample(await client.sampler()))
        assert await client.answer(accepted.request_id) == Failed(
            "the request was cancelled", "user"
        )


async def test_an_answer_is_sent_once_it_is_on_disk(model_dir, data_dir, monkeypatch):
    """A crash could lose an answer that is not on disk. The request would then run again, and
    could have another outcome than its sender was told.
    """
    is_full = False

    def refuse(place: str) -> None:
        if is_full and place == "before commit":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("planish.server.durable.store.crash_point", refuse)

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model, other, sampler = (
            await client.model(),
            await client.model(),
            await client.sampler(),
        )
        stopping = server.stopping
        stopping.set()  # until all requests are on disk
        good = [await model.submit(operation) for operation in steps_of(model.model_id)]
        bad = [
            await other.submit(bad_gradient(other.model_id)),
            await other.submit(adam(other.model_id)),
        ]
        drawn = await server.sampling.submit(TENANT, 0, sample(sampler))
        is_full = True
        stopping.clear()
        for one in server.models.open_models():
            one.worker.wake()
        while any(request.answer_written is None for request in server.request_log.active.values()):
            await asyncio.sleep(0.01)
        requests = [*good, *bad, drawn.request_id]
        for request_id in requests:
            assert await server.settlement.outcome(TENANT, request_id, 0) == TryAgain()
        is_full = False
        answers = [await client.answer(request_id) for request_id in requests]
        assert [type(answer) for answer in answers] == [Done] * 3 + [Failed] * 2 + [Done]


async def test_the_answers_of_a_model_reach_the_disk_in_order(model_dir, data_dir, monkeypatch):
    """A crash must not keep an optim_step and lose its gradient, which may fail when it runs
    again.
    """
    encode = submission.encode_result

    async def slow_encode(operation: Operation[Any], result: Any) -> Done:
        if isinstance(operation, ForwardBackward):
            await asyncio.sleep(0.2)
        return await encode(operation, result)

    monkeypatch.setattr(submission, "encode_result", slow_encode)

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        requests = [await model.submit(each) for each in steps_of(model.model_id)]
        await client.done(requests[-1])
        rows = [await server.store.read(journal.request_row, each) for each in requests]
        assert [row.state for row in rows if row] == ["done"] * 3


async def test_bodies_that_no_replay_needs_are_removed(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.run(gradient(model.model_id, forward_only=True))
        await model.step()
        await model.run(SaveWeights(model.model_id, "a"))
        assert isinstance(
            await client.answer(await model.submit(bad_gradient(model.model_id))), Failed
        )
        await client.sample(await client.sampler())
        while server.request_log.queued_counts():
            await asyncio.sleep(0.01)
        await server.store.write(lambda transaction: None)  # behind all answers
        rows = await server.store.read(
            lambda db: db.execute(
                "SELECT kind, state FROM requests WHERE body IS NOT NULL ORDER BY seq"
            ).fetchall()
        )
        assert [tuple(row) for row in rows] == [
            (kind, "done") for kind in ("create_model", "forward_backward", "optim_step")
        ]


async def test_requests_that_change_nothing_also_trigger_a_snapshot(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_replay_requests=5)) as server:
        model = await (await Client.start(server)).model()
        for _ in range(6):
            await model.run(gradient(model.model_id, forward_only=True))
        while next(iter(server.models.open_models())).adapter.is_snapshotting:
            await asyncio.sleep(0.01)
        assert next(iter(server.models.open_models())).row.last_snapshot >= 5


async def test_the_data_of_one_gradient_are_limited(model_dir, data_dir):
    settings = ServerSettings(max_gradient_request_bytes=2000)
    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        model = await client.model()
        while (
            next(iter(server.models.open_models())).adapter.state.cost.bytes
            <= settings.max_gradient_request_bytes
        ):
            await model.run(gradient(model.model_id))
        with pytest.raises(BadRequest, match="the data of one gradient"):
            await model.submit(gradient(model.model_id))
        assert isinstance(await client.answer(await model.submit(adam(model.model_id))), Failed)
        while (
            held := next(iter(server.models.open_models()))
        ).adapter.is_snapshotting or held.worker.task:
            await asyncio.sleep(0.01)
        await model.run(gradient(model.model_id, forward_only=True))


async def test_numbers_too_large_for_the_database_are_rejected(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(missing_request_timeout=0.1)) as server:
        client = await Client.start(server)
        model = await client.model()
        for seq in (2**62 + 1, 2**63 - 1, 2**63, 2**70):
            with pytest.raises(BadRequest, match="seq_id"):
                await model.submit(gradient(model.model_id), seq)
            await server.models.reject(TENANT, model.model_id, seq, BadRequest("no"))
        last = await model.submit(gradient(model.model_id), 2**62)
        answer = await client.answer(last)
        assert isinstance(answer, Failed)
        assert "did not arrive" in answer.message


async def test_a_model_number_is_never_reused(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a")
        copied = await server.stored_runs.copy(TENANT, path, client.session_id, 5, None)
        with pytest.raises(BadRequest, match="already been used"):
            await server.models.create(
                TENANT, CreateModel(f"{client.session_id}:train:5", BASE, LoraConfig(RANK))
            )
        assert (await server.checkpoints.info(TENANT, copied)).base_model == BASE


async def test_a_pending_unload_survives_a_restart(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.submit(adam(model.model_id), 2)  # waits for number 1
        unloading = await server.models.unload(TENANT, model.model_id)
    async with running(model_dir, data_dir) as server:
        client.server = server
        assert await server.models.unload(TENANT, model.model_id) == unloading
        with pytest.raises(Gone, match="being unloaded"):
            await submit_training(server, TENANT, 3, gradient(model.model_id))
        await model.submit(gradient(model.model_id), 1)
        assert orjson.loads(await client.done(unloading.request_id))["type"] == "unload_model"


async def test_ended_sessions_are_forgotten_after_a_week(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        old, new = await Client.start(server), await Client.start(server)
        for client in (old, new):
            await (await client.model()).publish()
        await (await new.model()).save("a")
        for client in (old, new):
            await server.sessions.finish(TENANT, client.session_id, "success", None)
        await server.sessions.members.wait_until_closed()
        long_ago = "UPDATE sessions SET ended = ended - 8 * 86400 WHERE id = ?"
        await server.store.write(
            lambda transaction: transaction.execute(long_ago, [old.session_id]).rowcount
        )
        now, day = time.time(), 86400.0
        readings = [(0.0, now - 9 * day), (day / 2, now - 7.5 * day), (8 * day, now)]
        server.expiry_clock.resume(readings)
        await server.cleanup.clean()
        assert list((await server.sessions.page(TENANT, 10, 0)).items) == [new.session_id]
        # The old session's run has no checkpoint.
        assert (await server.runs.page(TENANT, 10, 0)).total == 2
        left = await server.store.read(
            lambda db: db.execute("SELECT session FROM samplers").fetchall()
        )
        assert [row[0] for row in left] == [new.session_id]


async def test_requests_that_wait_for_a_closed_sampler_fail_and_leave_nothing(
    model_dir, data_dir, slow_engine
):
    async with running(model_dir, data_dir, ServerSettings(sampling_slots=32)) as server:
        client = await Client.start(server)
        sampler = await client.sampler()
        drawing, waiting = [
            await server.sampling.submit(
                TENANT, seq, sample(sampler, n=32, max_tokens=1500, stop=[])
            )
            for seq in range(2)
        ]
        while not server.sampling_queue.used_slots:
            await asyncio.sleep(0.01)
        await server.sessions.finish(TENANT, client.session_id, "success", None)
        await server.sessions.members.wait_until_closed()
        server.sampling.cancel(TENANT, drawing.request_id)
        answer = await client.answer(waiting.request_id)
        assert isinstance(answer, Failed)
        assert "its session ended" in answer.message
        assert server.adapter_cache.loaded_adapters() == []


async def test_an_internal_error_still_answers_the_request(model_dir, data_dir, monkeypatch):
    async def broken(*_: object) -> None:
        raise RuntimeError("broken")

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        with monkeypatch.context() as patch:
            patch.setattr(ModelActor, "_submit", broken)
            patch.setattr(Replay, "replay_failure", broken)
            requests = [
                await model.submit(gradient(model.model_id)),
                await model.submit(adam(model.model_id)),
            ]
            answers = [await client.answer(request) for request in requests]
        assert answers == [Failed("broken", "server")] * 2
        await model.step()  # the model came back


async def test_a_rejected_unload_leaves_the_model_unchanged(model_dir, data_dir, monkeypatch):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        with monkeypatch.context() as patch:
            patch.setattr(server.store, "free_bytes", lambda: 0)
            with pytest.raises(Unavailable):
                await server.models.unload(TENANT, model.model_id)
        await model.step()


async def test_an_unload_queues_behind_a_load_that_is_still_being_checked(
    model_dir, data_dir, monkeypatch
):
    """Both had one number, and no start behind a kill in that moment succeeded."""
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a")
        looked_at, readable = asyncio.Event(), CheckpointCatalog.readable_row

        async def slow(*args: Any) -> Any:
            await looked_at.wait()
            return await readable(*args)

        monkeypatch.setattr(CheckpointCatalog, "readable_row", slow)
        loads = [
            asyncio.create_task(model.submit(LoadWeights(model.model_id, path), 2))
            for _ in range(2)
        ]
        while not next(iter(server.models._intakes.values())).arriving:
            await asyncio.sleep(0)
        unloading = await server.models.unload(TENANT, model.model_id)
        await server.models.reject(TENANT, model.model_id, 2, BadRequest("it is taken"))
        looked_at.set()
        first, again = await asyncio.gather(*loads)
        assert first == again
        assert isinstance(await client.answer(first), Done)
        assert isinstance(await client.answer(unloading.request_id), Done)
        rows = await server.store.read(
            lambda db: db.execute("SELECT id, seq FROM requests WHERE seq > 1").fetchall()
        )
        assert sorted(tuple(row) for row in rows) == [(first, 2), (unloading.request_id, 3)]


async def test_an_unreadable_request_uses_up_its_number(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(missing_request_timeout=0.2)) as server:
        client = await Client.start(server)
        model = await client.model()
        with pytest.raises(ValueError, match="reserved for the server"):
            await model.submit(SaveWeights(model.model_id, "_planish.snapshot.1"))
        no_token = [Datum(ModelInput.from_ints([2**31]), {"target_tokens": [1], "weights": [1.0]})]
        for _ in range(2):
            with pytest.raises(ValueError, match="token id"):
                await model.submit(ForwardBackward(model.model_id, no_token, "cross_entropy"), 2)
        model.seq = 2
        # The part that is missing fails its step, and nothing waits.
        answer = await client.answer(await model.submit(adam(model.model_id)))
        assert isinstance(answer, Failed)
        assert "rejected" in answer.message
        assert (await model.step())["adam_step"] == 1


def test_an_error_is_sent_with_its_notes():
    error = MemoryError("main memory is full")
    error.add_note("lower max_batch")
    assert (
        failed_from_error(error).message
        == f"{OUT_OF_MEMORY} (main memory is full)\nlower max_batch"
    )
