"""Streams whose clients never read, on real sockets of a server in a process of its own: they end,
and hold little memory. tests/server/test_streams.py has the rules, with a clock of its own.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from server_process import BASE_MODEL, ServerProcess, running_server, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STREAMS, NUM_SAMPLES = 40, 5
MAX_GROWTH_BYTES = 300 << 20
"""By how much the server's memory may grow. Without limits it grew by more than a GiB."""
KEY, METRICS_KEY = "streaming-key", "metrics-key"
WAIT = 300.0
_RECEIVE_BUFFER = 16 << 10
"""The kernel's buffer of a client in bytes. By default it holds megabytes."""
_SMALL_SEND_BUFFERS = (
    "import socket as sockets\n"
    "class Listener(sockets.socket):\n"
    "    def listen(self, *backlog):\n"
    "        self.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, 1 << 15)\n"
    "        super().listen(*backlog)\n"
    "sockets.socket = Listener\n"
)
"""Small buffers of the server in the kernel, which are full at once."""
_BODY = json.dumps(
    {
        "model": BASE_MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "n": NUM_SAMPLES,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
).encode()


@contextmanager
def server_with(directory: Path, model: Path, prelude: str) -> Iterator[ServerProcess]:
    keys = directory / "keys"
    keys.write_text(f"streaming {KEY}\nmetrics {METRICS_KEY}\n")
    options = ("--api-key-file", str(keys), "--kv-cache-gib", "0.2", "--prefix-cache-gib", "0.1")
    with running_server(directory / "data", model, *options, prelude=prelude) as server:
        with httpx.Client(base_url=server.url, headers={"x-api-key": KEY}, timeout=WAIT) as http:
            body = {**json.loads(_BODY), "stream": False, "max_tokens": 4}
            http.post("/v1/chat/completions", json=body).raise_for_status()
            # The server loads its default model too, which takes memory.
            wait_until(lambda: http.get("/readyz").status_code == 200)
            sockets = num_sockets(server)
        wait_until(lambda: num_sockets(server) < sockets)
        yield server


def unread_stream(server: ServerProcess) -> socket.socket:
    """Send a request for a stream, and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    client.connect((host, int(port)))
    client.settimeout(WAIT)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Connection: close\r\nContent-Length: {len(_BODY)}\r\n\r\n"
    )
    client.sendall(head.encode() + _BODY)
    return client


def wait_until_begun(streams: Sequence[socket.socket]) -> None:
    """Wait until each stream has an event, which stays unread."""
    wait_until(lambda: all(b"data: " in one.recv(4096, socket.MSG_PEEK) for one in streams))


def read_rest(client: socket.socket) -> bytes:
    pieces = []
    try:
        while piece := client.recv(1 << 16):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def num_sequences(server: ServerProcess) -> int:
    """Return the number of sequences that the server samples, or that wait."""
    headers = {"authorization": f"Bearer {METRICS_KEY}"}
    page = httpx.get(f"{server.url}/metrics", headers=headers, timeout=WAIT).text
    names = ("planish_sequences_running ", "planish_samples_waiting ")
    found = [line for line in page.splitlines() if line.startswith(names)]
    assert len(found) == 2, page
    return sum(int(float(line.split()[1])) for line in found)


def num_sockets(server: ServerProcess) -> int:
    """Return the number of sockets that the server has open."""
    found = 0
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found += str(link.readlink()).startswith("socket:")
    return found


def memory(server: ServerProcess, name: str) -> int:
    """Return a size in bytes that /proc has of the server: VmRSS, or VmHWM for its maximum."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) << 10


def check_memory(server: ServerProcess, before: int) -> None:
    assert memory(server, "VmHWM") - before < MAX_GROWTH_BYTES


def test_streams_that_nobody_reads_stop_their_samples(model_dir: Path, tmp_path: Path):
    """Their connections stay open here. A client that reads at last finds the error event."""
    prelude = _SMALL_SEND_BUFFERS + (
        "from planish.server.http.connections import ConnectionLimits as limits; "
        "limits.from_max_files = lambda files, has_keys: limits(write_seconds=1e6); "
        "from planish.server.openai import streaming; streaming.STALL_SECONDS = 1.0; "
    )
    with server_with(tmp_path, model_dir, prelude) as server, ExitStack() as clients:
        before = memory(server, "VmRSS")
        streams = [clients.enter_context(unread_stream(server)) for _ in range(NUM_STREAMS)]
        wait_until_begun(streams)
        wait_until(lambda: num_sequences(server) == 0)
        check_memory(server, before)
        for stream in streams:
            events = read_rest(stream)
            assert events.startswith(b"HTTP/1.1 200 ")
            assert events.count(b'"code":"slow_reader"') == 1
            assert events.index(b'"code":"slow_reader"') > len(events) - 1000


def test_connections_whose_streams_nobody_reads_are_closed(model_dir: Path, tmp_path: Path):
    prelude = _SMALL_SEND_BUFFERS + (
        "from planish.server.http.connections import ConnectionLimits as limits; "
        "limits.from_max_files = lambda files, has_keys: limits(write_seconds=2.0); "
    )
    with server_with(tmp_path, model_dir, prelude) as server, ExitStack() as clients:
        before, sockets_before = memory(server, "VmRSS"), num_sockets(server)
        streams = [clients.enter_context(unread_stream(server)) for _ in range(NUM_STREAMS)]
        wait_until_begun(streams)
        wait_until(lambda: num_sockets(server) <= sockets_before)
        wait_until(lambda: num_sequences(server) == 0)
        check_memory(server, before)
        for stream in streams:
            assert b"[DONE]" not in read_rest(stream)
