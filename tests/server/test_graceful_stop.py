"""SIGTERM while requests of OpenAI clients run: each gets an answer that its client understands,
and the server listens until its work is done.
"""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from server_process import BASE_MODEL, SLOW_ENGINE, running_server, wait_until

pytestmark = pytest.mark.slow

SHORT_STOP = "from planish.server.http import graceful_stop; graceful_stop.STOP_SECONDS = 20\n"
# With one sequence per batch, 100 samples of full length take minutes on a machine of any speed.
LONG_REQUEST = {
    "model": BASE_MODEL,
    "prompt": [1, 2, 3],
    "max_tokens": 1500,
    "n": 100,
    "ignore_eos": True,
    "stop_token_ids": [],
}
WAIT = 120.0


def check_stopping_answer(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert float(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert "stopping" in error["message"]


def test_a_stop_answers_running_requests(tmp_path: Path, model_dir: Path):
    with (
        running_server(
            tmp_path / "data", model_dir, "--max-batch", "1", prelude=SHORT_STOP + SLOW_ENGINE
        ) as server,
        httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as http,
        ThreadPoolExecutor(4) as threads,
    ):
        has_streamed = Event()

        def stream() -> list[Any]:
            events = []
            body = {**LONG_REQUEST, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))
                        has_streamed.set()
            return events

        def num_waiting() -> float:
            lines = http.get("/metrics").text.splitlines()
            [line] = [line for line in lines if line.startswith("planish_samples_waiting ")]
            return float(line.rpartition(" ")[2])

        streamed = threads.submit(stream)
        assert has_streamed.wait(WAIT)
        running = threads.submit(http.post, "/v1/completions", json=LONG_REQUEST)
        larger = {**LONG_REQUEST, "n": 128}
        waiting = [threads.submit(http.post, "/v1/completions", json=larger) for _ in range(2)]
        wait_until(lambda: num_waiting() >= 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/healthz").status_code == 503)
        assert http.get("/healthz").json() == {"status": "stopping"}
        assert http.get("/readyz").status_code == 503
        for path, body in (
            ("/v1/completions", LONG_REQUEST),
            ("/v1/chat/completions", {"model": BASE_MODEL, "messages": []}),
            ("/tokenize", {"model": BASE_MODEL, "prompt": "x"}),
        ):
            check_stopping_answer(http.post(path, json=body))
        session = http.post("/api/v1/create_session", json={})
        assert session.status_code == 503
        assert "stopping" in session.json()["detail"]
        for one in [running, *waiting]:
            check_stopping_answer(one.result())
        *_, error, done = streamed.result()
        assert done == "[DONE]"
        assert "stopping" in json.loads(error)["error"]["message"]
        assert server.wait() == 0
    server.wait_for_line("stopped")
    output = "\n".join(server.output)
    assert "Traceback" not in output
    assert "Exception in ASGI" not in output


def test_a_stop_cuts_off_what_never_ends(tmp_path: Path, model_dir: Path):
    """A client that stops sending its body holds the stop for a few seconds only."""
    short = SHORT_STOP + "graceful_stop.RESPONSE_SECONDS = 1\n"
    with (
        running_server(tmp_path / "data", model_dir, prelude=short) as server,
        httpx.Client(base_url=server.url, timeout=WAIT, trust_env=False) as http,
        ThreadPoolExecutor(1) as threads,
    ):
        is_sending, is_over = Event(), Event()

        def body() -> Any:
            yield b'{"model": '
            is_sending.set()
            is_over.wait(WAIT)

        answer = threads.submit(
            http.post, "/v1/completions", content=body(), headers={"content-length": "1000"}
        )
        assert is_sending.wait(WAIT)
        wait_until(lambda: "planish_http_requests_open 2.0" in http.get("/metrics").text)
        assert server.stop(signal.SIGTERM) == 0
        is_over.set()
        answer.exception(WAIT)  # the connection was closed before the client read the answer
    output = "\n".join(server.output)
    assert "Traceback" not in output
