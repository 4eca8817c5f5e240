"""Tenants: nothing of one tenant can be seen, used or changed by another, and limits are
separate.
"""

import asyncio
import threading
import time
from collections import Counter

import numpy as np
import pytest
from server_client import Client, adam, gradient, run, running, sample, submit_training

from planish.engine.engine_thread import EngineThread
from planish.server.results import Conflict, Failed, NotFound, Tenant, TooManyRequests
from planish.server.settings import ServerSettings
from planish.service import CreateModel, CreateSampler, ForwardBackward, LoadWeights, SaveWeights
from planish.types import Datum, ModelInput


async def two(server) -> tuple[Client, Client]:
    anna, ben = [await Client.start(server, Tenant(name)) for name in ("anna", "ben")]
    return anna, ben


async def test_no_object_of_another_tenant_is_found(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        anna, ben = await two(server)
        model = await anna.model()
        await model.step()
        path, sampler = await model.save("a"), await model.publish()
        request_id = f"{model.model_id}:1"
        await anna.sample(sampler)
        run_id = model.model_id
        theirs = [
            server.sessions.touch(ben.tenant, anna.session_id),
            server.sessions.finish(ben.tenant, anna.session_id, "success", None),
            server.sessions.record(ben.tenant, anna.session_id),
            server.models.create(ben.tenant, CreateModel(f"{anna.session_id}:train:5", "tiny")),
            server.models.create(
                ben.tenant, CreateModel(f"{ben.session_id}:train:5", from_path=path)
            ),
            submit_training(server, ben.tenant, 5, adam(run_id)),
            server.models.unload(ben.tenant, run_id),
            server.samplers.create(
                ben.tenant, CreateSampler(f"{anna.session_id}:sample:5", "tiny")
            ),
            server.samplers.create(
                ben.tenant, CreateSampler(f"{ben.session_id}:sample:5", None, path)
            ),
            server.sampling.submit(ben.tenant, 5, sample(sampler)),
            server.settlement.outcome(ben.tenant, request_id, 0),
            server.settlement.outcome(ben.tenant, f"{sampler}:0", 0),
            server.models.info(ben.tenant, run_id),
            server.samplers.info(ben.tenant, sampler),
            server.runs.run(ben.tenant, run_id),
            server.runs.list_checkpoints(ben.tenant, run_id),
            server.checkpoints.info(ben.tenant, path),
            server.checkpoints.delete(ben.tenant, path),
            server.checkpoints.set_public(ben.tenant, path, True),
            server.checkpoints.set_ttl(ben.tenant, path, 3600),
            server.stored_runs.copy(ben.tenant, path, ben.session_id, 7, None),
            server.stored_runs.copy(anna.tenant, path, ben.session_id, 7, None),
            server.downloads.files(ben.tenant, path),
        ]
        for call in theirs:
            with pytest.raises(NotFound):
                await call
        server.sampling.cancel(ben.tenant, f"{sampler}:0")
        await server.models.reject(ben.tenant, run_id, 20, ValueError("no"))
        assert (await server.sessions.page(ben.tenant, 10, 0)).items == [ben.session_id]
        assert (await server.runs.page(ben.tenant, 10, 0)).total == 0
        assert (await server.runs.list_checkpoints(ben.tenant)).total == 0
        assert (await model.step(3))["adam_step"] == 2


async def test_a_public_checkpoint_can_be_read_but_not_changed(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        anna, ben = await two(server)
        model = await anna.model()
        await model.step()
        path = await model.save("a")
        await server.checkpoints.set_public(anna.tenant, path, True)
        with pytest.raises(Conflict):
            await server.checkpoints.set_public(anna.tenant, path, True)
        second = await ben.model(base_model=None, from_path=path, with_optimizer=True)
        assert (await second.step(1))["adam_step"] == 2
        await second.run(LoadWeights(second.model_id, path))
        await ben.sample(await ben.sampler(None, path))
        assert (await server.checkpoints.info(ben.tenant, path)).checkpoint.public
        assert "adapter_model.safetensors" in (await server.downloads.files(ben.tenant, path)).names
        for call in (
            server.checkpoints.delete(ben.tenant, path),
            server.checkpoints.set_public(ben.tenant, path, False),
        ):
            with pytest.raises(NotFound):
                await call
        await server.checkpoints.set_public(anna.tenant, path, False)
        with pytest.raises(Conflict):
            await server.checkpoints.set_public(anna.tenant, path, False)
        with pytest.raises(NotFound):
            await server.checkpoints.info(ben.tenant, path)
        assert (await second.step(2))["adam_step"] == 1  # the optimizer was not loaded


async def test_limits_apply_to_each_tenant_separately(model_dir, data_dir):
    settings = ServerSettings(max_queued_requests=3, sampling_slots=1)
    async with running(model_dir, data_dir, settings) as server:
        anna, ben = await two(server)
        sampler, other = await anna.sampler(), await ben.sampler()
        turn = await server.sampling_queue.acquire_slots("somebody", 1, 0)
        accepted = [
            await server.sampling.submit(
                anna.tenant, seq, sample(sampler, n=1, max_tokens=200, stop=[])
            )
            for seq in range(3)
        ]
        with pytest.raises(TooManyRequests) as refused:
            await server.sampling.submit(anna.tenant, 3, sample(sampler))
        assert refused.value.retry_after is not None
        assert (
            await server.sampling.submit(
                anna.tenant, 1, sample(sampler, n=1, max_tokens=200, stop=[])
            )
            == accepted[1]
        )
        sampled = asyncio.create_task(ben.sample(other))
        turn.release()
        await sampled
        for one in accepted:
            await anna.done(one.request_id)
        await anna.sample(sampler, 3)


async def test_a_request_rejected_by_a_limit_keeps_its_number(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_tokens_per_minute=600)) as server:
        model = await (await Client.start(server)).model()
        request = gradient(model.model_id)
        refused, again = 0, 0.0
        for seq in range(1, 30):
            try:
                await model.submit(request, seq)
            except TooManyRequests as error:
                refused, again = seq, error.retry_after or 0.0
                break
        assert refused
        assert 0 < again < 60
        server.tenant_limits.use_tokens(model.client.tenant.name, -1000)  # a minute later
        assert await model.submit(request, refused) == f"{model.model_id}:{refused}"


async def test_exceeding_the_storage_quota_fails_the_save(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_storage_bytes=150_000)) as server:
        anna, ben = await two(server)
        model, other = await anna.model(), await ben.model()
        await model.save("a")
        await model.save("b")
        answer = await anna.answer(await model.submit(SaveWeights(model.model_id, "c")))
        assert isinstance(answer, Failed)
        assert answer.category == "user"
        assert "delete some" in answer.message
        await other.save("a")
        await server.checkpoints.delete(anna.tenant, f"tinker://{model.model_id}/weights/a")
        await model.save("c")


