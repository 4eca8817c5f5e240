"""Random requests: valid ones, requests with one or more faults, and random bytes.

The answer must be a result or an error with a message, never a 5xx, never nothing, and never the
content of a file outside of the data directory.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import orjson
import zstandard
from fuzz_connection import Answer, Connection, NoResponse, RawRequest
from fuzz_requests import API, ODD_IDS, SECRET_FILE, RequestGenerator

SECRET = "what no answer may tell"
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 10**9, 2**31, 2**63 - 1, 2**63, -(2**63), 0.5, -1.5, 1e308, 1e-320),
    *("", "a", "x" * 300, "../..", "\ud7ff", [], {}, [[]], [1, "a"], {"a": {}}, [None], {"type": "dimuon"}, "tinker://a/weights/b"),
    *([0] * 5000, {"a": [{"b": [{}]}]}, [[[[[[[[]]]]]]]], 10**18, -0.0, "1", "NaN"),
)  # fmt: skip
JSON, PROTOBUF = "application/json", "application/x-protobuf"
# As they stand in the request line: what a client library would have put right.
_RAW_TARGETS = tuple(
    target.encode("latin-1")
    for target in (
        *(f"{API}/{prefix}{SECRET_FILE}" for prefix in ("../", "../../", "..%2f", "%2e%2e/", "..\\", "%2e%2e%2f%2e%2e%2f", "./..//")),
        *(f"{API}/downloads/x/{prefix}{SECRET_FILE}" for prefix in ("../", "..%2f..%2f", "/", "%00", "..%5c")),
        *(f"{API}/training_runs/{prefix}/checkpoints/weights/{prefix}" for prefix in ("..", "%2e%2e", "%2f", "%00", "%ff")),
        *("/", "//", "*", "http://127.0.0.1/healthz", "/%", "/%zz", "/api//v1/healthz", f"{API}/healthz/", "/v1/models/../..", "/?" + "a=b&" * 500),
        *(f"{API}/{'a' * 30_000}", f"{API}/training_runs?limit=1&limit=2&offset=&x", f"{API}/sessions/%F0%9F%98%80"),
    )
)  # fmt: skip
# Sent as they are.
_BROKEN_REQUESTS = (
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /api/v1/training_runs/\xff\xfe/checkpoints/weights/\xff\xfe HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"\x00\x01\x02\xff" * 50 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /healthz HTTP/9.9\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 3000 + b"\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
    b"POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{}",
    b"POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n{}",
    b"POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}",
    b"POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


@dataclass
class Report:
    statuses: Counter[str] = field(default_factory=Counter)
    endpoints: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    """Requests that were not rejected."""
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())


class Fuzzer:
    """A stream of requests."""

    def __init__(self, generator: RequestGenerator) -> None:
        self._generator = generator
        self._random = generator.random

    def next_request(self) -> RawRequest:
        pick = self._random.random()
        if pick < 0.60:
            return self._json_request()
        if pick < 0.72:
            return self._protobuf_request()
        if pick < 0.90:
            method, path, body = self._generator.rest_request()
            return self._with_headers(method, path + self._query(), body, JSON)
        return self._random_request() if pick < 0.96 else self._raw_request()

    def _json_request(self) -> RawRequest:
        path, body = self._generator.json_request()
        body = orjson.loads(orjson.dumps(body))  # a copy, to be spoiled
        for _ in range(self._random.choice((0, 0, 0, 1, 1, 1, 2, 5))):
            self._corrupt_value(body)
        data = orjson.dumps(body)
        return self._with_headers(
            "POST", path, self._corrupt_bytes(data) if self._random.random() < 0.1 else data, JSON
        )

    def _protobuf_request(self) -> RawRequest:
        data = self._generator.protobuf_request()
        data = self._corrupt_bytes(data) if self._random.random() < 0.6 else data
        return self._with_headers("POST", f"{API}/forward_backward", data, PROTOBUF)

    def _random_request(self) -> RawRequest:
        path = self._random.choice(
            (self._generator.json_request()[0], f"{API}/" + quote(self._random.choice(ODD_IDS)))
        )
        method = self._random.choice(
            ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "\x41")
        )
        data = self._random.randbytes(self._random.choice((0, 1, 10, 1000)))
        return self._with_headers(
            method, path, data, self._random.choice((JSON, PROTOBUF, "text/plain", ""))
        )

    def _raw_request(self) -> RawRequest:
        if self._random.random() < 0.5:
            return RawRequest("GET", self._random.choice(_BROKEN_REQUESTS), is_broken=True)
        return RawRequest(
            self._random.choice(("GET", "POST", "DELETE")), self._random.choice(_RAW_TARGETS)
        )

    def _query(self) -> str:
        if self._random.random() < 0.6:
            return ""
        names = self._random.sample(
            ("limit", "offset", "base_model", "access_scope", "project_id", "a"), 2
        )
        return "?" + "&".join(
            f"{name}={quote(str(self._random.choice(ODD_VALUES))[:60])}" for name in names
        )

    def _with_headers(self, method: str, path: str, body: bytes, content_type: str) -> RawRequest:
        headers = [(b"content-type", content_type.encode())] if content_type else []
        pick = self._random.random()
        if pick < 0.05:
            headers.append((b"content-encoding", b"zstd"))
            body = zstandard.compress(body)
        elif pick < 0.10:
            headers.append(
                (
                    b"content-encoding",
                    self._random.choice((b"zstd", b"gzip", b"br", b"identity", b"\xe9")),
                )
            )
        if self._random.random() < 0.1:
            headers.append((b"accept", self._random.choice((PROTOBUF, JSON, "*/*", "")).encode()))
        return RawRequest(method, path.encode(), tuple(headers), body)

    def _corrupt_value(self, body: Any) -> None:
        """Change one value of `body`, at any depth."""
        body_fields = list(_containers_and_keys(body))
        if not body_fields:
            return
        container, key = self._random.choice(body_fields)
        match self._random.randrange(4):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, dict):
                name = self._random.choice(("extra", "seq_id", "path", "type", "\u0000"))
                container[name] = copy.deepcopy(self._random.choice(ODD_VALUES))
            case 2:
                container[key] = self._random.choice(ODD_IDS)
            case _:
                container[key] = copy.deepcopy(self._random.choice(ODD_VALUES))

    def _corrupt_bytes(self, data: bytes) -> bytes:
        position = self._random.randrange(len(data) + 1)
        new_bytes = self._random.randbytes(self._random.randrange(4))
        return data[:position] + new_bytes + data[position + self._random.randrange(4) :]


def _containers_and_keys(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return every (container, key) in `value`."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))
        if isinstance(value, list)
        else []
    )
    for key in keys:
        yield value, key
        yield from _containers_and_keys(value[key])


async def send_random_requests(
    url: str,
    key: str,
    generator: RequestGenerator,
    count: int,
    report: Report,
    connections: int = 24,
) -> None:
    """Send `count` requests over several connections."""
    fuzzer = Fuzzer(generator)
    remaining = iter(range(count))

    async def send_requests() -> None:
        connection = Connection(url, key)
        for _ in remaining:
            await _send(connection, fuzzer.next_request(), generator, report)
        await connection.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(connections):
            tasks.create_task(send_requests())


async def _send(
    connection: Connection, request: RawRequest, generator: RequestGenerator, report: Report
) -> None:
    try:
        answer = await connection.send(request)
    except (NoResponse, OSError, EOFError, ValueError) as error:
        report.statuses[type(error).__name__] += 1
        report.faults.append(f"{type(error).__name__} {error}: {request}")
        return
    if answer is None:
        report.statuses["closed"] += 1
        return
    report.statuses[str(answer.status)] += 1
    report.endpoints[_endpoint(request)] += 1
    report.accepted[_endpoint(request)] += answer.status < 400
    report.slowest = max(report.slowest, answer.seconds)
    fault = _fault(request, answer)
    if fault is not None:
        report.faults.append(f"{fault}: {request}")
    elif answer.status == 200:
        generator.learn(answer.body)


def _endpoint(request: RawRequest) -> str:
    """Return the endpoint of a request, without ids."""
    parts = [
        part for part in request.target.partition(b"?")[0].decode("latin-1").split("/") if part
    ]
    if request.is_broken or not parts:
        return "broken or odd"
    name = "/".join(parts[2:3] if parts[:2] == ["api", "v1"] else parts[:3])
    last = (
        parts[-1]
        if len(parts) > 3 and parts[-1].replace("_", "").isalpha() and len(parts[-1]) > 2
        else ""
    )
    return f"{request.method} {name[:40]}{'/../' + last[:30] if last else ''}"


def _fault(request: RawRequest, answer: Answer) -> str | None:
    """Return what must not be in an answer."""
    if answer.status >= 500:
        return f"{answer.status} {answer.body[:300]!r}"
    if SECRET.encode() in answer.body or b"root:" in answer.body:
        return f"{answer.status} tells the text of a file outside: {answer.body[:300]!r}"
    if answer.status < 400 or answer.status == 408 or request.method == "HEAD" or request.is_broken:
        return None
    return (
        None
        if _has_sentence(answer.body)
        else f"{answer.status} without a sentence, {answer.body[:200]!r}"
    )


def _has_sentence(body: bytes) -> bool:
    try:
        content = orjson.loads(body)
        return len(content["detail"] if "detail" in content else content["error"]["message"]) > 5
    except (ValueError, KeyError, TypeError):
        return False
