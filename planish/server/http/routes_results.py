"""Results: a request for a result is held until it is there, or for `poll_seconds`, after which the
client asks again.

"Not yet" is status 408: the SDK then asks again at once without a log line. Status 200 with the
same body would log a warning on the user's side.
"""

from __future__ import annotations

import orjson
from starlette.responses import Response

from planish.server.durable.names import shown_path
from planish.server.http.context import RequestContext, answered, endpoint, nothing
from planish.server.results import Done, Failed, Outcome, TryAgain
from planish.wire.client_errors import ERROR_CLASS
from planish.wire.messages import PROTOBUF
from planish.wire.sampling import sample_response_from_message, sample_response_to_json
from planish.wire.training import output_from_message, output_to_json


async def retrieve_future(context: RequestContext) -> Response:
    """Answer with the result of a request."""
    async with context.fields() as fields:
        request_id = fields.identifier("request_id")
    match await _outcome(context, request_id):
        case Done() as done:
            return await context.compute(
                done.content, lambda: _result(done, context.takes_protobuf)
            )
        case Failed(message, category, error_class):
            return answered({"error": message, "category": category, ERROR_CLASS: error_class})
        case TryAgain():
            return answered(
                {"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408
            )


async def _outcome(context: RequestContext, request_id: str) -> Outcome:
    """Return the answer of a request; TryAgain early if the server begins to stop."""
    waiting = context.server.request_log.outcome(
        context.tenant, request_id, context.state.settings.poll_seconds
    )
    return await context.cancelled_by_stop(waiting) or TryAgain()


def _result(done: Done, takes_protobuf: bool) -> Response:
    if done.media == "json":
        return Response(_with_shown_path(done), media_type="application/json")
    if takes_protobuf:
        return Response(done.content, media_type=PROTOBUF)
    if done.kind == "sample":
        return answered(sample_response_to_json(sample_response_from_message(done.content)))
    return answered(output_to_json(output_from_message(done.content)))


def _with_shown_path(done: Done) -> bytes:
    """Replace type and path in the result of saving external weights, which are stored as a sampler
    checkpoint.
    """
    if done.kind != "save_weights_for_sampler":
        return done.content
    fields = orjson.loads(done.content)
    path = fields.get("path")
    if path is None or shown_path(path) == path:
        return done.content
    return orjson.dumps({**fields, "type": "save_weights_external", "path": shown_path(path)})


async def cancel_future(context: RequestContext) -> Response:
    """Cancel a sample request."""
    async with context.fields() as fields:
        request_id = fields.identifier("request_id")
    context.server.samplers.cancel(context.tenant, request_id)
    return nothing()


ROUTES = [endpoint("/retrieve_future", retrieve_future), endpoint("/cancel_future", cancel_future)]
