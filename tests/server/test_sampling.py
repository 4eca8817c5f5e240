"""Sampling through the server: equal to the engine, many at once, in fair turns, cancellable."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from server_client import (
    BASE,
    TENANT,
    Client,
    change_database,
    gradient,
    make_core,
    running,
    sample,
    sampled_bits,
)

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.errors import EngineClosedError, UnknownModelError
from planish.server.durable.journal import RequestRow
from planish.server.results import (
    Abandoned,
    BadRequest,
    Done,
    Failed,
    NotFound,
    Tenant,
    TooManyRequests,
    TryAgain,
)
from planish.server.settings import ServerSettings
from planish.service import (
    CreateSampler,
    Operation,
    PublishSampler,
    ReleaseSampler,
    Sample,
    SampledToken,
    SaveWeightsForSampler,
)
from planish.types import ModelInput, SamplingParams


async def test_samples_equal_those_of_the_engine_alone(model_dir, data_dir):
    engine = Engine({BASE: str(model_dir)}, data_dir / "alone", EngineSettings(deterministic=True))
    engine.submit(CreateSampler("s", BASE)).result()
    alone = engine.submit(sample("s", seed=7)).result()
    engine.close()

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        response = await client.sample(await client.sampler(), seed=7)
        assert sampled_bits(response) == sampled_bits(alone)
        assert [sequence.sequence_id for sequence in response.sequences] == [
            f"{client.session_id}:sample:0:0:{index}" for index in range(2)
        ]


async def test_a_repeated_unseeded_sample_returns_the_same_answer(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        sampler = await client.sampler()
        accepted = await asyncio.gather(
            *[server.sampling.submit(TENANT, 5, sample(sampler)) for _ in range(3)]
        )
        assert len({one.request_id for one in accepted}) == 1
        await client.done(accepted[0].request_id)
        again = await server.sampling.submit(TENANT, 5, sample(sampler))
        assert again == accepted[0]
        with pytest.raises(BadRequest, match="a different request"):
            await server.sampling.submit(TENANT, 5, sample(sampler, n=3))
        large = await server.sampling.submit(TENANT, 2**63 - 1, sample(sampler))
        assert isinstance(await client.answer(large.request_id), Done)


async def test_a_request_that_never_fits_is_rejected_at_once(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        sampler = await client.sampler()
        for bad in (
            Sample(sampler, ModelInput.from_ints([99999]), 1, SamplingParams(1)),
            sample(sampler, max_tokens=5000),
        ):
            with pytest.raises(ValueError, match=r"99999|5000"):
                await server.sampling.submit(TENANT, 0, bad)
        await client.sample(sampler, 0, stop=["text"])
        with pytest.raises(NotFound):
            await server.sampling.submit(TENANT, 0, sample(f"{client.session_id}:sample:77"))


async def test_a_sampler_is_created_once(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        operation = CreateSampler(f"{client.session_id}:sample:0", BASE)
        ids = await asyncio.gather(*[server.samplers.create(TENANT, operation) for _ in range(3)])
        assert set(ids) == {operation.sampler_id}
        for other in (
            CreateSampler(operation.sampler_id, None, "tinker://a/weights/b"),
            CreateSampler(operation.sampler_id, "other"),
        ):
            with pytest.raises(BadRequest, match="already used by another"):
                await server.samplers.create(TENANT, other)
        with pytest.raises(UnknownModelError):
            await server.samplers.create(
                TENANT, CreateSampler(f"{client.session_id}:sample:1", "some/model")
            )
        with pytest.raises(NotFound):
            await server.samplers.create(
                TENANT,
                CreateSampler(f"{client.session_id}:sample:1", None, "tinker://a/weights/b"),
            )
        with pytest.raises(NotFound):
            await server.samplers.create(TENANT, CreateSampler("other:sample:1", BASE))
        info = await server.samplers.info(TENANT, operation.sampler_id)
        assert (info.base_model, info.model_path) == (BASE, None)
        with pytest.raises(NotFound):
            await server.samplers.info(TENANT, "nothing")
        model, (made,) = await client.model(), server.samplers.open_samplers()
        for _ in range(2):
            with pytest.raises(BadRequest, match="already been used"):
                await model.submit(PublishSampler(model.model_id, operation.sampler_id))
            # A closed one's number stays taken, since answers to its samples are known by it.
            await server.samplers.close(made, "it was released")


async def test_a_published_sampler_keeps_the_weights_of_its_step(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        published = await model.publish()
        named = await model.save("now")
        first = sampled_bits(await client.sample(published, 0, seed=1))
        assert first == sampled_bits(
            await client.sample(await client.sampler(None, named), 0, seed=1)
        )
        for seed in range(3):
            await model.step(seed)
        assert sampled_bits(await client.sample(published, 1, seed=1)) == first
        assert sampled_bits(await client.sample(await model.publish(), 0, seed=1)) != first


async def test_a_sampler_outlives_its_checkpoint(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(adapter_memory_bytes=1)) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        path = await model.save("now")
        sampler = await client.sampler(None, path)
        first = sampled_bits(await client.sample(sampler, 0, seed=1))
        await server.checkpoints.delete(TENANT, path)
        await model.step()
        assert sampled_bits(await client.sample(sampler, 1, seed=1)) == first
        with pytest.raises(NotFound):
            await client.sampler(None, path)


@pytest.mark.slow
async def test_many_samples_are_answered_concurrently(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(request_memory_bytes=20_000)) as server:
        client = await Client.start(server)
        sampler = await client.sampler()
        accepted = await asyncio.gather(
            *[
                server.sampling.submit(
                    TENANT, seq, sample(sampler, n=1, max_tokens=2, seed=seq % 5)
                )
                for seq in range(500)
            ]
        )
        answers = await asyncio.gather(*[client.done(one.request_id) for one in accepted])
        assert len(set(answers)) <= 5 * 3  # prompt_cache_hit_tokens may differ, tokens not
        assert not server.request_log.queued_counts()


async def test_short_requests_of_one_tenant_do_not_wait_for_all_of_another(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(sampling_slots=4)) as server:
        anna, ben = [await Client.start(server, Tenant(name)) for name in ("anna", "ben")]
        samplers = [await client.sampler() for client in (anna, ben)]
        # At once, so that they share a write to the disk and are all there when the first is
        # done.
        long = await asyncio.gather(
            *(
                server.sampling.submit(
                    anna.tenant, seq, sample(samplers[0], n=2, max_tokens=300, stop=[])
                )
                for seq in range(40)
            )
        )
        await ben.sample(samplers[1], 0, n=1, max_tokens=2)
        states = [await server.settlement.outcome(anna.tenant, one.request_id, 0) for one in long]
        assert sum(isinstance(state, TryAgain) for state in states) >= 4


async def test_a_sample_can_be_cancelled(model_dir, data_dir, slow_engine):
    async with running(model_dir, data_dir, ServerSettings(sampling_slots=32)) as server:
        client = await Client.start(server)
        sampler = await client.sampler()
        running_one, waiting = [
            await server.sampling.submit(
                TENANT, seq, sample(sampler, n=32, max_tokens=1500, stop=[])
            )
            for seq in range(2)
        ]
        while not (server.sampling_queue.used_slots and server.sampling_queue.num_waiting):
            await asyncio.sleep(0.01)
        for one in (waiting, running_one):
            server.sampling.cancel(Tenant("another"), one.request_id)
            assert not server.sampling._tasks[one.request_id].cancelling()
            server.sampling.cancel(TENANT, one.request_id)
            answer = await client.answer(one.request_id)
            assert answer == Failed("the request was cancelled", "user")
        server.sampling.cancel(TENANT, "nothing")
        response = await client.sample(sampler, 3)
        server.sampling.cancel(TENANT, f"{sampler}:3")
        assert len(response.sequences) == 2


async def test_prompt_logprobs_are_returned(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.run(gradient(model.model_id, forward_only=True))
        path = (await model.run(SaveWeightsForSampler(model.model_id, "s"))).decode()
        assert "sampler_weights/s" in path
        sampler = await client.sampler()
        question = Sample(
            sampler,
            ModelInput.from_ints([1, 2, 3]),
            1,
            SamplingParams(1),
            prompt_logprobs=True,
            prompt_only=True,
        )
        accepted = await server.sampling.submit(TENANT, 0, question)
        assert len(await client.done(accepted.request_id)) >= 3 * np.dtype(np.float32).itemsize


async def test_a_sampler_closed_during_loading_is_removed_from_memory(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        saving = SaveWeightsForSampler(model.model_id, "a")
        path = orjson.loads(await model.run(saving))["path"]
        sampler = server.samplers.get(await client.sampler(None, path))
        assert sampler is not None
        await server.adapter_cache.unload_idle(0)
        loads = server.counters.adapter_loads
        perform, loading, closed = server.engine.perform, asyncio.Event(), asyncio.Event()

        async def slow(operation: Any) -> Any:
            result = await perform(operation)
            if isinstance(operation, CreateSampler):
                loading.set()
                await closed.wait()
            return result

        server.engine.perform = slow
        accepted = await server.sampling.submit(TENANT, 0, sample(sampler.id))
        await loading.wait()
        await server.samplers.close(sampler, "it was released")
        closed.set()
        answer = await client.answer(accepted.request_id)
        assert isinstance(answer, Failed)
        assert "it was released" in answer.message
        assert server.adapter_cache.loaded_adapters() == []
        assert server.counters.adapter_loads == loads
        # The engine does not have it any more.
        await server.engine.perform(CreateSampler(sampler.id, BASE))


async def test_closing_a_sampler_during_eviction_is_not_an_error(model_dir, data_dir, caplog):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        path = orjson.loads(await model.run(SaveWeightsForSampler(model.model_id, "a")))["path"]
        sampler = server.samplers.get(await client.sampler(None, path))
        assert sampler is not None
        perform, leaving, closed = server.engine.perform, asyncio.Event(), asyncio.Event()

        async def slow(operation: Any) -> Any:
            if isinstance(operation, ReleaseSampler) and not leaving.is_set():
                leaving.set()
                await closed.wait()
            return await perform(operation)

        server.engine.perform = slow
        unloading = asyncio.create_task(server.adapter_cache.unload_idle(0))
        await leaving.wait()
        await server.samplers.close(sampler, "it was released")
        closed.set()
        await unloading
        assert not server.adapter_cache.is_loaded(sampler)
    assert "could not be unloaded" not in caplog.text


async def test_a_sampler_closed_before_publication_is_not_in_memory(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await server.adapter_cache.unload_idle(0)
        sampler_id = client.new_sampler_id()
        submit, begun, may_run = server.engine.submit, asyncio.Event(), asyncio.Event()

        async def submit_late(operation: Operation[Any]) -> asyncio.Future[Any]:
            if isinstance(operation, PublishSampler):
                begun.set()
                await may_run.wait()
            return await submit(operation)

        server.engine.submit = submit_late
        publishing = await model.submit(PublishSampler(model.model_id, sampler_id))
        await begun.wait()
        sampler = server.samplers.get(sampler_id)
        assert sampler is not None
        closing = asyncio.create_task(server.samplers.close(sampler, "it was released"))
        await asyncio.sleep(0)
        may_run.set()
        await client.answer(publishing)
        await closing
        assert [cached.id for cached in server.adapter_cache.loaded_adapters()] == [model.model_id]
        await server.engine.perform(CreateSampler(sampler_id, BASE))


async def test_a_cancelled_sample_is_charged_for_its_tokens(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_tokens_per_minute=50)) as server:
        client = await Client.start(server)
        sampled_bits, enough = [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_token(token: SampledToken) -> None:
            sampled_bits.append(token)
            if len(sampled_bits) == 100:
                loop.call_soon_threadsafe(enough.set)

        operation = replace(
            sample(await client.sampler(), n=1, max_tokens=2000, stop=[]), on_token=on_token
        )
        drawing = asyncio.create_task(server.sampling.sample(TENANT, operation))
        await enough.wait()
        drawing.cancel()
        await asyncio.wait([drawing])
        assert server.counters.sampled_tokens[TENANT.name] >= 100
        with pytest.raises(TooManyRequests):
            server.tenant_limits.check(TENANT.name, 0)


async def test_a_waiting_request_is_read_from_the_journal_when_its_turn_comes(model_dir, data_dir):
    settings = ServerSettings(request_memory_bytes=1, sampling_slots=1)
    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        sampler = await client.sampler()
        turn = await server.sampling_queue.acquire_slots("somebody", 1, 0)
        read, journaled = [], server.request_log.read_operation

        async def reading(row: RequestRow) -> Any:
            read.append(row.id)
            return await journaled(row)

        server.request_log.read_operation = reading
        accepted = [await server.sampling.submit(TENANT, seq, sample(sampler)) for seq in range(3)]
        while server.sampling_queue.num_waiting < 3:
            await asyncio.sleep(0.01)
        assert not read
        turn.release()
        for one in accepted:
            await client.done(one.request_id)
        assert len(read) == 3


async def test_a_sampler_of_an_ended_session_is_removed(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        writing, write = asyncio.Event(), server.store.write

        async def slow(*args: Any) -> Any:
            writing.set()
            await server.sessions.finish(TENANT, client.session_id, "success", None)
            return await write(*args)

        server.store.write = slow  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ValueError, match="its session ended"):
            await client.sampler()
        await server.sessions.members.wait_until_closed()
        assert server.samplers.open_samplers() == []


async def test_an_unjournaled_sample_that_crashed_the_server_is_recognised(
    model_dir, data_dir, monkeypatch
):
    async with running(model_dir, data_dir) as server:
        sampler = await (await Client.start(server)).sampler()
        killing = sample(sampler, b"kills", seed=1)
        await server.sampling.sample(TENANT, killing)
    change_database(data_dir, "INSERT INTO meta VALUES ('running', x'')")

    async def begins(operation: Operation[Any]) -> Any:
        raise EngineClosedError("in this moment the process ends")

    async def nothing() -> None:
        pass

    for end in range(5):
        server = make_core(model_dir, data_dir)
        await server.start()
        another = await (await Client.start(server)).sampler()
        repeated = replace(killing, sampler_id=another, on_token=lambda token: None)
        if end == 4:
            with pytest.raises(
                Abandoned, match="crashed 3 times while it ran a sample of everybody"
            ):
                await server.sampling.sample(TENANT, repeated)
            assert (
                await server.sampling.sample(TENANT, sample(another, b"kills", seed=2))
            ).sequences
            assert (await server.sampling.sample(Tenant("another"), repeated)).sequences
            await server.stop(5)
        else:
            with monkeypatch.context() as patched:
                patched.setattr(server.engine, "perform", begins)
                with pytest.raises(EngineClosedError):
                    await server.sampling.sample(TENANT, repeated)
            monkeypatch.setattr(server.crash_guard, "end", nothing)  # it does not stop in order
            await server.stop(5)
