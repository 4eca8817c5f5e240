"""Training through the server: in the order of the numbers, each once, with the results of the
engine alone.
"""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from server_client import (
    BASE,
    RANK,
    TENANT,
    Client,
    Model,
    adam,
    gradient,
    run,
    running,
    state,
    submit_training,
)

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.errors import UnknownModelError
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import ModelRow, select
from planish.server.models.adapter import ModelAdapter
from planish.server.results import BadRequest, Done, Failed, Gone, NotFound, TryAgain
from planish.server.server import Server
from planish.server.settings import ServerSettings
from planish.service import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import Datum, LoraConfig, ModelInput
from planish.wire.training import output_from_message

BAD = [Datum(ModelInput.from_ints([99999]), {"target_tokens": [1], "weights": [1.0]})]


def test_results_equal_those_of_the_engine_alone(model_dir, data_dir):
    engine = Engine({BASE: str(model_dir)}, data_dir / "alone", EngineSettings(deterministic=True))
    engine.submit(CreateModel("m", BASE, LoraConfig(RANK, 1))).result()
    alone = [(engine.submit(gradient("m", seed)), engine.submit(adam("m"))) for seed in range(3)]
    engine.submit(SaveWeights("m", "last")).result()
    engine.close()

    async def scenario() -> str:
        async with running(model_dir, data_dir) as server:
            model = await (await Client.start(server)).model()
            sent = [
                [
                    await model.submit(op)
                    for op in (gradient(model.model_id, seed), adam(model.model_id))
                ]
                for seed in range(3)
            ]
            for (first, second), (ours, ours_too) in zip(sent, alone, strict=True):
                output = output_from_message(await model.client.done(first))
                assert output.metrics == ours.result().metrics
                for datum, expected in zip(
                    output.loss_fn_outputs, ours.result().loss_fn_outputs, strict=True
                ):
                    np.testing.assert_array_equal(
                        datum["logprobs"].to_numpy(), expected["logprobs"].to_numpy()
                    )
                assert (
                    orjson.loads(await model.client.done(second))["metrics"]
                    == ours_too.result().metrics
                )
            return await model.save("last")

    path = run(scenario())
    theirs = state(data_dir.parent / "data", path)
    moved = data_dir / "checkpoints" / "m"
    (data_dir / "alone" / "m").rename(moved)
    assert theirs == state(data_dir, "tinker://m/weights/last")


