"""`ChatEndpoint` with a local HTTP server that answers, fails temporarily, hangs or rejects, as
each test asks.
"""

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from planish.errors import UserError
from planish.integrations import openai_endpoint
from planish.integrations.openai_endpoint import ChatEndpoint, EndpointError

ASKED: Any = [{"role": "user", "content": "Well?"}]
HALF = (200, {"Content-Length": "1000"}, b"half")


@dataclass
class Script:
    """The server's responses to the requests, in order. The last one is repeated."""

    answers: list[Any]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    under_way: int = 0
    most_at_once: int = 0
    connections: set[Any] = field(default_factory=set)
    url: str = ""


def said(text: Any) -> tuple[int, dict[str, str], bytes]:
    return (
        200,
        {},
        json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode(),
    )


@pytest.fixture
def script(monkeypatch) -> Iterator[Script]:
    monkeypatch.setattr(openai_endpoint, "FIRST_DELAY", 0.01)
    script = Script([])
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                answer = script.answers[min(len(script.bodies), len(script.answers) - 1)]
                script.bodies.append(body)
                script.keys.append(self.headers.get("Authorization"))
                script.times.append(time.monotonic())
                script.connections.add(self.client_address)
                script.under_way += 1
                script.most_at_once = max(script.most_at_once, script.under_way)
            try:
                if isinstance(answer, threading.Barrier):
                    answer.wait()
                    time.sleep(0.02)
                    answer = said("together")
                elif isinstance(answer, float):
                    time.sleep(answer)
                    answer = said("late")
                if answer == "cut":
                    self.close_connection = True
                    return
                status, headers, content = answer
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except BrokenPipeError:
                pass
            finally:
                with lock:
                    script.under_way -= 1

        def log_message(self, format, *args): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        script.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield script
        server.shutdown()


def ask(endpoint: ChatEndpoint) -> str:
    answer: Any = asyncio.run(endpoint(ASKED))
    return answer["content"]


@pytest.mark.slow
def test_a_request_is_openais_and_the_key_comes_from_the_named_variable(script, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    script.answers = [said("fine")]
    endpoint = ChatEndpoint(
        script.url + "/", "judge", "MY_KEY", max_tokens=7, extra={"top_p": 0.5, "temperature": None}
    )
    assert ask(endpoint) == "fine"
    assert script.bodies == [{"model": "judge", "messages": ASKED, "max_tokens": 7, "top_p": 0.5}]
    assert script.keys == ["Bearer secret"]
    assert "secret" not in repr(endpoint)
    ask(ChatEndpoint(script.url, "judge"))
    assert script.keys[1] is None
    assert script.bodies[1]["temperature"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "stumble",
    [
        (429, {}, b"slowly"),
        (500, {}, b"oh"),
        (503, {}, b""),
        (200, {}, b"<html>a proxy's page</html>"),
        (200, {}, b'{"choices": []}'),
        said(["no text"]),
        HALF,
        "cut",
        1.0,
    ],
    ids=lambda stumble: str(stumble)[:30],
)
def test_what_may_go_better_is_asked_again(script, stumble):
    script.answers = [stumble, stumble, said("at last")]
    is_late = stumble in (HALF, 1.0)
    endpoint = ChatEndpoint(script.url, "judge", timeout_seconds=0.3 if is_late else 60)
    assert ask(endpoint) == "at last"
    # On a busy machine, "at last" may be late too.
    assert len(script.bodies) >= 3 if is_late else len(script.bodies) == 3


@pytest.mark.slow
def test_the_error_of_the_last_attempt_is_raised(script):
    script.answers = [(500, {}, b"out of memory")]
    with pytest.raises(
        EndpointError, match="no answer in 3 attempts; the last error: status 500: out of memory"
    ):
        ask(ChatEndpoint(script.url, "judge", max_retries=2))
    assert len(script.bodies) == 3
    with pytest.raises(EndpointError, match="in 1 attempts.*ConnectError"):
        ask(ChatEndpoint("http://127.0.0.1:9/v1", "judge", max_retries=0))
    script.answers = [5.0]
    with pytest.raises(EndpointError, match="timeout_seconds=0.1"):
        ask(ChatEndpoint(script.url, "judge", timeout_seconds=0.1, max_retries=0))


@pytest.mark.slow
def test_a_wish_to_wait_is_granted(script, monkeypatch):
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(
        openai_endpoint, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    )
    script.answers = [
        (429, {"Retry-After": "0.4"}, b""),
        (429, {"Retry-After": "tomorrow"}, b""),
        said("now"),
    ]
    assert ask(ChatEndpoint(script.url, "judge")) == "now"
    first, second, _ = script.times
    assert second - first >= 0.4
    assert delays[0] >= 0.4 > delays[1]


@pytest.mark.slow
@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_an_invalid_request_is_not_retried(script, status):
    script.answers = [(status, {}, b"no such model")]
    with pytest.raises(
        UserError, match=f"status {status}: no such model; check base_url, model and the key"
    ):
        ask(ChatEndpoint(script.url, "judge"))
    assert len(script.bodies) == 1


@pytest.mark.slow
def test_calls_share_connections_and_wait_for_their_turn(script):
    script.answers = [threading.Barrier(3, timeout=60)]
    endpoint = ChatEndpoint(script.url, "judge", max_concurrent=3)

    async def many():
        async with asyncio.TaskGroup() as tasks:
            for _ in range(12):
                tasks.create_task(endpoint(ASKED))

    asyncio.run(many())
    assert len(script.bodies) == 12
    assert script.most_at_once == 3
    assert len(script.connections) <= 3
    asyncio.run(many())  # another event loop


@pytest.mark.slow
def test_it_pickles_while_it_is_used(script):
    script.answers = [said("yes")]
    endpoint = ChatEndpoint(script.url, "judge")

    async def travelled():
        async with endpoint._connections():
            return pickle.loads(pickle.dumps(endpoint))

    copied = asyncio.run(travelled())
    assert copied == endpoint
    assert ask(copied) == "yes"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "api.openai.com/v1"}, "base_url='api.openai.com/v1': give a URL"),
        ({"base_url": "http://[::1"}, "give a URL"),
        ({"model": ""}, "model=''"),
        ({"api_key_env": "NOT_THERE"}, "api_key_env=NOT_THERE: there is no such variable"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"max_concurrent": 0}, "max_concurrent=0"),
    ],
)
def test_an_invalid_option_is_rejected(options, message):
    with pytest.raises(UserError, match=message):
        ChatEndpoint(**{"base_url": "http://127.0.0.1:1/v1", "model": "judge", **options})
