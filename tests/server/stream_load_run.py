"""Measure what the streams of one tenant leave to another: python tests/server/stream_load_run.py
[--seconds 4] [--idle-seconds 20] [--streams 1 12 100] [--samples 1 20] [--record FILE]

One tenant, in a process of its own, keeps streams of /v1 open, which are read as fast as possible,
slowly, or not at all. A second tenant, in another process, requests /healthz and samples 8 tokens;
its latency is measured before and during the streams. The aim is at most 5 times the 99th
percentile without streams. The server's memory, and its time until it is idle after the streams
are closed, are reported too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from server_process import BASE_MODEL, ServerProcess, running_server

STREAMING_KEY, WITNESS_KEY = "streaming-key", "witness-key"
KINDS = ("/healthz", "sample")
READERS = ("whole", "fast", "slow", "never")
"""`whole`: the same requests without streaming, for comparison."""
_OPTIONS = ("--kv-cache-gib", "0.3", "--prefix-cache-gib", "0.1")
_SLOW_BYTES, _SLOW_SECONDS = 4096, 0.1
"""A slow reader reads this many bytes, and then waits."""
_RECEIVE_BUFFER = 16 << 10
"""The kernel's buffer of a slow reader in bytes. By default it holds megabytes."""


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def request_body(num_samples: int, has_logprobs: bool, is_streamed: bool) -> bytes:
    logprobs = {"logprobs": True, "top_logprobs": 20} if has_logprobs else {}
    messages = [{"role": "user", "content": "Hello"}]
    return json.dumps(
        {
            "model": BASE_MODEL,
            "messages": messages,
            "n": num_samples,
            "stream": is_streamed,
            **logprobs,
        }
    ).encode()


async def read_streams(url: str, count: int, reader: str, body: bytes) -> None:
    """Keep `count` streams open until the input ends, and print how much was read."""
    num_bytes, statuses, began = 0, Counter[str](), asyncio.Semaphore(0)
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer "
        f"{STREAMING_KEY}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def read_stream() -> None:
        nonlocal num_bytes
        while True:
            with suppress(OSError):
                # A limit of the buffer in this process makes the kernel's buffer fill up.
                connection, writer = await asyncio.open_connection(host, int(port), limit=4096)
                if reader in ("slow", "never"):
                    socket = writer.get_extra_info("socket")
                    socket.setsockopt(1, 8, _RECEIVE_BUFFER)  # SOL_SOCKET, SO_RCVBUF
                writer.write(head + body)
                if reader in ("whole", "never"):
                    began.release()
                if reader == "never":
                    await asyncio.sleep(1e6)
                statuses[(await connection.readline()).decode()[:12]] += 1
                if reader in ("fast", "slow"):
                    began.release()
                while data := await connection.read(_SLOW_BYTES if reader == "slow" else 1 << 16):
                    num_bytes += len(data)
                    if reader == "slow":
                        await asyncio.sleep(_SLOW_SECONDS)
            await asyncio.sleep(0.05)

    streams = [asyncio.create_task(read_stream()) for _ in range(count)]
    for _ in range(count):
        await began.acquire()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for stream in streams:
        stream.cancel()
    print(json.dumps({"mib": num_bytes / (1 << 20), "statuses": statuses}), flush=True)


def watch(url: str) -> None:
    """Send requests of the second tenant until the input ends, and print their latencies."""
    headers = {"Authorization": f"Bearer {WITNESS_KEY}"}
    body = {"model": BASE_MODEL, "prompt": "Hello", "max_tokens": 8, "seed": 1}
    latencies: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def measure(http: httpx.Client) -> None:
        for kind in KINDS:
            began = time.perf_counter()
            if kind == "/healthz":
                answer = http.get("/healthz")
            else:
                answer = http.post("/v1/completions", json=body)
            answer.raise_for_status()
            latencies[kind].append(time.perf_counter() - began)

    with httpx.Client(base_url=url, headers=headers, timeout=300) as http:
        measure(http)
        for line in sys.stdin:
            for values in latencies.values():
                values.clear()
            end = time.monotonic() + float(line)
            while time.monotonic() < end:
                measure(http)
            print(json.dumps(latencies), flush=True)


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run this program with other arguments for the length of a block."""
    child = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.nice(10),
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def latencies_for(witness: subprocess.Popen[str], seconds: float) -> dict[str, list[float]]:
    assert witness.stdin is not None
    assert witness.stdout is not None
    witness.stdin.write(f"{seconds}\n")
    witness.stdin.flush()
    return json.loads(witness.stdout.readline())


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def run(server: ServerProcess, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with process("--watch", server.url) as witness:
        latencies_for(witness, options.seconds)
        idle = latencies_for(witness, options.idle_seconds)
        for count, samples, has_logprobs, reader in itertools.product(
            options.streams, options.samples, (False, True), options.readers
        ):
            arguments = (server.url, str(count), reader, str(samples), str(int(has_logprobs)))
            with process("--stream", *arguments) as client:
                assert client.stdout is not None
                assert client.stdout.readline() == "ready\n"
                busy = latencies_for(witness, options.seconds)
                memory = resident(server.process.pid)
                read = json.loads(client.communicate()[0])
            began = time.monotonic()
            latencies_for(witness, 0.01)
            row = {
                "streams": count,
                "n": samples,
                "logprobs": has_logprobs,
                "reader": reader,
                "read": read,
                "memory_mib": memory >> 20,
                "seconds_until_next_sample": time.monotonic() - began,
                **{
                    kind: {
                        "idle_p99_ms": 1e3 * percentile(idle[kind], 99),
                        "p99_ms": 1e3 * percentile(busy[kind], 99),
                        "ratio": percentile(busy[kind], 99) / percentile(idle[kind], 99),
                        "requests": [len(idle[kind]), len(busy[kind])],
                    }
                    for kind in KINDS
                },
            }
            rows.append(row)
            ratios = ", ".join(
                f"{kind} {row[kind]['idle_p99_ms']:.1f} -> {row[kind]['p99_ms']:.1f} ms "
                f"({row[kind]['ratio']:.1f} times)"
                for kind in KINDS
            )
            print(
                f"{count} streams, n={samples}, {'with' if has_logprobs else 'no'} logprobs, "
                f"read {reader} ({read['mib']:.1f} MiB {read['statuses']}): {ratios}, "
                f"{memory >> 20} MiB, next sample after "
                f"{row['seconds_until_next_sample']:.2f} s",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 12, 100])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--readers", nargs="+", choices=READERS, default=["whole", "fast", "slow"])
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    # The client processes of this program do not need torch, whose import takes seconds.
    from planish.testing import tiny_model

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        keys = directory / "keys"
        keys.write_text(f"streaming {STREAMING_KEY}\nwitness {WITNESS_KEY}\n")
        model = tiny_model(directory / "model")
        arguments = ("--api-key-file", str(keys), *_OPTIONS)
        with running_server(directory / "data", model, *arguments) as server:
            rows = run(server, options)
    if options.record:
        options.record.write_text(json.dumps(rows, indent=1))
    print(f"worst ratio {max(row[kind]['ratio'] for row in rows for kind in KINDS):.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2])
    elif sys.argv[1:2] == ["--stream"]:
        address, streams, how, samples_text, logprobs_text = sys.argv[2:]
        stream_request = request_body(int(samples_text), logprobs_text == "1", how != "whole")
        asyncio.run(read_streams(address, int(streams), how, stream_request))
    else:
        main()
