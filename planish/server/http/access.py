"""The format of the log, and the middleware that logs and measures every HTTP request.

The metrics and the log name the pattern of a request's route, never its path. A path contains ids,
and each id would add a new series to the metrics. Every request is a record of the logger
planish.access, with the route's pattern, status, milliseconds and the tenant's name. Keys, prompts
and samples are never logged. Clients repeat some requests all the time: polls for results,
heartbeats, health and metrics. Such a request has the level debug if it succeeds.

A record has a message and fields: `_log.info("snapshot", extra=log_fields(model=...,
seconds=...))`. On a terminal, the record is a line of text. Elsewhere, the record is one line with
a JSON object. The fields are then entries of this object, next to `message`:

    {"time": "2026-01-01T12:00:00.000+00:00", "level": "info", "logger": "planish.access",
     "message": "...", ...}
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import SimpleQueue
from select import PIPE_BUF
from threading import Event, RLock, Thread
from typing import Any, Literal, TextIO

import orjson
from prometheus_client import CollectorRegistry, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planish.errors import UserError

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 300)
_CONSOLE_PATH = "/console/"
"""Pages of the console ask every two seconds."""
_POLLED_ROUTES = (
    "/retrieve_future",
    "/session_heartbeat",
    "/healthz",
    "/health",
    "/readyz",
    "/metrics",
    "/telemetry",
)
TENANT_SCOPE_KEY = "planish.tenant"
"""The entry of an ASGI scope with the tenant that owns the request's key."""
_POLL_AGAIN_STATUS = 408
_CLIENT_CLOSED_STATUS = 499
"""The status that proxies use when the client closed the connection before the response."""

_log = logging.getLogger("planish.access")


