"""After a clean stop, and after adapters were evicted, everything resumes without a difference."""

import asyncio
import errno
import logging
import sqlite3
from contextlib import closing
from dataclasses import dataclass

import orjson
import pytest
from server_client import (
    BASE,
    TENANT,
    Client,
    Model,
    adam,
    change_database,
    gradient,
    make_core,
    run,
    running,
    sample,
    sampled_bits,
    state,
)

from planish.server.durable import retries
from planish.server.durable.store import Store, StoredBody
from planish.server.results import Done, Failed, Gone, NotFound, TryAgain, Unavailable
from planish.server.server import Server
from planish.server.settings import ServerSettings
from planish.service import CreateModel, ForwardBackward, LoadWeights, Sample, SaveWeights
from planish.types import Checkpoint, Datum, ModelInput

SMALL = ServerSettings(adapter_memory_bytes=1, max_replay_seconds=0.01, max_replay_bytes=1000)


@pytest.mark.slow
def test_evicted_adapters_are_restored_bitwise(model_dir, tmp_path):
    async def play(
        name: str, settings: ServerSettings
    ) -> tuple[list[object], list[dict[str, bytes]]]:
        data_dir = tmp_path / name
        async with running(model_dir, data_dir, settings) as server:
            client = await Client.start(server)
            models = [await client.model(seed) for seed in (1, 2)]
            seen: list[object] = []
            for turn in range(3):
                for model in models:
                    await model.run(gradient(model.model_id, turn))
                seen += [await model.step(turn + 50) for model in models]
                sampler = await models[turn % 2].publish()
                seen.append(sampled_bits(await client.sample(sampler, turn, seed=turn)))
                seen.append(
                    sampled_bits(
                        await client.sample(f"{client.session_id}:sample:0", 100 + turn, seed=0)
                    )
                )
            return seen, [state(data_dir, await model.save("last")) for model in models]

    assert run(play("small", SMALL)) == run(play("large", ServerSettings()))


@pytest.mark.slow
def test_a_restart_resumes_everything(model_dir, tmp_path):
    async def play(name: str, restarts: bool) -> tuple[list[object], dict[str, bytes]]:
        data_dir = tmp_path / name
        seen: list[object] = []
        server = running(model_dir, data_dir)
        client = await Client.start(await server.__aenter__())

        async def restart() -> None:
            nonlocal server
            if restarts:
                await server.__aexit__(None, None, None)
                server = running(model_dir, data_dir)
                client.server = await server.__aenter__()

        model = await client.model()
        base = await client.sampler()
        await restart()
        seen.append(await model.step(1))
        await restart()
        published = await model.publish()
        path = await model.save("a")
        await model.run(gradient(model.model_id, 2))
        await restart()  # with a gradient that no step has applied
        seen.append(await model.step(3))
        saved = await client.sampler(None, path)
        await restart()
        seen += [
            sampled_bits(await client.sample(sampler, 1, seed=4))
            for sampler in (base, published, saved)
        ]
        await model.run(LoadWeights(model.model_id, path, with_optimizer=True))
        await client.server.checkpoints.delete(TENANT, path)
        await restart()
        seen.append(await model.step(5))
        seen.append(sampled_bits(await client.sample(saved, 2, seed=4)))
        last = state(data_dir, await model.save("last"))
        await server.__aexit__(None, None, None)
        return seen, last

    assert run(play("restarted", True)) == run(play("running", False))


@pytest.mark.slow
def test_more_than_ten_requests_are_replayed_in_order(model_dir, tmp_path):
    """A pending gradient prevents a snapshot, so the start replays all requests of the model."""

    async def play(name: str, restarts: bool) -> dict[str, bytes]:
        async with running(model_dir, tmp_path / name) as server:
            client = await Client.start(server)
            model = await client.model()
            for turn in range(6):
                await model.step(turn)
            await model.run(gradient(model.model_id, 6))
            if not restarts:
                await model.run(adam(model.model_id))
                return state(tmp_path / name, await model.save("last"))
        async with running(model_dir, tmp_path / name) as server:
            client.server = server
            await model.run(adam(model.model_id))
            return state(tmp_path / name, await model.save("last"))

    assert run(play("restarted", True)) == run(play("running", False))


