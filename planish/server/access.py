"""Every request, seen from outside of the application: a record in the log, and a measurement of
how long it took.

Requests are told apart by the pattern of their route, never by their path, so that ids neither fill
the metrics nor the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planish.errors import PlanishError
from planish.server.answers import Tenant
from planish.server.logs import fields

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 300)
_REPEATED = (
    "/retrieve_future",
    "/session_heartbeat",
    "/healthz",
    "/readyz",
    "/metrics",
    "/telemetry",
)
_POLL_AGAIN = 408
_CLOSED = 499
"""As proxies call it: the client went away before it had the answer."""

_log = logging.getLogger("planish.access")


class RequestMetrics:
    """Of the HTTP side, for the page at /metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "planish_http_request_seconds",
            "Time from a request to the end of its answer; polls for results are held on purpose",
            ("method", "route", "status"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.open = Gauge(
            "planish_http_requests_open", "Requests that are being answered", registry=registry
        )


@dataclass
class _Seen:
    status: int = _CLOSED
    size: int = 0
    started: float = field(default_factory=time.perf_counter)

    def note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.size += len(message.get("body", b""))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


class Access:
    """ASGI middleware."""

    def __init__(
        self, app: ASGIApp, metrics: RequestMetrics, authenticate: Callable[[str | None], Tenant]
    ) -> None:
        """`authenticate` tells the tenant of a key; PlanishError if it is nobody's."""
        self._app = app
        self._metrics = metrics
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = _Seen()

        async def sending(message: Message) -> None:
            seen.note(message)
            await send(message)

        try:
            with self._metrics.open.track_inprogress():
                await self._app(scope, receive, sending)
        finally:
            self._record(scope, seen)

    def _record(self, scope: Scope, seen: _Seen) -> None:
        found = scope.get("route")
        route = found.path if isinstance(found, Route) else "none"
        # Whoever comes without a key may invent methods; each would be a series of its own.
        is_known = isinstance(found, Route) and scope["method"] in (found.methods or ())
        method = scope["method"] if is_known else "any"
        self._metrics.seconds.labels(method, route, str(seen.status)).observe(seen.seconds)
        is_expected = seen.status < 400 or seen.status == _POLL_AGAIN
        level = logging.DEBUG if is_expected and route.endswith(_REPEATED) else logging.INFO
        if _log.isEnabledFor(level):
            _log.log(
                level,
                "%s %s %d",
                scope["method"],
                route,
                seen.status,
                extra=fields(**self._described(scope, seen)),
            )

    def _described(self, scope: Scope, seen: _Seen) -> dict[str, object]:
        described: dict[str, object] = {
            "status": seen.status,
            "milliseconds": round(seen.seconds * 1000, 1),
        }
        described["bytes"] = seen.size
        with suppress(PlanishError):
            described["tenant"] = self._authenticate(given_key(Headers(scope=scope))).name
        if scope.get("client") is not None:
            described["client"] = scope["client"][0]
        return described


def given_key(headers: Headers) -> str | None:
    """As the SDK gives it, or as a bearer token."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
