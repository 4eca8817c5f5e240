"""A client on an unreliable network gets the same results, retries for a limited time, and raises
errors that name a remedy.
"""

import asyncio
import http.server
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_process import free_port, wait_until
from server_thread import BROKEN, LOST, Fault, ServerThread, serving
from starlette.responses import Response

import planish
from planish import (
    AdamParams,
    Datum,
    EngineClosedError,
    ModelInput,
    SamplingParams,
    ServiceClient,
    UserError,
)
from planish.client import remote_session
from planish.client.remote import RemoteService
from planish.client.remote_connection import normalize_url
from planish.client.remote_errors import ServerFaultError, ServerUnreachableError
from planish.client.remote_retries import RetryState
from planish.client.remote_thread import LoopThread
from planish.client.remote_tokenizer import cache_tokenizer
from planish.service import CreateSampler, ReleaseSampler, Sample

WAIT = 60.0
PROMPT = ModelInput.from_ints([3, 8, 13, 18])


def datum() -> Datum:
    return Datum(PROMPT, {"target_tokens": [8, 13, 18, 23]})


def train(client: ServiceClient) -> list[Any]:
    """Use every kind of operation, all with seeds."""
    training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
    training_client.forward_backward([datum()], "cross_entropy")
    stepped = training_client.optim_step(AdamParams(learning_rate=1e-2))
    output = training_client.forward([datum()], "cross_entropy")
    sampling_client = training_client.save_weights_and_get_sampling_client()
    samples = [
        sampling_client.sample(PROMPT, 2, SamplingParams(max_tokens=5, seed=seed))
        for seed in range(6)
    ]
    path = training_client.save_state("one").result(WAIT).path
    resumed = client.create_training_client_from_state_with_optimizer(path)
    resumed.forward_backward([datum()], "cross_entropy")
    return [
        stepped.result(WAIT),
        output.result(WAIT).loss_fn_outputs[0]["logprobs"].tolist(),
        [
            [(one.tokens, one.logprobs) for one in sample.result(WAIT).sequences]
            for sample in samples
        ],
        sampling_client.compute_logprobs(PROMPT).result(WAIT),
        resumed.optim_step(AdamParams(learning_rate=1e-2)).result(WAIT),
        len(
            client.create_rest_client()
            .list_checkpoints(training_client.model_id)
            .result()
            .checkpoints
        ),
    ]


@contextmanager
def failing(server: ServerThread, fault: Callable[[str], Fault]) -> Iterator[None]:
    server.network.fault = fault
    try:
        yield
    finally:
        server.network.fault = lambda path: None


