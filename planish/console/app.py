"""The pages of the console over HTTP, for `planish console` and `planish serve --console`.

A run directory has text that a model wrote, and a web page in the same browser may try to read it.
So every request is checked, and every response forbids more than it needs:

    Host      must be a loopback name, which stops pages whose name resolves to 127.0.0.1
    Origin    of a request must be the console itself, if the browser sends one
    POST      needs a header that another page can send only after a CORS preflight, which the
              console never answers
    key       of the console's address (`?key=...`), which actions need; a cookie keeps it
    CSP       allows scripts, styles and requests of the console itself, and nothing else

The console answers requests for data with `Answers` (answers.py). The pages are one HTML frame and
plain ES modules in static/.
"""

import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import (
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planish.console.actions import Actions
from planish.console.answers import Answers, BadRequest, Parameters
from planish.console.export import export_page
from planish.console.row_tail import parse_object
from planish.errors import PlanishError
from planish.logtree.nodes import plain
from planish.server.http.origins import host_name, is_loopback

STATIC = Path(__file__).parent / "static"
VIEWS = (
    "curves",
    "rollouts",
    "group",
    "evaluations",
    "checkpoints",
    "findings",
    "options",
    "chat",
)
CSP = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
ACTION_HEADER = "x-planish-console"
_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_log = logging.getLogger("planish.console")
_TEMPLATES = Environment(
    loader=PackageLoader("planish.console", "pages"), autoescape=True, undefined=StrictUndefined
)


def create_app(answers: Answers, actions: Actions | None = None, key: str = "") -> Starlette:
    """Return the application. With `actions`, requests with the `key` may act on runs."""
    base, note = "", ""
    page = _TEMPLATES.get_template("shell.html").render(base=base, note=note)

    cookie = f"planish-console-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def has_key(request: Request) -> bool:
        return actions is not None and hmac.compare_digest(request.cookies.get(cookie, ""), key)

    def shell(request: Request) -> Response:
        given = request.query_params.get("key")
        if given is not None and actions is not None and hmac.compare_digest(given, key):
            response = RedirectResponse(request.url.path, 303)
            response.set_cookie(cookie, key, httponly=True, samesite="strict")
            return response
        return Response(page, media_type="text/html")

    def export(request: Request) -> Response:
        return _export(answers, Parameters(request.query_params.multi_items()))

    app = Starlette(
        routes=[
            Route("/", shell),
            *(Route(f"/{view}", shell) for view in VIEWS),
            Route("/export", export),
            *(
                Route(f"/api/{name}", _data_endpoint(getattr(answers, name)))
                for name in (
                    "runs",
                    "run",
                    "curves",
                    "rollouts",
                    "group",
                    "evaluations",
                    "checkpoints",
                    "findings",
                )
            ),
            Route("/api/actions", lambda request: _json({"allowed": has_key(request)}, 200)),
            *(
                Route(f"/api/{name}", _action_endpoint(act, has_key), methods=["POST"])
                for name, act in (actions.by_name() if actions is not None else {}).items()
            ),
            *(
                [Route("/api/chat", _action_endpoint(actions.chat, has_key), methods=["POST"])]
                if actions is not None
                else []
            ),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )
    app.add_middleware(_OwnPagesOnly)
    return app


def _data_endpoint(answer: Callable[[Parameters], Mapping[str, Any]]) -> Callable:
    """Return an endpoint, which Starlette runs in a thread because it reads files."""

    def endpoint(request: Request) -> Response:
        try:
            data = answer(Parameters(request.query_params.multi_items()))
        except BadRequest as error:
            return _json({"error": str(error)}, 400)
        except LookupError as error:
            return _json({"error": str(error.args[0] if error.args else error)}, 404)
        except Exception as error:
            _log.error("%s failed", request.url.path, exc_info=error)
            text = f"The console failed ({type(error).__name__}); its output has the details."
            return _json({"error": text}, 500)
        body = to_json(data)
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return Response(body, media_type="application/json", headers={"ETag": tag})

    return endpoint


def _action_endpoint(
    act: Callable[[dict[str, Any]], Mapping[str, Any] | Iterator[Mapping[str, Any]]],
    has_key: Callable[[Request], bool],
) -> Callable:
    """Return the endpoint of an action. A result in parts is streamed, one JSON object per line."""

    async def endpoint(request: Request) -> Response:
        if not has_key(request):
            text = "Open the console by the address that it printed, which has its key."
            return _json({"error": text}, 403)
        body = parse_object(await request.body())
        if body is None:
            return _json({"error": "The request is not a JSON object."}, 400)
        try:
            result = await run_in_threadpool(act, body)
            if not isinstance(result, Mapping):
                lines = (to_json(part) + b"\n" for part in result)
                return StreamingResponse(lines, media_type="application/x-ndjson")
            return _json(result, 200)
        except LookupError as error:
            return _json({"error": str(error.args[0] if error.args else error)}, 404)
        except (PlanishError, ValueError) as error:
            return _json({"error": str(error)}, 400)

    return endpoint


def _export(answers: Answers, parameters: Parameters) -> Response:
    try:
        page = export_page(answers, parameters.all("run"), to_json)
    except LookupError as error:
        return PlainTextResponse(str(error.args[0] if error.args else error), 404)
    return Response(
        page,
        media_type="text/html",
        headers={"Content-Disposition": 'attachment; filename="planish-runs.html"'},
    )


def to_json(data: Any) -> bytes:
    """Return JSON. Numbers that are not finite become null. Lone surrogates, which orjson rejects,
    are escaped.
    """
    try:
        return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return json.dumps(plain(data)).encode()


def _json(data: Any, status: int) -> Response:
    return Response(to_json(data), status, media_type="application/json")


@dataclass
class _OwnPagesOnly:
    """Rejects requests that another web page may have sent, and adds the headers of `_HEADERS`."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        problem = _foreign(Headers(scope=scope), scope["method"])
        if problem is not None:
            app: ASGIApp = PlainTextResponse(problem, 403)
        else:
            app = self.app

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in _HEADERS.items()
                        if name.encode() not in sent
                    ),
                ]
            await send(message)

        await app(scope, receive, send_with_headers)


def _foreign(headers: Headers, method: str) -> str | None:
    """Return why a request is rejected; None if it may come from a page of the console, or from a
    program on this machine.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not is_loopback(host_name(host)):
        return (
            f"The Host {host[:100]!r} is not this machine. Open the console as 127.0.0.1 or "
            "localhost; from another machine, use an SSH tunnel (ssh -L)."
        )
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return f"Pages of {origin[:100]!r} may not use the console."
    if method not in ("GET", "HEAD") and headers.get(ACTION_HEADER) is None:
        return f"An action needs the header {ACTION_HEADER}."
    return None
