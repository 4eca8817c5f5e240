"""Results: a request for one is held until it is there, or for `poll_seconds`, after which the
client asks again.

What is not there yet is told as 408, which the SDK takes for an invitation to ask again at once and
without a word; 200 with the same body would be a warning in the user's log.
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
    """What became of the request; TryAgain early if the server stops meanwhile."""
    waiting = context.server.result(context.tenant, request_id, context.state.settings.poll_seconds)
    return await context.unless_stopping(waiting) or TryAgain()


def _result(done: Done, takes_protobuf: bool) -> Response:
    if done.media == "json":
        return Response(_with_shown_path(done), media_type="application/json")
    if takes_protobuf:
        return Response(done.content, media_type=PROTOBUF)
    if done.kind == "sample":
        return answered(sample_response_to_json(sample_response_from_message(done.content)))
    return answered(output_to_json(output_from_message(done.content)))


def _with_shown_path(done: Done) -> bytes:
    """External weights were saved as a sampler's; the client waits for the type and path that it
    asked for.
    """
    if done.kind != "save_weights_for_sampler":
        return done.content
    fields = orjson.loads(done.content)
    path = fields.get("path")
    if path is None or shown_path(path) == path:
        return done.content
    return orjson.dumps({**fields, "type": "save_weights_external", "path": shown_path(path)})


async def cancel_future(context: RequestContext) -> Response:
    async with context.fields() as fields:
        request_id = fields.identifier("request_id")
    await context.server.cancel(context.tenant, request_id)
    return nothing()


ROUTES = [endpoint("/retrieve_future", retrieve_future), endpoint("/cancel_future", cancel_future)]