class RequestMetrics:
    """Prometheus metrics of HTTP requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Add the metrics to `registry`."""
        self.seconds = Histogram(
            "planish_http_request_seconds",
            "Time from a request to the end of its response; polls for results are held on purpose",
            ("method", "route", "status"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.open = Gauge("planish_http_requests_open", "Requests in progress", registry=registry)


@dataclass
class _ResponseRecord:
    """The status, size and start time of one response."""

    status: int = _CLIENT_CLOSED_STATUS
    size: int = 0
    started: float = field(default_factory=time.perf_counter)

    def observe(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.size += len(message.get("body", b""))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


@dataclass(frozen=True)
class AccessLog:
    """ASGI middleware that logs and measures requests."""

    app: ASGIApp
    metrics: RequestMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request, and record the request when its response ends."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response = _ResponseRecord()

        async def send_and_observe(message: Message) -> None:
            response.observe(message)
            await send(message)

        try:
            with self.metrics.open.track_inprogress():
                await self.app(scope, receive, send_and_observe)
        finally:
            self._record(scope, response)

    def _record(self, scope: Scope, response: _ResponseRecord) -> None:
        found = scope.get("route")
        route = found.path if isinstance(found, Route) else "none"
        # A client without a key could invent methods, and each would add a series to the metrics.
        is_known = isinstance(found, Route) and scope["method"] in (found.methods or ())
        method = scope["method"] if is_known else "any"
        self.metrics.seconds.labels(method, route, str(response.status)).observe(response.seconds)
        is_expected = response.status < 400 or response.status == _POLL_AGAIN_STATUS
        is_polled = route.endswith(_POLLED_ROUTES) or scope["path"].startswith(_CONSOLE_PATH)
        level = logging.DEBUG if is_expected and is_polled else logging.INFO
        if _log.isEnabledFor(level):
            _log.log(
                level,
                "%s %s %d",
                scope["method"],
                route,
                response.status,
                extra=log_fields(**self._log_fields_of(scope, response)),
            )

    def _log_fields_of(self, scope: Scope, response: _ResponseRecord) -> dict[str, object]:
        described: dict[str, object] = {
            "status": response.status,
            "milliseconds": round(response.seconds * 1000, 1),
        }
        described["bytes"] = response.size
        if TENANT_SCOPE_KEY in scope:
            described["tenant"] = scope[TENANT_SCOPE_KEY].name
        if scope.get("client") is not None:
            described["client"] = scope["client"][0]
        return described


def key_from_headers(headers: Headers) -> str | None:
    """Return the key of a request: a bearer token, or the header X-API-Key that the SDK sends."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


LogFormat = Literal["text", "json"]
LOG_LEVELS = ("debug", "info", "warning", "error")
_FIELDS_ATTRIBUTE = "planish_fields"
_CONNECTION_ERROR_SECONDS = 60.0
_LIBRARY_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "py.warnings")


def log_fields(**values: object) -> dict[str, Any]:
    """Return fields for a log record, to be passed as `extra`."""
    return {_FIELDS_ATTRIBUTE: values}


def set_up_logging(log_format: LogFormat | None, level: str, stream: TextIO | None = None) -> None:
    """Send the log to `stream` and nowhere else. By default, a thread writes it to stderr. With
    `log_format` None, a terminal gets text, and any other stream gets JSON.
    """
    if level not in LOG_LEVELS:
        raise UserError(f"--log-level {level}: give one of {', '.join(LOG_LEVELS)}")
    handler = BackgroundHandler() if stream is None else logging.StreamHandler(stream)
    stream = sys.stderr if stream is None else stream
    is_terminal = stream is not None and stream.isatty()
    as_text = log_format == "text" or (log_format is None and is_terminal)
    handler.addFilter(_limit_connection_errors())
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("planish").setLevel(level.upper())
    logging.captureWarnings(True)
    for name in _LIBRARY_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class BackgroundHandler(logging.Handler):
    """Writes the log to a file descriptor in a thread.

    A write to a pipe or a terminal blocks if its reader has stopped. So no caller waits for the
    thread. If MAX_LINES lines wait to be written, further lines are dropped, and their number is
    logged later. At exit, `logging` calls `flush`.
    """

    MAX_LINES = 10_000
    _STALL_SECONDS = 1.0

    def __init__(self, descriptor: int = 2) -> None:
        """Start the thread. `descriptor` is the file descriptor, by default that of stderr."""
        super().__init__()
        self._descriptor = descriptor
        # A signal handler may log while its own thread logs. So the queue and the lock must be
        # reentrant: with `Queue` and `Lock`, the thread would wait for itself.
        self._lines: SimpleQueue[str | Event] = SimpleQueue()
        self._dropped = 0
        self._counting = RLock()
        """Held while `_dropped` is changed."""
        self._written_bytes = 0
        # The thread runs until the process ends, because other threads may log until then.
        Thread(target=self._write_lines, name="planish-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record."""
        if self._lines.qsize() >= self.MAX_LINES:
            with self._counting:
                self._dropped += 1
            return
        try:
            self._lines.put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until the queued lines are written, or until none of them could be written for
        _STALL_SECONDS.
        """
        is_flushed, before = Event(), -1
        self._lines.put(is_flushed)
        while self._written_bytes > before:
            before = self._written_bytes
            if is_flushed.wait(self._STALL_SECONDS):
                return

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, Event):
                line.set()
                continue
            try:
                self._write(line)
            except MemoryError:
                with self._counting:
                    self._dropped += 1
                continue
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                # A call of the logger would wait for the lock that `logging` holds at exit.
                message = "%d lines of the log were dropped: nobody read it, or memory ran out"
                self.emit(
                    _log.makeRecord(_log.name, logging.WARNING, "", 0, message, (dropped,), None)
                )

    def _write(self, line: str) -> None:
        left = f"{line}\n".encode("utf-8", "backslashreplace")
        with suppress(OSError):  # nobody can read the log any more
            while left:
                written = os.write(self._descriptor, left[:PIPE_BUF])
                self._written_bytes += written
                left = left[written:]


def _limit_connection_errors() -> Callable[[logging.LogRecord], bool]:
    """Return a log filter. When the process has no file descriptors left, asyncio logs thousands of
    records per second, and the filter keeps one of them per minute.
    """
    last = -_CONNECTION_ERROR_SECONDS

    def is_kept(record: logging.LogRecord) -> bool:
        nonlocal last
        if record.name != "asyncio" or "out of system resource" not in record.msg:
            return True
        if record.created - last < _CONNECTION_ERROR_SECONDS:
            return False
        last, record.exc_info = record.created, None
        record.msg = (
            "no more connections can be accepted until some close: this process may not open more "
            "files. Raise the limit (ulimit -Hn, "
            "LimitNOFILE of systemd); each waiting request is a connection"
        )
        record.args = ()
        return True

    return is_kept


_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, line separators, marks that reorder text, and surrogates."""


def printable(text: str) -> str:
    """Return `text` on one line, with control characters as escapes such as `\\x1b` and `\\n`.

    Parts of a log message may come from a client. Unescaped, they could forge log lines or send
    commands to the terminal that shows the log.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class JsonFormatter(logging.Formatter):
    """Formats a record as one line with a JSON object. Values of any type can be logged."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object for a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = "".join(traceback.format_exception(*record.exc_info))
        line = {
            name: _without_surrogates(value) if isinstance(value, str) else value
            for name, value in line.items()
        }
        text = orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        # orjson escapes only the control characters below 32. All other characters of _UNPRINTABLE
        # can occur only within JSON strings, where a \u escape is valid.
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text: TIME LEVEL logger: message  name=value ..."""

    def __init__(self) -> None:
        """Show times as hours, minutes and seconds."""
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line for a record, followed by the fields of `log_fields`."""
        text = super().formatMessage(record)
        named = " ".join(f"{name}={value}" for name, value in _fields_of(record).items())
        return printable(f"{text}  {named}" if named else text)

    def formatException(self, ei: Any) -> str:
        """Return the traceback with all lines indented, so that no line looks like a record."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {printable(line)}" for line in lines)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    return getattr(record, _FIELDS_ATTRIBUTE, {})
