"""The endpoint for the results of all requests.

A poll for a result is held open until the result exists, but at most for `poll_seconds`. Then the
server answers with status 408, and the SDK polls again at once without a log line. With status 200
and the same body, the SDK would log a warning for its user.
"""

import orjson
from starlette.responses import Response

from planish.server.durable.checkpoints import shown_path
from planish.server.http.context import Answer, RequestContext, endpoint, json_response
from planish.server.results import Done, Failed, Outcome, TryAgain
from planish.wire.client_errors import ERROR_CLASS
from planish.wire.messages import PROTOBUF
from planish.wire.sampling import sample_response_from_message, sample_response_to_json
from planish.wire.training import output_from_message, output_to_json


async def retrieve_future(context: RequestContext) -> Answer:
    """Answer with the result of a request."""
    async with context.fields() as fields:
        request_id = fields.identifier("request_id")
    match await _wait_for_outcome(context, request_id):
        case Done() as done:
            return await context.compute(
                len(done.content), lambda: _result_response(done, context.accepts_protobuf)
            )
        case Failed(message, category, error_class):
            return {"error": message, "category": category, ERROR_CLASS: error_class}
        case TryAgain():
            return json_response(
                {"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408
            )


async def _wait_for_outcome(context: RequestContext, request_id: str) -> Outcome:
    """Return the answer of a request. Return TryAgain if the request has no answer after
    `poll_seconds`, or when a stopping server has finished its work.
    """
    waiting = context.server.settlement.outcome(
        context.tenant, request_id, context.state.settings.poll_seconds
    )
    return await context.cancelled_by(context.state.ending, waiting) or TryAgain()


def _result_response(done: Done, accepts_protobuf: bool) -> Response:
    if done.media == "json":
        return Response(_with_shown_path(done), media_type="application/json")
    if accepts_protobuf:
        return Response(done.content, media_type=PROTOBUF)
    if done.kind == "sample":
        return json_response(sample_response_to_json(sample_response_from_message(done.content)))
    return json_response(output_to_json(output_from_message(done.content)))


def _with_shown_path(done: Done) -> bytes:
    """Return the content of a result as clients expect it. External weights are stored as a sampler
    checkpoint, so the result of saving them needs another type and path.
    """
    if done.kind != "save_weights_for_sampler":
        return done.content
    fields = orjson.loads(done.content)
    path = fields.get("path")
    if path is None or shown_path(path) == path:
        return done.content
    return orjson.dumps({**fields, "type": "save_weights_external", "path": shown_path(path)})


ROUTES = [endpoint("/retrieve_future", retrieve_future)]