async def test_requests_run_in_the_order_of_their_numbers(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        operations = [gradient(model.model_id), adam(model.model_id)] * 2
        ids = {}
        for seq in (4, 2, 3):
            ids[seq] = await model.submit(operations[seq - 1], seq)
        assert isinstance(await server.settlement.outcome(TENANT, ids[2], 0.2), TryAgain)
        ids[1] = await model.submit(operations[0], 1)
        steps = [
            orjson.loads(await model.client.done(ids[seq]))["metrics"]["adam_step"]
            for seq in (2, 4)
        ]
        assert steps == [1, 2]


async def test_a_repeated_number_needs_the_same_request(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        create = CreateModel(f"{client.session_id}:train:0", BASE, LoraConfig(RANK))
        both = await asyncio.gather(*[server.models.create(TENANT, create) for _ in range(3)])
        assert len({accepted.request_id for accepted in both}) == 1
        await client.done(both[0].request_id)
        assert await server.models.create(TENANT, create) == both[0]
        with pytest.raises(BadRequest, match="a different request"):
            await server.models.create(
                TENANT, CreateModel(create.model_id, BASE, LoraConfig(RANK + 1))
            )
        model = Model(client, create.model_id)
        ids = await asyncio.gather(*[model.submit(gradient(create.model_id), 1) for _ in range(3)])
        assert len(set(ids)) == 1
        with pytest.raises(BadRequest, match="a different request"):
            await model.submit(gradient(create.model_id, 5), 1)
        await client.done(ids[0])
        assert await model.submit(gradient(create.model_id), 1) == ids[0]
        with pytest.raises(BadRequest):
            await model.submit(adam(create.model_id), 1)
        step = await model.submit(adam(create.model_id), 2)
        assert orjson.loads(await client.done(step))["metrics"]["adam_step"] == 1
        first, again = [await client.answer(step) for _ in range(2)]
        assert first == again


async def test_a_failed_forward_backward_fails_only_its_step(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        bad = ForwardBackward(model.model_id, BAD, "cross_entropy")
        ids = [
            await model.submit(op) for op in (gradient(model.model_id), bad, adam(model.model_id))
        ]
        answers = [await model.client.answer(request_id) for request_id in ids]
        assert isinstance(answers[0], Done)
        assert isinstance(answers[1], Failed)
        assert "99999" in answers[1].message
        assert answers[1].category == "user"
        assert isinstance(answers[2], Failed)
        assert answers[1].message in answers[2].message
        assert answers[2].error_class == "UserError"
        assert (await model.step())["adam_step"] == 1


async def test_an_unreadable_body_uses_up_its_number(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        step = await model.submit(adam(model.model_id), 3)
        await server.models.reject(TENANT, model.model_id, 2, BadRequest("data[0] is torn"))
        await model.submit(gradient(model.model_id), 1)
        answer = await model.client.answer(step)
        assert isinstance(answer, Failed)
        with pytest.raises(BadRequest, match="data.0. is torn"):
            await model.submit(gradient(model.model_id), 2)
        await server.models.reject(TENANT, model.model_id, 2, BadRequest("again"))
        await server.models.reject(TENANT, "no:train:0", 1, BadRequest("no model"))
        await server.models.reject(
            TENANT, model.model_id, 4, BadRequest("adam_params is missing"), "optim_step"
        )
        await server.models.reject(
            TENANT, model.model_id, 5, BadRequest("path is missing"), "save_weights"
        )
        model.seq = 5
        assert (await model.step())["adam_step"] == 1


async def test_a_number_that_arrives_is_not_used_up_by_a_body_that_cannot_be_read(
    model_dir, data_dir
):
    """A client that sends both has made a mistake. The request that came first counts."""
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        await model.run(gradient(model.model_id))
        accepted, _ = await asyncio.gather(
            submit_training(server, TENANT, 2, adam(model.model_id)),
            server.models.reject(TENANT, model.model_id, 2, BadRequest("data[0] is torn")),
        )
        assert isinstance(await model.client.answer(accepted.request_id), Done)
        model.seq = 2
        assert (await model.step())["adam_step"] == 2


class IntakeClock:
    """The clock by which requests wait for a missing number. It stands still until a test moves it."""

    now = 0.0

    async def wait_until_missed(self, server: Server, model: Model, seq_id: int) -> None:
        """Wait until the server has noticed that `seq_id` of the model is missing."""
        intake = server.models._intakes[model.model_id]
        while intake._missing_since is None or intake._missing_since[0] != seq_id:
            await asyncio.sleep(0.01)


@pytest.fixture
def intake_clock(monkeypatch: pytest.MonkeyPatch) -> IntakeClock:
    clock = IntakeClock()
    fake_time = SimpleNamespace(time=time.time, monotonic=lambda: clock.now)
    monkeypatch.setattr("planish.server.models.intake.time", fake_time)
    return clock


@pytest.mark.slow
async def test_requests_after_a_missing_number_fail(model_dir, data_dir, intake_clock):
    async with running(model_dir, data_dir, ServerSettings(missing_request_timeout=0.4)) as server:
        client = await Client.start(server)
        model, other = await client.model(), await client.model()
        await model.run(gradient(model.model_id))
        late = [
            await model.submit(adam(model.model_id), 3),
            await model.submit(gradient(model.model_id), 6),
        ]
        await intake_clock.wait_until_missed(server, model, 2)
        intake_clock.now = 0.5
        assert (await other.step())["adam_step"] == 1
        for request_id in late:
            answer = await client.answer(request_id)
            assert isinstance(answer, Failed)
            assert "seq_id=2" in answer.message
            assert answer.category == "user"
        with pytest.raises(BadRequest, match="too late"):
            await model.submit(gradient(model.model_id), 4)
        model.seq = 6
        refused = await client.answer(await model.submit(adam(model.model_id)))
        assert isinstance(refused, Failed)  # the gradient of number 6 is missing
        assert (await model.step())["adam_step"] == 1


@pytest.mark.slow
async def test_each_missing_number_has_the_whole_timeout(model_dir, data_dir, intake_clock):
    async with running(model_dir, data_dir, ServerSettings(missing_request_timeout=0.4)) as server:
        client = await Client.start(server)
        model = await client.model()
        second = await model.submit(gradient(model.model_id, forward_only=True), 2)
        await intake_clock.wait_until_missed(server, model, 1)
        intake_clock.now = 0.3
        fourth = await model.submit(gradient(model.model_id, forward_only=True), 4)
        await model.submit(gradient(model.model_id, forward_only=True), 1)
        assert isinstance(await client.answer(second), Done)
        await intake_clock.wait_until_missed(server, model, 3)
        intake_clock.now = 0.6
        assert isinstance(await server.settlement.outcome(TENANT, fourth, 0.5), TryAgain)
        intake_clock.now = 0.8
        assert isinstance(await client.answer(fourth), Failed)


async def test_invalid_numbers_and_unknown_models_are_rejected(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        with pytest.raises(BadRequest, match="numbered from 1"):
            await model.submit(gradient(model.model_id), 0)
        with pytest.raises(NotFound):
            await submit_training(server, TENANT, 1, adam(f"{client.session_id}:train:7"))
        with pytest.raises(NotFound):
            await server.models.create(TENANT, CreateModel("other:train:0", BASE))
        with pytest.raises(UnknownModelError, match="this server has tiny"):
            await server.models.create(
                TENANT, CreateModel(f"{client.session_id}:train:8", "some/hub-model")
            )
        with pytest.raises(NotFound):
            await server.settlement.outcome(TENANT, "nothing", 0)
        with pytest.raises(NotFound):
            await server.models.info(TENANT, "nothing")
        assert (await server.models.info(TENANT, model.model_id)).lora_rank == RANK


async def test_a_checkpoint_name_can_be_used_once(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        await model.step()
        path = await model.save("a")
        first = state(data_dir, path)
        await model.step()
        taken = await model.client.answer(await model.submit(SaveWeights(model.model_id, "a")))
        assert isinstance(taken, Failed)
        assert "exists" in taken.message
        assert state(data_dir, path) == first
        await model.save("a", overwrite=True)
        assert state(data_dir, path) != first
        with pytest.raises(ValueError, match="reserved for the server"):
            await model.submit(SaveWeights(model.model_id, "_planish.snapshot.1"))
        for _ in range(2):  # equal weights may be saved again
            await model.run(SaveWeightsForSampler(model.model_id, "s"))
        await model.step()
        other = await model.client.answer(
            await model.submit(SaveWeightsForSampler(model.model_id, "s"))
        )
        assert isinstance(other, Failed)


async def test_a_model_is_created_from_a_checkpoint(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        for seed in range(2):
            await model.step(seed)
        path = await model.save("a")
        second = await client.model(base_model=None, from_path=path, with_optimizer=True)
        await model.step(5)
        assert (
            orjson.loads(await model.run(LoadWeights(model.model_id, path, with_optimizer=True)))[
                "path"
            ]
            == path
        )
        assert await model.step(6) == await second.step(6)
        paths = [await model.save("b"), await second.save("b")]
        assert state(data_dir, paths[0]) == state(data_dir, paths[1])
        with pytest.raises(NotFound):
            await model.submit(LoadWeights(model.model_id, "tinker://none/weights/a"))
        with pytest.raises(ValueError, match="checkpoint path"):
            await model.submit(LoadWeights(model.model_id, "/etc/passwd"))


async def test_an_unloaded_model_rejects_requests(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        step = [await model.submit(op) for op in (gradient(model.model_id), adam(model.model_id))]
        unload = await server.models.unload(TENANT, model.model_id)
        assert await server.models.unload(TENANT, model.model_id) == unload
        assert isinstance(await client.answer(step[1]), Done)
        assert orjson.loads(await client.done(unload.request_id))["type"] == "unload_model"
        with pytest.raises(Gone):
            await model.submit(gradient(model.model_id))
        assert await server.models.unload(TENANT, model.model_id) == unload
        assert server.adapter_cache.loaded_adapters() == []
        assert (await server.runs.run(TENANT, model.model_id)).base_model == BASE


async def test_a_model_evicted_while_closing_leaves_no_snapshot(model_dir, data_dir):
    """Both wait for the snapshot under way; the one that was to be taken behind it would have
    nobody to remove it.
    """
    async with running(model_dir, data_dir) as server:
        used = await (await Client.start(server)).model()
        await used.step()
        model, submit, saving = (
            next(iter(server.models.open_models())),
            server.engine.submit,
            asyncio.Event(),
        )

        async def slow(operation: Operation[Any]) -> asyncio.Future[Any]:
            if isinstance(operation, SaveWeights):
                await saving.wait()
            return await submit(operation)

        server.engine.submit = slow  # type: ignore[method-assign]
        snapshot = asyncio.create_task(model.adapter.begin_snapshot())
        await asyncio.sleep(0)
        assert model.adapter.is_snapshotting
        # what was with the engine when it began is counted when it is answered
        model.adapter.state.cost.num_changes = 1
        closing = asyncio.create_task(model.close("it was unloaded"))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(server.adapter_cache.unload_idle(0))
        await asyncio.sleep(0.01)
        saving.set()
        await asyncio.gather(snapshot, closing, leaving)
        while model.adapter.is_snapshotting:
            await asyncio.sleep(0.01)
        rows = await server.store.read(lambda db: select(db, ModelRow, "1"))
        assert [(row.closed, row.snapshot) for row in rows] == [("it was unloaded", None)]
    assert not (data_dir / "checkpoints" / model.id).exists()


async def test_a_failed_creation_is_reported_and_leaves_no_files(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        sampler_path = orjson.loads(await model.run(SaveWeightsForSampler(model.model_id, "s")))[
            "path"
        ]
        bad = CreateModel(
            f"{client.session_id}:train:9", from_path=sampler_path, with_optimizer=True
        )
        accepted = await server.models.create(TENANT, bad)
        answer = await client.answer(accepted.request_id)
        assert isinstance(answer, Failed)
        assert "optimizer" in answer.message
        with pytest.raises(Gone, match="could not be created"):
            await submit_training(server, TENANT, 1, adam(bad.model_id))
        with pytest.raises(ValueError, match="could not be created"):
            await server.models.info(TENANT, bad.model_id)
        await client.model(base_model=None, from_path=sampler_path)


async def test_a_creation_repeated_while_being_written_is_the_same(
    model_dir, data_dir, monkeypatch
):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        create = CreateModel(f"{client.session_id}:train:0", BASE, LoraConfig(RANK))
        repeats = server.intake.was_accepted

        pauses = iter((0.3, 0.0, 0.0))  # a request without a pause overtakes the first one

        async def slowly(row: RequestRow) -> bool:
            found = await repeats(row)
            await asyncio.sleep(next(pauses))
            return found

        monkeypatch.setattr(server.intake, "was_accepted", slowly)
        accepted, again = await asyncio.gather(
            server.models.create(TENANT, create), server.models.create(TENANT, create)
        )
        assert accepted == again
        assert isinstance(await client.answer(accepted.request_id), Done)


async def test_requests_after_a_failed_creation_load_no_adapter(model_dir, data_dir, monkeypatch):
    loaded = []
    load = ModelAdapter.load

    async def loading(model: ModelAdapter) -> None:
        loaded.append(model.id)
        await load(model)

    monkeypatch.setattr(ModelAdapter, "load", loading)

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        path = orjson.loads(await model.run(SaveWeightsForSampler(model.model_id, "s")))["path"]
        bad = CreateModel(f"{client.session_id}:train:9", from_path=path, with_optimizer=True)
        created = await server.models.create(TENANT, bad)
        behind = await submit_training(server, TENANT, 1, adam(bad.model_id))
        for accepted in (created, behind):
            assert isinstance(await client.answer(accepted.request_id), Failed)
        await model.step()
        assert loaded == [model.model_id, bad.model_id]
