"""If memory runs out after the engine has applied a request, the request is still answered as
applied: a failure would contradict the model, and a client that sends it again would apply it
twice.
"""

import asyncio
import errno
import sqlite3
from types import SimpleNamespace

import httpx
import orjson
import pytest
from google.protobuf.message import DecodeError
from server_client import Client, adam, gradient, make_core, running, state
from starlette.testclient import TestClient

from planish.errors import StorageError, UserError
from planish.server.durable.retries import retry_until_memory_suffices
from planish.server.durable.store import Store, Transaction
from planish.server.http.app import create_app
from planish.server.models import submission
from planish.server.request import failed_from_error
from planish.server.results import Unavailable
from planish.server.server import Server
from planish.server.settings import ServerSettings
from planish.wire.messages import parse_message


def adam_step(result: bytes) -> int:
    return orjson.loads(result)["metrics"]["adam_step"]


@pytest.mark.parametrize("kind", ["OptimStep", "ForwardBackward", "SaveWeights"])
async def test_an_applied_request_whose_answer_needs_more_memory_is_answered_as_applied(
    model_dir, data_dir, monkeypatch, caplog, kind
):
    """Also after a restart, which replays the journal."""
    encode, refused = submission.encode_result, 0

    async def refuse(operation, result):
        nonlocal refused
        if type(operation).__name__ == kind and refused < 2:
            refused += 1
            raise MemoryError
        return await encode(operation, result)

    async def train(data, fails: bool) -> dict[str, bytes]:
        with monkeypatch.context() as patched:
            patched.setattr("planish.server.durable.retries._PAUSES", (0.01,))
            if fails:
                patched.setattr(submission, "encode_result", refuse)
            settings = ServerSettings(adapter_idle_timeout=1e6)
            async with running(model_dir, data, settings) as server:
                client = await Client.start(server)
                model = await client.model()
                await model.run(gradient(model.model_id))
                assert adam_step(await model.run(adam(model.model_id))) == 1
                await model.save("first")
                await model.run(gradient(model.model_id, 2))  # keeps a snapshot from being taken
        async with running(model_dir, data) as server:
            client.server = server
            assert adam_step(await model.run(adam(model.model_id))) == 2
            return state(data, await model.save("last"))

    found = await train(data_dir, True)
    assert refused == 2
    assert "lacks memory for its answer" in caplog.text
    other = data_dir.with_name("other")
    other.mkdir()
    assert found == await train(other, False)


def test_a_call_that_runs_out_of_memory_before_its_endpoint_can_be_sent_again(
    model_dir, data_dir, monkeypatch
):
    def match(*args: object) -> None:
        raise MemoryError

    app = create_app(make_core(model_dir, data_dir))
    with TestClient(app, raise_server_exceptions=False) as client, monkeypatch.context() as patched:
        patched.setattr("starlette.routing.Route.matches", match)
        answer = client.get("/api/v1/get_server_capabilities")
    assert answer.status_code == 503
    assert float(answer.headers["retry-after"]) > 0
    assert "out of memory" in answer.json()["detail"]


async def test_writes_that_lack_memory_are_not_reported_as_a_full_disk(model_dir, data_dir):
    lacks_memory = True

    def insert(transaction: Transaction) -> None:
        if lacks_memory:
            raise sqlite_error(sqlite3.SQLITE_IOERR_NOMEM)
        transaction.execute("INSERT INTO meta VALUES ('key', x'')")

    async with running(model_dir, data_dir) as server:
        write = server.store.write_with_retries(insert)
        while not server.store.is_failing:
            await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="out of memory; send the request again"):
            server.intake.check_disk(0)
        assert await readiness(server) == "out of memory"
        lacks_memory = False
        await write
        server.intake.check_disk(0)
        assert await readiness(server) == "ready"


async def readiness(server: Server) -> str:
    transport = httpx.ASGITransport(create_app(server))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return (await client.get("/readyz")).json()["status"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "Cannot allocate memory"), sqlite3.SQLITE_IOERR_NOMEM]
)
async def test_reads_that_lack_memory_are_not_reported_as_a_full_disk(tmp_path, error):
    def fail(connection: sqlite3.Connection) -> None:
        raise error if isinstance(error, OSError) else sqlite_error(error)

    store = Store(tmp_path)
    with pytest.raises(StorageError, match="out of memory; send the request again"):
        await store.read(fail)
    store.close()


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    return error


def test_a_message_without_memory_is_not_reported_as_wrong():
    class Message:
        DESCRIPTOR = SimpleNamespace(name="ForwardBackwardRequest")
        error = "Error parsing message with type 'ForwardBackwardRequest': Arena alloc failed"

        def ParseFromString(self, body: bytes) -> None:
            raise DecodeError(self.error)

    with pytest.raises(MemoryError):
        parse_message(Message(), b"")
    Message.error = "Error parsing message"
    with pytest.raises(UserError, match="is not a ForwardBackwardRequest"):
        parse_message(Message(), b"")


async def test_other_errors_are_not_repeated():
    async def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await retry_until_memory_suffices(fail, "request")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("no scratch memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_request_that_runs_out_of_memory_fails_with_a_remedy(error):
    failed = failed_from_error(error)
    assert failed.category == "server"
    assert failed.message.startswith("the server is out of memory; send the request again later")
    assert str(error) in failed.message
