"""Time measurements of the parts of a step: named spans, from any task or thread.

    spans = Spans()                       # one for each step, created when the step begins
    with spans.measure("sampling"): ...
    spans.metrics()                       # time/sampling, time/total, ...
    run.log_spans(step, spans.rows())     # timing_spans.jsonl

With a `TraceFile` the same spans also become Chrome trace events (trace_events.jsonl), which
`planish trace RUN` turns into a file for https://ui.perfetto.dev. Spans of one task nest; tasks
that run at the same time are drawn in different lanes.
"""

import asyncio
import heapq
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from planish.errors import UserError
from planish.files import Row, RowFile, read_rows, write_atomically
from planish.runlog.run_directory import TRACE


@dataclass(slots=True)
class Span:
    """A named interval. `start` and `end` are in seconds of the clock of its `Spans`."""

    name: str
    start: float
    end: float
    lane: int


class Spans:
    """The spans of one step."""

    def __init__(
        self, trace: "TraceFile | None" = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._lanes = trace.lanes if trace is not None else None
        self._start_time = clock()
        self.finished: list[Span] = []
        """The finished spans, in the order in which they ended."""

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the block as a span, even if it raises. Blocks may nest, and may run in many
        tasks at once.
        """
        assert name != "total", "time/total is the whole step"
        lane = self._lanes.enter() if self._lanes is not None else 0
        start = self._clock()
        try:
            yield
        finally:
            self.finished.append(Span(name, start, self._clock(), lane))
            if self._lanes is not None:
                self._lanes.leave()

    def metrics(self) -> dict[str, float]:
        """Return time/NAME in seconds. For a span that ran several times, return time/NAME:total,
        :count, :mean and :max instead.

        time/total is the time since this object was created. The spans of concurrent tasks may sum
        to more than that.
        """
        by_name: dict[str, list[float]] = {}
        for span in self.finished:
            by_name.setdefault(span.name, []).append(span.end - span.start)
        metrics: dict[str, float] = {}
        for name, seconds in by_name.items():
            if len(seconds) == 1:
                metrics[f"time/{name}"] = seconds[0]
            else:
                metrics[f"time/{name}:total"] = sum(seconds)
                metrics[f"time/{name}:count"] = len(seconds)
                metrics[f"time/{name}:mean"] = statistics.fmean(seconds)
                metrics[f"time/{name}:max"] = max(seconds)
        return {**metrics, "time/total": self._clock() - self._start_time}

    def rows(self) -> list[dict[str, float | str]]:
        """Return the spans for timing_spans.jsonl, in the order in which they began. wall_start and
        wall_end are seconds since the first span began.
        """
        spans = sorted(self.finished, key=lambda span: span.start)
        first_start = spans[0].start if spans else 0.0
        return [
            {
                "name": span.name,
                "duration": span.end - span.start,
                "wall_start": span.start - first_start,
                "wall_end": span.end - first_start,
            }
            for span in spans
        ]


@dataclass
class _LaneUse:
    lane: int
    depth: int = 0


@dataclass
class _Lanes:
    """Assigns each task or thread with an open span to the lowest free lane of the trace."""

    _in_use: dict[int, _LaneUse] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self) -> int:
        with self._lock:
            owner = _task_or_thread_id()
            if owner not in self._in_use:
                self._in_use[owner] = _LaneUse(
                    heapq.heappop(self._free) if self._free else len(self._in_use)
                )
            lane_use = self._in_use[owner]
            lane_use.depth += 1
            return lane_use.lane

    def leave(self) -> None:
        with self._lock:
            owner = _task_or_thread_id()
            lane_use = self._in_use[owner]
            lane_use.depth -= 1
            if lane_use.depth == 0:
                del self._in_use[owner]
                heapq.heappush(self._free, lane_use.lane)


def _task_or_thread_id() -> int:
    """Return an id that is unique among live tasks and threads."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return id(task) if task is not None else threading.get_ident()


class TraceFile:
    """trace_events.jsonl of a run directory, with one Chrome trace event per line.

    It is a context manager. Times are microseconds since 1970, so the events of a resumed run
    follow those of the first process.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open the file. Events of steps from `first_step` on, from an earlier process, are
        dropped, because those steps are trained again.
        """
        self._rows = RowFile(directory / TRACE)
        self._rows.keep(lambda row: row["args"]["step"] < first_step)
        self.lanes = _Lanes()
        self._epoch_offset = time.time() - time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, spans: Spans) -> None:
        """Append the spans of a step and flush them."""
        self._rows.append(*(self._event(step, span) for span in spans.finished))

    def close(self) -> None:
        """Close the file."""
        self._rows.close()

    def _event(self, step: int, span: Span) -> Row:
        start, end = (
            round((moment + self._epoch_offset) * 1e6) for moment in (span.start, span.end)
        )
        fields = {"ts": start, "dur": end - start, "pid": os.getpid(), "tid": span.lane}
        return {"name": span.name, "cat": "span", "ph": "X", **fields, "args": {"step": step}}


def write_trace(run: str | Path, out: str | Path | None = None) -> Path:
    """Convert a run's trace_events.jsonl to a file for Perfetto or chrome://tracing.

    `out` is the file; None means trace.json in the run directory. Return its path. Raises UserError
    if the run was not traced.
    """
    directory = Path(run).expanduser()
    if not directory.is_dir():
        raise UserError(f"{run}: there is no such run; give its log_path")
    events = read_rows(directory / TRACE)
    if not events:
        raise UserError(f"{run}: it has no {TRACE}; a run writes it with enable_trace=True")
    path = Path(out).expanduser() if out is not None else directory / "trace.json"
    first_start = min(event["ts"] for event in events)
    shifted_events = [{**event, "ts": event["ts"] - first_start} for event in events]
    write_atomically(
        path,
        json.dumps({"traceEvents": [*_names(events), *shifted_events], "displayTimeUnit": "ms"}),
    )
    return path


def _names(events: list[Row]) -> Iterator[dict[str, Any]]:
    for pid in sorted({event["pid"] for event in events}):
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": "planish"}}
    for pid, lane in sorted({(event["pid"], event["tid"]) for event in events}):
        yield {
            "name": "thread_name",
            "ph": "M",
            "pid": pid,
            "tid": lane,
            "args": {"name": f"lane {lane}"},
        }
