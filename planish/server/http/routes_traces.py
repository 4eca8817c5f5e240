"""Endpoints that export the timeline of a session for Perfetto. A client asks for a URL with its
key, and then reads the URL without a key. A URL is valid for an hour, and each download has the
requests up to its own time.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from planish.errors import PlanishError
from planish.server.http.context import API, Json, RequestContext, endpoint, error_response
from planish.server.http.downloads import public_url
from planish.server.perfetto import perfetto_trace
from planish.server.session_timeline import SessionTimeline

_LINK_SECONDS = 3600


async def trace_export(context: RequestContext) -> Json:
    """Answer with the URL of a session's trace. The trace is made while it is downloaded, so the
    answer is never "pending".
    """
    session_id = context.path_parameter("session_id")
    token = await context.server.timelines.token(context.tenant, session_id, _LINK_SECONDS)
    return {"status": "ready", "url": f"{public_url(context)}{API}/traces/{quote(token)}"}


async def trace(request: Request) -> Response:
    """Send the trace to the holder of a token."""
    timelines = request.app.state.http.server.timelines
    try:
        session_id = await timelines.session_of_token(request.path_params["token"])
        return await trace_response(await timelines.read(session_id))
    except PlanishError as error:
        return error_response(error)


async def trace_response(timeline: SessionTimeline) -> Response:
    """Return the response with a trace."""
    content = await asyncio.to_thread(perfetto_trace, timeline, time.time())
    name = f"{timeline.session_id}.pftrace"
    return Response(
        content,
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


ROUTES = [
    endpoint("/sessions/{session_id}/trace_export", trace_export, "GET"),
    Route(f"{API}/traces/{{token}}", trace, methods=["GET"]),
]
