"""The pages of `planish console` over HTTP.

The console has no keys for reading, so it serves this machine only (web.py). Actions need the `key`
of the console's address (`?key=...`), which a cookie keeps. The console answers requests for data
with `Answers` (answers.py).
"""

import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from planish.console.actions import Actions
from planish.console.answers import Answers, Parameters
from planish.console.catalog import Catalog
from planish.console.eval_directories import EvaluationAnswers
from planish.console.row_tail import parse_object
from planish.console.web import (
    OwnPagesOnly,
    data_response,
    error_json,
    export_response,
    json_response,
    shell_page,
    static_files,
    to_json,
)
from planish.errors import PlanishError

VIEWS = (
    "runs",
    "curves",
    "rollouts",
    "group",
    "evaluations",
    "checkpoints",
    "findings",
    "chat",
    "options",
)
_ANSWERS = (
    "runs",
    "run",
    "curves",
    "rollouts",
    "group",
    "evaluations",
    "checkpoints",
    "findings",
)
_EVALUATION_ANSWERS = ("evals", "eval_questions", "eval_question")


def create_app(answers: Answers, actions: Actions | None = None, key: str = "") -> Starlette:
    """Return the application. With `actions`, requests with the `key` may act on runs."""
    page = shell_page(VIEWS)
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
        return export_response(answers, request)

    data = {name: getattr(answers, name) for name in _ANSWERS}
    if isinstance(answers.catalog, Catalog):
        evaluations = EvaluationAnswers(answers.catalog)
        data |= {name: getattr(evaluations, name) for name in _EVALUATION_ANSWERS}
    acts: dict[str, Callable[[dict[str, Any]], Any]] = {}
    if actions is not None:
        acts = {**actions.by_name(), "chat": actions.chat}
    app = Starlette(
        routes=[
            Route("/", shell),
            *(Route(f"/{view}", shell) for view in VIEWS[1:]),
            Route("/export", export),
            *(Route(f"/api/{name}", _data_endpoint(answer)) for name, answer in data.items()),
            Route("/api/actions", lambda request: json_response({"allowed": has_key(request)})),
            *(
                Route(f"/api/{name}", _action_endpoint(act, has_key), methods=["POST"])
                for name, act in acts.items()
            ),
            static_files(),
        ]
    )
    app.add_middleware(OwnPagesOnly)
    return app


def _data_endpoint(answer: Callable[[Parameters], Mapping[str, Any]]) -> Callable:
    """Return an endpoint, which Starlette runs in a thread because it reads files."""

    def endpoint(request: Request) -> Response:
        return data_response(request, answer)

    return endpoint


def _action_endpoint(
    act: Callable[[dict[str, Any]], Mapping[str, Any] | Iterator[Mapping[str, Any]]],
    has_key: Callable[[Request], bool],
) -> Callable:
    """Return the endpoint of an action. A result in parts is streamed, one JSON object per line."""

    async def endpoint(request: Request) -> Response:
        if not has_key(request):
            text = "Open the console by the address that it printed, which has its key."
            return error_json(text, 403)
        body = parse_object(await request.body())
        if body is None:
            return error_json("The request is not a JSON object.", 400)
        try:
            result = await run_in_threadpool(act, body)
            if not isinstance(result, Mapping):
                lines = (to_json(part) + b"\n" for part in result)
                return StreamingResponse(lines, media_type="application/x-ndjson")
            return json_response(result)
        except LookupError as error:
            return error_json(str(error.args[0] if error.args else error), 404)
        except (PlanishError, ValueError) as error:
            return error_json(str(error), 400)

    return endpoint