@pytest.mark.slow
def test_tokens_are_shared_evenly_although_long_requests_came_first(model_dir, data_dir):
    """Each of three tenants asks for 4,000 tokens at once; when half of all are drawn, each has had
    about a third of them.
    """
    lengths, wanted = {"long": 400, "middling": 100, "short": 20}, 4000

    async def scenario() -> dict[str, int]:
        settings = ServerSettings(sampling_slots=4, max_sampling_slots_per_tenant=2)
        async with running(model_dir, data_dir, settings) as server:
            drawn = server.counters.sampled_tokens = HalfTime(int(1.5 * wanted))
            submissions = []
            for name, length in lengths.items():
                client = await Client.start(server, Tenant(name))
                sampler = await client.sampler()
                for seq in range(wanted // length):
                    asked = sample(sampler, b"x", n=1, max_tokens=length, stop=[])
                    submissions.append(server.sampling.submit(client.tenant, seq, asked))
            await asyncio.gather(
                *submissions
            )  # they share a few writes to the disk: all are there before half are drawn
            while drawn.seen is None:
                await asyncio.sleep(0.005)
            return drawn.seen

    served = run(scenario())
    assert set(served) == set(lengths)
    assert min(served.values()) > wanted / 4, served
    assert max(served.values()) < wanted * 3 / 4, served


@pytest.mark.slow
async def test_a_short_step_does_not_wait_for_long_requests_of_other_tenants(
    model_dir, data_dir, monkeypatch
):
    names = ("anna", "ben", "carla", "short")
    may_run, run_turn = threading.Event(), EngineThread._run_turn
    may_run.set()

    def run_slowly(engine: EngineThread) -> None:
        assert may_run.wait(100)
        time.sleep(0.1)
        run_turn(engine)

    monkeypatch.setattr(EngineThread, "_run_turn", run_slowly)
    async with running(model_dir, data_dir, micro_batch_tokens=500) as server:
        models = [await (await Client.start(server, Tenant(name))).model() for name in names]
        # without a common beginning
        rows = [np.roll(np.arange(500) % 256, first) for first in range(20)]
        inputs = {"target_tokens": rows[0], "weights": np.ones(500, np.float32)}
        data = [Datum(ModelInput.from_ints(row), inputs) for row in rows]
        may_run.clear()
        under_way = []
        for model in models[:3]:
            under_way.append(
                await model.submit(ForwardBackward(model.model_id, data, "cross_entropy"))
            )
            await model.submit(adam(model.model_id))
        while server.training_queue.used_slots < 3:
            await asyncio.sleep(0.005)
        may_run.set()
        await models[3].step()
        answers = [server.request_log.active.get(request_id) for request_id in under_way]
        assert all(answer is not None and not answer.answer.done() for answer in answers)
        monkeypatch.undo()


class HalfTime(Counter[str]):
    """Keeps what was counted at the moment in which there were `enough` in all: the test itself may
    look too late.
    """

    def __init__(self, enough: int) -> None:
        super().__init__()
        self.enough = enough
        self.seen: dict[str, int] | None = None

    def __setitem__(self, name: str, count: int) -> None:
        super().__setitem__(name, count)
        if self.seen is None and self.total() >= self.enough:
            self.seen = dict(self)