def test_a_failed_step_has_the_same_error_after_a_restart(model_dir, tmp_path):
    tokens = ModelInput.from_ints([1, 2, 3])
    inputs = {"target_tokens": [2, 3, 4], "logprobs": [-1e4] * 3, "advantages": [1.0] * 3}

    async def play(name: str, restarts: bool) -> list[Failed]:
        async with running(model_dir, tmp_path / name) as server:
            client = await Client.start(server)
            model = await client.model()
            infinite = ForwardBackward(
                model.model_id, [Datum(tokens, inputs)], "importance_sampling"
            )
            answers = [await client.answer(await model.submit(infinite))]
            if not restarts:
                answers.append(await client.answer(await model.submit(adam(model.model_id))))
        if restarts:
            async with running(model_dir, tmp_path / name) as server:
                client.server = server
                answers.append(await client.answer(await model.submit(adam(model.model_id))))
        return [answer for answer in answers if isinstance(answer, Failed)]

    part, step = run(play("running", False))
    assert part.message in step.message
    assert part.error_class == step.error_class == "NonFiniteError"
    assert run(play("restarted", True))[1] == step


async def test_answers_and_numbers_survive_a_restart(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        sampler = await client.sampler()
        done = [await model.submit(op) for op in (gradient(model.model_id), adam(model.model_id))]
        before = [await client.answer(request_id) for request_id in done]
        accepted = await server.sampling.submit(TENANT, 0, sample(sampler))
        drawn_before = await client.answer(accepted.request_id)
        bad = Datum(
            ModelInput.from_ints([1]),
            {"target_tokens": [2], "logprobs": [-1e4], "advantages": [1.0]},
        )
        failing = await (await client.model()).submit(
            ForwardBackward(f"{client.session_id}:train:1", [bad], "importance_sampling")
        )
        failed = await client.answer(failing)
        assert isinstance(failed, Failed)
        assert failed.error_class == "NonFiniteError"
        waiting = await model.submit(adam(model.model_id), 4)
        assert isinstance(await server.settlement.outcome(TENANT, waiting, 0.05), TryAgain)
    async with running(model_dir, data_dir) as server:
        client.server = server
        assert [await client.answer(request_id) for request_id in done] == before
        assert await client.answer(accepted.request_id) == drawn_before
        assert await client.answer(failing) == failed
        assert await server.sampling.submit(TENANT, 0, sample(sampler)) == accepted
        assert await model.submit(gradient(model.model_id), 1) == done[0]
        assert isinstance(await server.settlement.outcome(TENANT, waiting, 0.05), TryAgain)
        await model.submit(gradient(model.model_id, 1), 3)
        assert orjson.loads(await client.done(waiting))["metrics"]["adam_step"] == 2


async def test_a_disk_fault_after_a_restart_fails_no_request(model_dir, data_dir, monkeypatch):
    """An unanswered request may have run before the restart, and later requests depend on it."""
    faults = 0
    read_body = Store.read_body

    def read(store: Store, stored: StoredBody) -> bytes:
        nonlocal faults
        if faults:
            faults -= 1
            raise OSError(errno.EIO, "Input/output error")
        return read_body(store, stored)

    monkeypatch.setattr(Store, "read_body", read)
    monkeypatch.setattr(retries, "_PAUSES", (0.0,) * 4)

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        await model.run(gradient(model.model_id))  # keeps the stop from taking a snapshot
        server.stopping.set()
        waiting = await model.submit(adam(model.model_id))
        faults = 2
    async with running(model_dir, data_dir) as server:
        client.server = server
        assert isinstance(await client.answer(waiting), Done)
        assert faults == 0


async def do_nothing(seconds: float) -> None:
    return


async def test_a_stop_rejects_new_requests_and_keeps_waiting_ones(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(sampling_slots=1)) as server:
        client = await Client.start(server)
        sampler = await client.sampler()
        accepted = [
            await server.sampling.submit(
                TENANT, seq, sample(sampler, n=1, max_tokens=300, stop=[], seed=seq)
            )
            for seq in range(4)
        ]
        stopping = asyncio.create_task(server.stop(0.3))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            server.engine.check_open()
        assert not server.engine.is_healthy
        await stopping
        server.stop = do_nothing  # it has stopped
    async with running(model_dir, data_dir) as server:
        client.server = server
        answers = [await client.answer(one.request_id) for one in accepted]
        assert all(isinstance(answer, Done) for answer in answers)


async def test_a_stop_waits_only_for_requests_in_the_engine(model_dir, data_dir):
    """However many wait, a restart takes no longer; it took all of its 30 seconds."""

    async with running(model_dir, data_dir, ServerSettings(sampling_slots=1)) as server:
        client = await Client.start(server)
        sampler = await client.sampler()
        accepted = [
            await server.sampling.submit(
                TENANT, seq, sample(sampler, n=1, max_tokens=500, stop=[], seed=seq)
            )
            for seq in range(5)
        ]
        counters = server.counters
        while not counters.num_sample_requests:
            await asyncio.sleep(0)
        first = counters.num_sample_requests
        await server.stop(20)
        server.stop = do_nothing  # it has stopped
        assert counters.num_sample_requests == first
        answers = [
            await server.settlement.outcome(TENANT, one.request_id, 0) for one in accepted[:first]
        ]
        assert all(isinstance(answer, Done) for answer in answers)
    async with running(model_dir, data_dir) as server:
        client.server = server
        assert all([isinstance(await client.answer(one.request_id), Done) for one in accepted])


async def test_the_journal_is_cut_at_snapshots(model_dir, data_dir):
    async with running(model_dir, data_dir, SMALL) as server:
        model = await (await Client.start(server)).model()
        for seed in range(4):
            await model.step(seed)
    with closing(sqlite3.connect(data_dir / "server.db")) as connection:
        rows = connection.execute("SELECT seq, body IS NULL FROM requests ORDER BY seq").fetchall()
    assert [bool(cut) for _, cut in rows] == [True] * 9
    private = [path.name for path in (data_dir / "checkpoints").glob("*/weights/*")]
    assert private == ["_planish.snapshot.8"]


async def test_files_left_by_a_crash_are_removed_at_the_next_start(model_dir, data_dir):
    async with running(model_dir, data_dir, SMALL) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        kept = await model.save("kept")
    weights = data_dir / "checkpoints" / model.model_id / "weights"
    (snapshot,) = [path for path in weights.iterdir() if "snapshot" in path.name]
    for name in ("_planish.snapshot.1", "_planish.loaded.99"):
        (weights / name).mkdir()
        for file in snapshot.iterdir():
            (weights / name / file.name).write_bytes(file.read_bytes())
    lost = Checkpoint(
        "weights/lost",
        "training",
        (await listed(model_dir, data_dir))[0].time,
        kept + "-lost",
        1,
    )
    change_database(
        data_dir,
        "INSERT INTO checkpoints (path, tenant, run, bytes, created, user_metadata) VALUES (?, "
        "'everybody', ?, 1, 1, '{}')",
        (lost.tinker_path, model.model_id),
    )
    assert [item.tinker_path for item in await listed(model_dir, data_dir)] == [kept]
    assert {path.name for path in weights.iterdir()} == {"kept", snapshot.name}


async def listed(model_dir, data_dir) -> list[Checkpoint]:
    async with running(model_dir, data_dir) as server:
        return list((await server.runs.list_checkpoints(TENANT)).items)


async def test_a_session_that_ended_before_a_crash_is_cleared_at_the_next_start(
    model_dir, data_dir
):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        sampler = await model.publish()
        path = await model.save("a")
    change_database(data_dir, "UPDATE sessions SET ended = 1, reason = 'success'")
    async with running(model_dir, data_dir) as server:
        client.server = server
        await server.sessions.members.wait_until_closed()
        for call in (client.sample(sampler), model.publish()):
            with pytest.raises(Gone):
                await call
        assert [
            item.tinker_path for item in (await server.runs.list_checkpoints(TENANT)).items
        ] == [path]
        assert {file.name for file in (data_dir / "checkpoints").glob("*/*/*")} == {"a"}


async def test_requests_for_a_base_model_no_longer_served_fail_by_name(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        sampler = await client.sampler()
    moved = make_core(model_dir.parent / "gone", data_dir)
    await moved.start()
    client.server = moved
    answer = await client.answer(await model.submit(gradient(model.model_id)))
    assert isinstance(answer, Failed)
    assert "gone" in answer.message or BASE in answer.message
    with pytest.raises((ValueError, NotFound)):
        await client.sample(sampler, 5)
    await moved.stop(5)
    async with running(model_dir, data_dir) as server:
        client.server = server
        assert isinstance(await client.answer(await model.submit(adam(model.model_id))), Failed)
        assert (await model.step(1))["adam_step"] == 2


async def test_a_replay_with_other_gradient_norms_is_logged(model_dir, data_dir, caplog):
    with caplog.at_level(logging.WARNING):
        async with running(model_dir, data_dir, ServerSettings(adapter_idle_timeout=1e6)) as server:
            client = await Client.start(server)
            model = await client.model()
            for _ in range(2):
                await model.run(gradient(model.model_id))
                await model.run(adam(model.model_id))
            await model.run(gradient(model.model_id))  # keeps a snapshot from being taken
        change_database(
            data_dir,
            "UPDATE requests SET result = ? WHERE kind = 'optim_step'",
            (b'{"metrics":{"grad_norm":1.0}}',),
        )
        async with running(model_dir, data_dir) as server:
            client.server = server
            await model.run(adam(model.model_id))
    assert caplog.text.count("does not compute reproducibly") == 1
    assert "the first run computed 1.0" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", "missing file", "row", "snapshot", "missing snapshot"])
async def test_a_model_with_altered_files_is_not_loaded(
    model_dir, data_dir, monkeypatch, caplog, where
):
    if "file" in where:
        monkeypatch.setattr("planish.server.durable.store._MIN_FILE_BYTES", 100)

    def alter(path):
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        if "missing" in where:
            path.unlink()
        return content

    with caplog.at_level(logging.ERROR):
        settings = SMALL if "snapshot" in where else ServerSettings()
        async with running(model_dir, data_dir, settings) as server:
            client = await Client.start(server)
            model, other = await client.model(1), await client.model(2)
            for each in (model, other):
                await each.step(1)
            if "snapshot" not in where:
                for each in (model, other):
                    await each.run(gradient(each.model_id, 2))  # keeps a snapshot from being taken
        with closing(sqlite3.connect(data_dir / "server.db")) as connection:
            of_gradient = (
                "SELECT body, body_file FROM requests WHERE owner = ? AND kind = "
                "'forward_backward' ORDER BY seq"
            )
            row, name = connection.execute(of_gradient, (model.model_id,)).fetchone()
            if where == "row":
                change = "UPDATE requests SET body = ? WHERE body = ?"
                connection.execute(change, (row[:-1] + bytes([row[-1] ^ 1]), row))
                connection.commit()
        snapshot = next(
            data_dir.glob(f"checkpoints/{model.model_id}/weights/_planish.*/optimizer.safetensors"),
            None,
        )
        place = snapshot or (data_dir / "bodies" / name if name else None)
        before = alter(place) if place else b""
        async with running(model_dir, data_dir, settings) as server:
            client.server = server
            answer = await client.answer(await model.submit(gradient(model.model_id, 3)))
            assert isinstance(answer, Failed)
            assert "cannot be loaded" in answer.message
            assert "backup" in answer.message
            assert answer.error_class == "DamagedFileError"
            assert (place.name if place else "server.db") in caplog.text
            await other.step(4)
        if place:
            place.write_bytes(before)
            async with running(model_dir, data_dir, settings) as server:
                client.server = server
                await model.run(gradient(model.model_id, 5))


@dataclass(frozen=True)
class UnsavedSampler:
    """A sampler without a name whose weights could not be saved, because the disk was full."""

    model: Model
    id: str
    first: object
    """Its first sample."""
    refused: list[str]
    """The paths at which it could not be saved."""

    async def sample(self, seq: int) -> object:
        """Sample with the seed of the first sample."""
        return sampled_bits(await self.model.client.sample(self.id, seq, seed=1))


async def publish_unsaved_sampler(
    server: Server, monkeypatch, may_fail: asyncio.Event, failures: int
) -> UnsavedSampler:
    """Train a model for one step and publish it. The first `failures` saves of the sampler wait for
    `may_fail`, and fail.
    """
    save, refused = server.engine.checkpoints.info, []

    async def refuse(path: str):
        if "_planish.sampler" in path and len(refused) < failures:
            await may_fail.wait()
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return await save(path)

    model = await (await Client.start(server)).model()
    await model.step(0)
    monkeypatch.setattr(server.engine.checkpoints, "info", refuse)
    sampler = await model.publish()
    first = sampled_bits(await model.client.sample(sampler, 0, seed=1))
    return UnsavedSampler(model, sampler, first, refused)


async def test_a_sampler_that_could_not_be_saved_is_saved_when_there_is_space(
    model_dir, data_dir, monkeypatch
):
    async with running(model_dir, data_dir, SMALL) as server:
        (may_fail := asyncio.Event()).set()
        sampler = await publish_unsaved_sampler(server, monkeypatch, may_fail, failures=1)
        await sampler.model.step(1)
        last = await sampler.model.step(2)
        assert await sampler.sample(1) == sampler.first
        assert sampler.refused
    async with running(model_dir, data_dir) as server:
        sampler.model.client.server = server
        assert await sampler.sample(2) == sampler.first
        assert (await sampler.model.step(3))["adam_step"] == last["adam_step"] + 1


async def test_samples_are_answered_while_the_save_of_their_sampler_is_repeated(
    model_dir, data_dir, monkeypatch
):
    async with running(model_dir, data_dir, SMALL) as server:
        steps_are_done, are_sampled = asyncio.Event(), asyncio.Event()
        perform = server.engine.perform
        sampler = await publish_unsaved_sampler(server, monkeypatch, steps_are_done, failures=1)

        async def perform_late(operation):
            if sampler.refused and not isinstance(operation, Sample):
                await are_sampled.wait()
            return await perform(operation)

        monkeypatch.setattr(server.engine, "perform", perform_late)
        await sampler.model.step(1)
        steps_are_done.set()
        opened, seq = server.samplers.get(sampler.id), 0
        assert opened is not None
        while opened.row.source is None:
            seq += 1
            assert await asyncio.wait_for(sampler.sample(seq), 120) == sampler.first
            if seq == 2:
                are_sampled.set()
        assert sampler.refused
        assert seq > 1


async def test_a_snapshot_is_not_recorded_if_a_sampler_before_it_could_not_be_saved(
    model_dir, data_dir, monkeypatch
):
    async with running(model_dir, data_dir, SMALL) as server:
        may_fail, may_end, held = asyncio.Event(), asyncio.Event(), []
        submit, perform = server.engine.submit, server.engine.perform

        async def hold_snapshots(operation):
            future = await submit(operation)
            if not isinstance(operation, SaveWeights) or may_end.is_set():
                return future

            async def later():
                result = await future
                await may_end.wait()
                return result

            held.append(operation.name)
            return asyncio.ensure_future(later())

        async def end_snapshots_before_a_restore(operation):
            if isinstance(operation, CreateModel):
                may_end.set()
                await asyncio.sleep(0.2)
            return await perform(operation)

        sampler = await publish_unsaved_sampler(server, monkeypatch, may_fail, failures=1000)
        model = sampler.model
        opened = server.models.get(model.model_id)
        assert opened is not None
        while opened.adapter.is_snapshotting:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(server.engine, "submit", hold_snapshots)
        monkeypatch.setattr(server.engine, "perform", end_snapshots_before_a_restore)
        steps, last = 1, await model.step(1)
        while not held:
            steps, last = steps + 1, await model.step(steps + 1)
        may_fail.set()
        while not opened.adapter.state.has_lost_work:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.5, may_end.set)
    async with running(model_dir, data_dir) as server:
        model.client.server = server
        assert await sampler.sample(1) == sampler.first
        assert (await model.step(steps + 1))["adam_step"] == last["adam_step"] + 1


async def test_a_step_whose_gradient_is_stored_as_failed_is_never_left_out(
    model_dir, data_dir, caplog
):
    """The model is not loaded, because its state cannot be computed. Its checkpoints remain, and
    other models are not affected.
    """
    async with running(model_dir, data_dir, ServerSettings(adapter_idle_timeout=1e6)) as server:
        client = await Client.start(server)
        model, other = await client.model(1), await client.model(2)
        await model.run(gradient(model.model_id))
        await model.run(adam(model.model_id))
        saved = await model.save("one")
        part = await model.submit(gradient(model.model_id, 2))
        await client.done(part)
        second = await model.submit(adam(model.model_id))
        applied = await client.answer(second)
        await model.run(gradient(model.model_id, 3))  # keeps a snapshot from being taken
    change_database(
        data_dir,
        "UPDATE requests SET state = 'failed', message = 'Input/output error', category = 'server',"
        " body = NULL, body_file = NULL, result = NULL, result_bytes = 0 WHERE id = ?",
        [part],
    )
    for _ in range(2):  # a restart changes nothing
        caplog.clear()
        async with running(model_dir, data_dir) as server:
            client.server = server
            answer = await client.answer(await model.submit(adam(model.model_id)))
            assert isinstance(answer, Failed)
            assert answer.error_class == "DamagedFileError"
            assert f"Create a new client from your last checkpoint, {saved};" in answer.message
            assert f"applied {second}, but a request before it is stored as failed" in caplog.text
            assert await client.answer(second) == applied
            await other.step(1)
            again = await client.model(3, base_model=None, from_path=saved, with_optimizer=True)
            assert (await again.step(4))["adam_step"] == 2


@pytest.mark.parametrize("fault", [None, "the device was lost"])
async def test_a_stop_after_an_engine_failure_is_not_a_clean_one(model_dir, data_dir, fault):
    async with running(model_dir, data_dir) as server:
        server.engine.fault = fault
    async with running(model_dir, data_dir) as server:
        assert server.crash_guard.is_active == (fault is not None)
