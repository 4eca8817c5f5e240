"""Spans are timed in tasks and threads, and their files survive resuming."""

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from planish.errors import StorageError, UserError
from planish.files import read_rows
from planish.runlog.run_directory import RunDirectory
from planish.runlog.spans import Spans, TraceFile, write_trace


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_span_that_ran_once_is_its_seconds():
    clock = Clock()
    spans = Spans(clock=clock)
    with spans.measure("sampling"):
        clock.now += 2.5
    clock.now += 0.5
    assert spans.metrics() == {"time/sampling": 2.5, "time/total": 3.0}


def test_a_span_that_ran_often_is_summed_up():
    clock = Clock()
    spans = Spans(clock=clock)
    for seconds in (1.0, 2.0, 6.0):
        with spans.measure("env_step"):
            clock.now += seconds
    assert spans.metrics() == {
        "time/env_step:total": 9.0,
        "time/env_step:count": 3,
        "time/env_step:mean": 3.0,
        "time/env_step:max": 6.0,
        "time/total": 9.0,
    }


def test_a_step_without_spans_has_its_total():
    clock = Clock()
    spans = Spans(clock=clock)
    clock.now += 4.0
    assert spans.metrics() == {"time/total": 4.0}
    assert spans.rows() == []


def test_rows_are_seconds_since_the_first_span_began():
    clock = Clock()
    spans = Spans(clock=clock)
    clock.now += 7.0
    with spans.measure("outer"):
        clock.now += 1.0
        with spans.measure("inner"):
            clock.now += 2.0
    assert spans.rows() == [
        {"name": "outer", "duration": 3.0, "wall_start": 0.0, "wall_end": 3.0},
        {"name": "inner", "duration": 2.0, "wall_start": 1.0, "wall_end": 3.0},
    ]


def test_a_block_that_raises_is_timed_too():
    spans = Spans()
    with pytest.raises(ZeroDivisionError), spans.measure("sampling"):
        raise ZeroDivisionError
    assert "time/sampling" in spans.metrics()


async def test_spans_of_tasks_that_run_at_once_are_all_there():
    clock, go_on = Clock(), asyncio.Event()
    spans = Spans(clock=clock)

    async def rollout() -> None:
        with spans.measure("rollout"):
            await go_on.wait()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(rollout())
        await asyncio.sleep(0)  # all of them begin
        clock.now += 2.0
        go_on.set()
    metrics = spans.metrics()
    assert metrics["time/rollout:count"] == 20
    assert (metrics["time/rollout:total"], metrics["time/rollout:max"]) == (40.0, 2.0)
    assert metrics["time/total"] == 2.0


def traced_run(directory, first_step, steps):
    with TraceFile(directory, first_step) as trace:
        for step in steps:
            spans = Spans(trace)
            with spans.measure("sampling"), spans.measure("env_step"):
                pass
            trace.write(step, spans)


def test_events_nest_within_a_lane_and_do_not_cross(tmp_path):
    """Within a lane, a viewer draws an event inside the event that surrounds it. Events that
    overlap in another way are lost.
    """

    async def rollout(spans: Spans, seconds: float) -> None:
        with spans.measure("rollout"):
            for _ in range(2):
                with spans.measure("policy_sample"):
                    await asyncio.sleep(seconds)

    async def step(trace: TraceFile) -> None:
        ahead, spans = Spans(trace), Spans(trace)
        with spans.measure("step"):
            async with asyncio.TaskGroup() as tasks:
                for index in range(5):
                    tasks.create_task(rollout((spans, ahead)[index % 2], 0.002 * (index + 1)))
        with spans.measure("train"):
            pass
        trace.write(0, spans)
        trace.write(1, ahead)

    with TraceFile(tmp_path, 0) as trace:
        asyncio.run(step(trace))
    events = read_rows(tmp_path / "trace_events.jsonl")
    assert len(events) == 17
    assert {event["tid"] for event in events} == set(range(6))
    for one in events:
        for other in events:
            if one["tid"] == other["tid"] and one["ts"] <= other["ts"] < one["ts"] + one["dur"]:
                assert other["ts"] + other["dur"] <= one["ts"] + one["dur"]


def test_threads_have_lanes_of_their_own(tmp_path):
    spans_in, go = threading.Barrier(3), threading.Event()
    with TraceFile(tmp_path, 0) as trace:
        spans = Spans(trace)

        def work() -> None:
            with spans.measure("grade"):
                spans_in.wait()
                go.wait()

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        spans_in.wait()
        go.set()
        for thread in threads:
            thread.join()
    assert sorted(span.lane for span in spans.finished) == [0, 1]


def test_steps_that_are_done_again_are_in_the_trace_once(tmp_path):
    traced_run(tmp_path, 0, range(5))
    with (tmp_path / "trace_events.jsonl").open("a") as file:
        file.write('{"name": "sampling", "ph"')  # as a kill leaves it
    traced_run(tmp_path, 3, range(3, 6))
    steps = [row["args"]["step"] for row in read_rows(tmp_path / "trace_events.jsonl")]
    assert steps == [step for step in range(6) for _ in range(2)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_also_reported_on_close(tmp_path):
    def traced() -> None:
        with TraceFile(tmp_path, 0) as trace:
            trace._rows.close()
            trace._rows._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
            spans = Spans(trace)
            with spans.measure("sampling"):
                pass
            trace.write(0, spans)

    with pytest.raises(StorageError, match="free space"):
        traced()


def test_the_trace_of_a_run_is_what_a_viewer_loads(tmp_path):
    before = time.time()
    traced_run(tmp_path, 0, range(2))
    first = read_rows(tmp_path / "trace_events.jsonl")[0]
    assert before * 1e6 - 1000 <= first["ts"] <= time.time() * 1e6 + 1000
    assert write_trace(tmp_path) == tmp_path / "trace.json"
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in spans] == ["env_step", "sampling"] * 2
    assert min(event["ts"] for event in spans) == 0
    assert all({"name", "cat", "ph", "ts", "dur", "pid", "tid"} <= set(event) for event in spans)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["planish", "lane 0"]


def test_a_run_without_a_trace_is_an_error_that_says_how_to_get_one(tmp_path):
    with pytest.raises(
        UserError, match="no trace_events.jsonl; a run writes it with enable_trace=True"
    ):
        write_trace(tmp_path)
    with pytest.raises(UserError, match="there is no such run"):
        write_trace(tmp_path / "none")


def test_rows_go_into_the_run_directory(tmp_path):
    spans = Spans()
    with spans.measure("sampling"):
        pass
    with RunDirectory(tmp_path, {}) as run:
        run.log_spans(3, spans.rows())
    [row] = read_rows(tmp_path / "timing_spans.jsonl")
    assert row["step"] == 3
    assert list(row["spans"][0]) == ["name", "duration", "wall_start", "wall_end"]


def test_a_span_costs_microseconds(tmp_path):
    with TraceFile(tmp_path, 0) as trace:
        spans = Spans(trace)
        start = time.thread_time()
        for _ in range(10_000):
            with spans.measure("env_step"):
                pass
        assert (time.thread_time() - start) / 10_000 < 200e-6
