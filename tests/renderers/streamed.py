"""Streams a finished sample, as the server streams it to a client."""

from collections.abc import Sequence

from planish.renderers import Renderer
from planish.renderers.stream_parser import Reading, StreamedSample, marks_of, read_message


def streamed(renderer: Renderer, tokens: Sequence[int]) -> tuple[list[Reading], Reading]:
    """Return the pieces of the stream, one per token and the rest, and the whole message."""
    stop_ids = frozenset(stop for stop in renderer.get_stop_sequences() if isinstance(stop, int))
    growing = StreamedSample(read_message(renderer), (), marks_of(renderer), stop_ids)
    deltas = []
    for token in tokens:
        growing.add(token)
        deltas.append(growing.delta())
    deltas.append(growing.rest())
    return deltas, growing.whole()
