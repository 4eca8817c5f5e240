"""What both consoles share: the checks of every request, the headers of every response, the frame of
the pages, and JSON.

A console shows text that a model wrote, and a web page in the same browser may try to read it. So
every request is checked, and every response forbids more than it needs:

    Host      must be a loopback name, which stops pages whose name resolves to 127.0.0.1. A server
              with keys accepts any Host: its data needs a cookie, which the browser sends to the
              Host that set it only
    Origin    of a request must be the console itself, if the browser sends one
    POST      needs a header that another page can send only after a CORS preflight, which the
              console never answers
    CSP       allows scripts, styles and requests of the console itself, and nothing else

The pages are one HTML frame and plain ES modules in static/.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planish.console.answers import Answers, BadRequest, Parameters
from planish.console.export import SHARED, TEMPLATES, export_page
from planish.logtree.nodes import plain
from planish.server.http.origins import host_name, is_loopback
from planish.server.results import NotFound

STATIC = Path(__file__).parent / "static"
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


def shell_page(views: Sequence[str], base: str = "", *, has_keys: bool = False) -> str:
    """Return the HTML frame of the views. The first of `views` is at the address `base`, and the
    others are below it. With `has_keys`, a person logs in with a key.
    """
    return TEMPLATES.get_template("shell.html").render(
        base=base, views=" ".join(views), has_keys=has_keys, note=""
    )


def static_files() -> Mount:
    """Return the route of scripts and styles."""
    shared = [
        Route(f"/{name}", lambda _, path=path: FileResponse(path)) for name, path in SHARED.items()
    ]
    return Mount("/static", routes=[*shared, Mount("/", StaticFiles(directory=STATIC))])


def data_response(request: Request, answer: Callable[[Parameters], Mapping[str, Any]]) -> Response:
    """Return the JSON of an answer to the request's parameters, or an error. This may read files,
    so it runs in a thread.
    """
    try:
        data = answer(Parameters(request.query_params.multi_items()))
    except BadRequest as error:
        return error_json(str(error), 400)
    except NotFound as error:
        return error_json(str(error), 404)
    except Exception as error:
        # KeyError and IndexError are LookupErrors too, and mean a fault of the console.
        if type(error) is LookupError:
            return error_json(str(error), 404)
        _log.error("%s failed", request.url.path, exc_info=error)
        text = f"The console failed ({type(error).__name__}); its output has the details."
        return error_json(text, 500)
    body = to_json(data)
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, media_type="application/json", headers={"ETag": tag})


def export_response(answers: Answers, request: Request) -> Response:
    """Return the page with the runs of a request as one file. This reads files, so it runs in a
    thread.
    """
    try:
        page = export_page(answers, request.query_params.getlist("run"), to_json)
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


def json_response(data: Any, status: int = 200) -> Response:
    """Return data as JSON."""
    return Response(to_json(data), status, media_type="application/json")


def error_json(text: str, status: int) -> Response:
    """Return an error, which the pages show in place."""
    return json_response({"error": text}, status)


@dataclass
class OwnPagesOnly:
    """ASGI middleware that rejects requests that another web page may have sent, and adds the
    headers of `_HEADERS`.
    """

    app: ASGIApp
    accepts_any_host: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        problem = self._problem(Headers(scope=scope), scope["method"])
        app = self.app if problem is None else PlainTextResponse(problem, 403)

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

    def _problem(self, headers: Headers, method: str) -> str | None:
        """Return why a request is rejected; None if it may come from a page of the console, or from
        a program on this machine.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.accepts_any_host and not is_loopback(host_name(host)):
            return (
                f"The Host {host[:100]!r} is not this machine. Open the console as 127.0.0.1 or "
                "localhost; from another machine, use an SSH tunnel (ssh -L)."
            )
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return f"Pages of {origin[:100]!r} may not use the console."
        if method not in ("GET", "HEAD") and headers.get(ACTION_HEADER) is None:
            return f"An action needs the header {ACTION_HEADER}."
        return None
