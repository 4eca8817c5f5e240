"""What the protocol has and this server has not: each refused at once, with a sentence.

The status is 404, on which the SDK raises at once and asks no more. Options of endpoints that do
exist are refused where they are read.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from planish.server.exchange import Exchange, answered, endpoint

_REFUSED = {
    (
        "POST",
        "/auth/token",
    ): "keys are not exchanged for tokens here; the key itself is used (pjwt_auth_enabled is false)",
    (
        "GET",
        "/auth/apikey/me",
    ): "there is nothing to log in to; set TINKER_API_KEY to a key of this server",
    (
        "DELETE",
        "/auth/apikey/me",
    ): "keys are not deleted by clients; remove the key from the server's key file",
    (
        "POST",
        "/create_custom_loss",
    ): "losses traced on a server are not offered; forward_backward_custom runs them in the client",
    (
        "POST",
        "/join_sampling_session",
    ): "copies of a sampling client number their requests themselves (sample_join_sampling_session is false)",
    (
        "POST",
        "/retrieve_futures",
    ): "results are asked for one by one (sample_use_retrieve_futures is false)",
    ("PUT", "/sessions/{session_id}/project"): "this server has no projects",
    ("GET", "/sessions/{session_id}/trace_export"): "this server keeps no traces of sessions",
    ("GET", "/audit"): "this server keeps no audit log",
    ("GET", "/billing/usage/events"): "this server bills nothing",
    (
        "GET",
        "/billing/usage/checkpoints/current",
    ): "this server bills nothing; `GET /api/v1/checkpoints` has the sizes of checkpoints",
}


def _refusing(method: str, path: str, sentence: str) -> Route:
    async def handler(exchange: Exchange) -> Response:
        return answered({"detail": f"not offered: {sentence}"}, 404)

    return endpoint(path, handler, method)


ROUTES = [_refusing(method, path, sentence) for (method, path), sentence in _REFUSED.items()]