def later(status: int) -> Response:
    return Response(
        json.dumps({"detail": "later"}), status, {"Retry-After": "0"}, media_type="application/json"
    )


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Let the client retry soon."""

    async def soon(self: RetryState, at_least: float = 0.0) -> None:
        await remote_session.asyncio.sleep(0.001)

    monkeypatch.setattr(RetryState, "pause", soon)
    monkeypatch.setattr("planish.client.remote_samplers._RETRY_SECONDS", 0.001)


@pytest.fixture(scope="module")
def undisturbed(server) -> list[Any]:
    with ServiceClient(base_url=server.url) as client:
        return train(client)


FAULTS: dict[str, Callable[[], Fault]] = {
    "limits": lambda: later(429),
    "restarts": lambda: later(503),
    "timeouts": lambda: later(408),
    "bad gateways": lambda: later(502),
    "lost answers": lambda: LOST,
    "broken answers": lambda: BROKEN,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_network_failures_do_not_change_results(server, undisturbed, impatient, name):
    counts: dict[str, itertools.count] = {}

    def every_second_of_a_path(path: str) -> Fault:
        return FAULTS[name]() if next(counts.setdefault(path, itertools.count())) % 2 == 0 else None

    with ServiceClient(base_url=server.url) as client, failing(server, every_second_of_a_path):
        assert train(client) == undisturbed
    assert {
        "/api/v1/forward_backward",
        "/api/v1/optim_step",
        "/api/v1/planish/draw",
    } <= counts.keys()


@pytest.mark.slow
def test_a_request_told_to_retry_later_does_not_block_others(server, monkeypatch):
    monkeypatch.setattr("planish.client.remote_connection._MAX_CONCURRENT_REQUESTS", 1)
    with ServiceClient(base_url=server.url) as client:
        waiting, other = (client.create_lora_training_client("tiny", rank=4) for _ in range(2))
        with failing(server, lambda path: later(429) if path.endswith("/optim_step") else None):
            waiting.forward_backward([datum()], "cross_entropy").result(WAIT)
            stepped = waiting.optim_step(AdamParams())
            time.sleep(0.05)
            other.forward([datum()], "cross_entropy").result(WAIT)
            assert not stepped.done()
        stepped.result(WAIT)


@pytest.mark.slow
def test_results_are_equal_without_batched_sample_requests(server, undisturbed, monkeypatch):
    """Other servers of the protocol lack batched requests."""
    monkeypatch.setattr("planish.client.remote_samplers._BATCH_WINDOW_SECONDS", 0.5)
    missing = Response('{"detail": "Not Found"}', 404, media_type="application/json")
    with ServiceClient(base_url=server.url) as client:
        before = len(server.network.paths)
        with failing(server, lambda path: missing if "/planish/" in path else None):
            assert train(client) == undisturbed
    asked = server.network.paths[before:]
    assert asked.count("/api/v1/planish/draw") <= 2
    assert asked.count("/api/v1/asample") == 7


@pytest.mark.slow
def test_a_server_restart_only_delays_the_client(model_dir, tmp_path, undisturbed, impatient):
    models = {"tiny": model_dir}
    with serving(tmp_path / "data", models, port=free_port()) as first:
        client = ServiceClient(base_url=first.url)
        training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
        training_client.forward_backward([datum()], "cross_entropy").result(WAIT)
    # Nobody is there.
    stepped = training_client.optim_step(AdamParams(learning_rate=1e-2))
    time.sleep(0.05)
    assert not stepped.done()
    with serving(tmp_path / "data", models, port=int(first.url.rpartition(":")[2])), client:
        assert stepped.result(WAIT) == undisturbed[0]
        output = training_client.forward([datum()], "cross_entropy").result(WAIT)
        assert output.loss_fn_outputs[0]["logprobs"].tolist() == undisturbed[1]


@pytest.mark.slow
def test_a_server_that_does_not_return_raises(server, impatient):
    service = RemoteService(server.url, patience_seconds=0.2)
    client = ServiceClient(service=service)
    sampling_client = client.create_sampling_client(base_model="tiny")
    with failing(server, lambda path: LOST):
        with pytest.raises(
            ServerUnreachableError, match=r"no server answers at http://127.*planish serve"
        ):
            client.create_lora_training_client("tiny", rank=4)
        with pytest.raises(ServerUnreachableError):
            sampling_client.compute_logprobs(PROMPT).result(WAIT)
    assert len(sampling_client.compute_logprobs(PROMPT).result(WAIT)) == PROMPT.length
    service.close(finish=False)


@pytest.mark.slow
def test_an_internal_server_error_is_reported(server, impatient):
    with ServiceClient(base_url=server.url) as client:
        sampling_client = client.create_sampling_client(base_model="tiny")
        fault = Response('{"detail": "a fault of the server (KeyError)"}', 500)
        with (
            failing(server, lambda path: fault),
            pytest.raises(ServerFaultError, match="500.*KeyError"),
        ):
            sampling_client.compute_logprobs(PROMPT).result(WAIT)
        assert len(sampling_client.compute_logprobs(PROMPT).result(WAIT)) == PROMPT.length


# First contact


def test_a_missing_server_is_reported(monkeypatch):
    monkeypatch.setattr(remote_session, "_FIRST_CONTACT_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        ServerUnreachableError, match=f"no server answers at http://127.0.0.1:{port}.*planish serve"
    ):
        ServiceClient(base_url=f"http://127.0.0.1:{port}")


@pytest.mark.slow
def test_a_silent_server_is_reported(monkeypatch):
    monkeypatch.setattr(remote_session, "_FIRST_CONTACT_TIMEOUT_SECONDS", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerUnreachableError, match="ReadTimeout.*planish serve"):
            ServiceClient(base_url=url)


def test_arguments_changed_after_a_call_are_not_sent(server):
    data, config = [datum()], {"clip_low_threshold": 0.8}
    inputs = {**datum().loss_fn_inputs, "logprobs": [-1.0] * 4, "advantages": [1.0] * 4}
    data[0] = Datum(PROMPT, inputs)
    with ServiceClient(base_url=server.url) as client:
        training_client = client.create_lora_training_client("tiny", rank=4, seed=1)
        outputs = [training_client.forward_backward(data, "ppo", config) for _ in range(2)]
        data.append(data[0])
        config["clip_low_threshold"] = -1.0
        assert [len(output.result(WAIT).loss_fn_outputs) for output in outputs] == [1, 1]


@pytest.mark.slow
def test_calls_during_close_do_not_affect_others(server):
    """A call from another thread during `close` is done or rejected. Earlier calls are
    completed.
    """
    client = ServiceClient(base_url=server.url)
    sampling_client = client.create_sampling_client(base_model="tiny")
    before = [
        sampling_client.sample(PROMPT, 1, SamplingParams(max_tokens=200, stop=[])) for _ in range(4)
    ]
    refused = threading.Event()
    late: list[Any] = []

    def go_on() -> None:
        while not refused.is_set():
            try:
                late.append(sampling_client.sample(PROMPT, 1, SamplingParams(max_tokens=1)))
            except EngineClosedError:
                refused.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    client.close()
    thread.join(WAIT)
    assert [len(one.result(0).sequences) for one in [*before, *late]] == [1] * (4 + len(late))


def test_a_thread_that_cannot_start_raises():
    class Broken:
        async def __aenter__(self):
            raise OSError("no more open files")

        async def __aexit__(self, *_):
            raise AssertionError

    with pytest.raises(OSError, match="no more open files"):
        LoopThread("broken", Broken())


class Nothing:
    async def __aenter__(self):
        pass

    async def __aexit__(self, *_):
        pass


def test_stopping_the_loop_thread_ends_a_call_that_waits():
    loop_thread = LoopThread("waiting", Nothing())
    begun, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    errors: list[BaseException] = []

    def call() -> None:
        try:
            loop_thread.call(wait)
        except EngineClosedError as error:
            errors.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert begun.wait(WAIT)
    loop_thread.stop()
    caller.join(WAIT)
    assert not caller.is_alive()
    assert len(errors) == 1
    assert ended.is_set()
    with pytest.raises(EngineClosedError):
        loop_thread.call(wait)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "give a URL such as"),
        ("ftp://host", "give a URL such as"),
        ("http://", "give a URL such as"),
        ("http://host:port", "give a port from 0 to 65535"),
        ("http://me:secret@host", "a key goes into api_key"),
        ("http://host/?a=b", "scheme, host, port and path only"),
        ("http://a\nb", "base_url"),
    ],
)
def test_an_invalid_url_is_rejected(url, message):
    with pytest.raises(UserError, match=message):
        ServiceClient(base_url=url)


def test_a_url_can_have_a_path():
    assert normalize_url("https://host/prefix/api/v1/") == "https://host/prefix"


@contextmanager
def stranger(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server that always sends the same response."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, body = answers.get(self.path, (404, b"<html>nothing here</html>"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listener.server_address[1]}"
        listener.shutdown()
        thread.join()


CONFIG, SESSION = "/api/v1/client/config", "/api/v1/create_session"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, "is not a planish server.*404.*nothing here"),
        ({CONFIG: (200, b"<html>")}, "is not a planish server"),
        ({CONFIG: (200, b"{}"), SESSION: (200, b"{}")}, "has no session_id"),
        ({CONFIG: (200, b'{"planish_wire": 7}')}, "speaks version 7.*same planish on both sides"),
        ({CONFIG: (401, b'{"detail": "who are you"}')}, "who are you.*api_key"),
    ],
)
def test_a_url_of_another_program_is_reported(answers, message):
    with stranger(answers) as url, pytest.raises(UserError, match=message):
        ServiceClient(base_url=url)


@pytest.mark.slow
def test_a_wrong_key_is_reported(model_dir, tmp_path, monkeypatch):
    monkeypatch.delenv("PLANISH_API_KEY", raising=False)
    monkeypatch.setenv("TINKER_API_KEY", "tml-second")
    with serving(
        tmp_path / "data", {"tiny": model_dir}, {"tml-first": "a", "tml-second": "b"}
    ) as server:
        for key in ("tml-third", "x" * 99):
            with pytest.raises(UserError, match="key.*PLANISH_API_KEY"):
                ServiceClient(base_url=server.url, api_key=key)
        with (
            ServiceClient(base_url=server.url, api_key="tml-first") as first,
            ServiceClient(base_url=server.url) as second,
        ):
            path = (
                first.create_lora_training_client("tiny", rank=2)
                .save_state("mine")
                .result(WAIT)
                .path
            )
            with pytest.raises(planish.CheckpointError, match="no checkpoint.*publish"):
                second.create_training_client_from_state(path)
            assert second.create_rest_client().list_user_checkpoints().result().checkpoints == []


def test_a_missing_key_is_reported_once(model_dir, tmp_path, monkeypatch):
    for name in ("PLANISH_API_KEY", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with (
        serving(tmp_path / "data", {"tiny": model_dir}, {"tml-first": "a"}) as server,
        pytest.raises(UserError) as refused,
    ):
        ServiceClient(base_url=server.url)
    assert str(refused.value) == (
        "this server needs a key; give api_key, or set PLANISH_API_KEY (or TINKER_API_KEY) to a "
        "key of this server"
    )


@pytest.mark.parametrize("key", ["two words", "ключ", "a\nb"])
def test_an_invalid_key_is_rejected(key):
    with pytest.raises(UserError, match="api_key is not a valid key"):
        ServiceClient(base_url="http://127.0.0.1:1", api_key=key)


def test_the_environment_names_a_server(server, monkeypatch):
    monkeypatch.setenv("PLANISH_BASE_URL", server.url)
    with ServiceClient() as client:
        assert [
            model.model_name for model in client.get_server_capabilities().supported_models
        ] == ["tiny"]
    with pytest.raises(UserError, match=r"PLANISH_BASE_URL=.* but models configures an engine"):
        ServiceClient(models={"tiny": "/nowhere"})


# The session


def test_a_session_is_kept_alive_and_ended(server, monkeypatch):
    monkeypatch.setattr(remote_session, "_HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(remote_session, "_FINISH_TIMEOUT_SECONDS", WAIT)
    before = len(server.network.paths)
    failures = itertools.count()
    with ServiceClient(base_url=server.url) as client:
        # A few that fail change nothing.
        with failing(server, lambda path: LOST if next(failures) < 3 else None):
            wait_until(
                lambda: server.network.paths[before:].count("/api/v1/session_heartbeat") >= 6
            )
        assert client.create_sampling_client(base_model="tiny").get_base_model() == "tiny"
        service: Any = client._session.service
        session_id = service._session.session_id
    asked = server.network.paths[before:]
    assert asked.count("/api/v1/session_heartbeat") >= 6
    assert asked.count(f"/api/v1/sessions/{session_id}/finish") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_requests_of_its_parent(server):
    with ServiceClient(base_url=server.url) as client:
        training_client = client.create_lora_training_client("tiny", rank=4)
        with failing(server, lambda path: later(429) if path.endswith("/forward") else None):
            answer = training_client.forward([datum()], "cross_entropy")
            child = os.fork()
            if not child:
                client.close()
                os._exit(17)
            give_up = time.monotonic() + WAIT
            while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < give_up:
                time.sleep(0.01)
            if ended[0] == 0:
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
        assert answer.result(WAIT).metrics
    assert os.waitstatus_to_exitcode(ended[1]) == 17


def test_a_session_ended_by_the_server_is_reported(server):
    with ServiceClient(base_url=server.url) as client:
        training_client = client.create_lora_training_client("tiny", rank=2)
        service: Any = client._session.service
        service._call(service._session.finish, "interrupted")
        with pytest.raises((EngineClosedError, UserError), match="ended|finished|closed"):
            training_client.forward([datum()], "cross_entropy").result(WAIT)


def test_a_sampler_released_during_creation_is_freed(remote_client, server):
    before, service = len(server.network.paths), remote_client._session.service
    made = service.submit(CreateSampler("s", "tiny"))
    service.submit(ReleaseSampler("s")).result(WAIT)
    made.result(WAIT)
    wait_until(lambda: "/api/v1/planish/release" in server.network.paths[before:])
    asked = [path.removeprefix("/api/v1/") for path in server.network.paths[before:]]
    assert [path for path in asked if "sampl" in path or "release" in path] == [
        "create_sampling_session",
        f"samplers/{made.result(0)}",
        "planish/release",
    ]


def test_a_cancelled_sample_is_cancelled_on_the_server(server):
    with ServiceClient(base_url=server.url) as client:
        sampling_client = client.create_sampling_client(base_model="tiny")
        before = len(server.network.paths)
        pending = sampling_client.sample(PROMPT, 64, SamplingParams(max_tokens=1500, stop=[]))
        wait_until(lambda: "/api/v1/planish/draw" in server.network.paths[before:])
        time.sleep(0.05)
        assert pending.cancel()
        wait_until(lambda: "/api/v1/cancel_future" in server.network.paths[before:])
        assert (
            len(
                sampling_client.sample(PROMPT, 1, SamplingParams(max_tokens=2))
                .result(WAIT)
                .sequences
            )
            == 1
        )


def test_on_token_is_rejected_on_a_server(server):
    with ServiceClient(base_url=server.url) as client:
        sampler = client.create_sampling_client(base_model="tiny")
        with pytest.raises(planish.UnsupportedError, match="on_token.*stream"):
            client._session.service.submit(
                Sample(sampler.sampler_id, PROMPT, 1, SamplingParams(max_tokens=1), on_token=print)
            )


# Tokenizers


def test_tokenizers_are_cached_by_content(tmp_path):
    first = cache_tokenizer({"tokenizer.json": "{}", "config.json": "{}"}, tmp_path)
    assert {path.name: path.read_text() for path in first.iterdir()} == {
        "tokenizer.json": "{}",
        "config.json": "{}",
    }
    assert cache_tokenizer({"config.json": "{}", "tokenizer.json": "{}"}, tmp_path) == first
    assert cache_tokenizer({"tokenizer.json": "{} "}, tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", ".hidden", "", "a/b", "x" * 101])
def test_an_invalid_tokenizer_file_is_rejected(tmp_path, name):
    with pytest.raises(UserError, match="has an invalid file"):
        cache_tokenizer({name: "{}"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_cache_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(planish.StorageError, match="PLANISH_HOME"):
        cache_tokenizer({"tokenizer.json": "{}"}, Path(tmp_path / "file"))
