"""The timeline of a session as a Perfetto trace, which https://ui.perfetto.dev opens.

A trace is one protobuf message, `Trace { repeated TracePacket packet = 1 }`. Each model and sampler
has tracks below the track of the session. A request is a slice from its arrival to its answer, with
a slice "runs" inside from its turn on. Slices of one track must be nested, so requests that overlap
are on different tracks with the same name, which Perfetto's page draws as one group.

The numbers below are those of perfetto/protos/perfetto/trace. They are written by hand, because the
messages need six fields each, and a test reads the result with Perfetto's own Python package.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence

from planish.server.session_timeline import SessionTimeline, TimedRequest

_SLICE_BEGIN, _SLICE_END = 1, 2
_SEQUENCE_ID = 1
_CLEARED_STATE = 1
_SESSION_TRACK = 1


def perfetto_trace(timeline: SessionTimeline, now: float) -> bytes:
    """Return the trace. A request without an answer ends at `now`, in seconds since 1970."""
    parts = [_track(_SESSION_TRACK, f"session {timeline.session_id}", None)]
    next_track = _SESSION_TRACK + 1
    requests_of = defaultdict[str, list[TimedRequest]](list)
    for request in timeline.requests:
        requests_of[request.owner].append(request)
    for owner in timeline.owners:
        for lane in _lanes(requests_of[owner], now):
            parts.append(_track(next_track, owner, _SESSION_TRACK))
            for request in lane:
                parts.extend(_slices(request, next_track, now))
            next_track += 1
    return b"".join(parts)


def _lanes(requests: Sequence[TimedRequest], now: float) -> list[list[TimedRequest]]:
    """Divide requests, sorted by arrival, into as few lists without overlaps as possible."""
    lanes: list[list[TimedRequest]] = []
    ends: list[tuple[float, int]] = []
    for request in requests:
        if ends and ends[0][0] <= request.accepted:
            _, lane = heapq.heappop(ends)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(request)
        heapq.heappush(ends, (_end(request, now), lane))
    return lanes


def _end(request: TimedRequest, now: float) -> float:
    return max(now if request.finished is None else request.finished, request.accepted)


def _slices(request: TimedRequest, track: int, now: float) -> Iterator[bytes]:
    end = _end(request, now)
    notes = {
        "id": request.id,
        "seq": request.seq,
        "state": request.state,
        "body_bytes": request.body_bytes,
        "result_bytes": request.result_bytes,
        **({} if request.message is None else {"message": request.message}),
    }
    yield _event(request.accepted, _SLICE_BEGIN, track, request.kind, notes)
    if request.begun is not None:
        begun = min(max(request.begun, request.accepted), end)
        yield _event(begun, _SLICE_BEGIN, track, "runs", {})
        yield _event(end, _SLICE_END, track)
    yield _event(end, _SLICE_END, track)


def _track(track: int, name: str, parent: int | None) -> bytes:
    descriptor = _number(1, track) + _text(2, name)
    if parent is not None:
        descriptor += _number(5, parent)
    return _packet(_bytes(60, descriptor))


def _event(
    seconds: float,
    kind: int,
    track: int,
    name: str | None = None,
    notes: dict[str, str | int] | None = None,
) -> bytes:
    event = _number(9, kind) + _number(11, track)
    if name is not None:
        event += _text(23, name)
    for key, value in (notes or {}).items():
        note = _text(10, key)
        note += _text(6, value) if isinstance(value, str) else _number(4, value)
        event += _bytes(4, note)
    return _packet(_number(8, round(seconds * 1e9)) + _bytes(11, event))


def _packet(content: bytes) -> bytes:
    """Return a TracePacket of the one sequence that the trace has."""
    return _bytes(1, content + _number(10, _SEQUENCE_ID) + _number(13, _CLEARED_STATE))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode(errors="replace"))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Return a non-negative integer in base 128, lowest digit first."""
    digits = bytearray()
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)
