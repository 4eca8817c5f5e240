"""Tests of threads that compute for a share of the time only."""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from planish.service import ForwardBackward
from planish.tensors import TensorData
from planish.types import Datum, ModelInput
from planish.wire import pacing, training
from planish.wire.fields import Fields
from planish.wire.pacing import paced, pause_if_due


class Clock:
    """A thread's CPU time. Computing advances it; the pauses are written down and not slept."""

    def __init__(self) -> None:
        self.computed = 0.0
        self.pauses: list[float] = []

    def compute(self, seconds: float) -> None:
        for _ in range(round(seconds / 1e-4)):
            self.computed += 1e-4
            pause_if_due()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake_time = SimpleNamespace(thread_time=lambda: clock.computed, sleep=clock.pauses.append)
    monkeypatch.setattr(pacing, "time", fake_time)
    return clock


def test_pauses_are_in_proportion_to_the_computing(clock: Clock):
    with paced(lambda: 0.25):
        clock.compute(0.02)
    assert len(clock.pauses) >= 5
    assert sum(clock.pauses) == pytest.approx(3 * 0.02)


def test_a_share_of_one_never_pauses(clock: Clock):
    with paced(lambda: 1.0):
        clock.compute(0.01)
    assert not clock.pauses


def test_the_share_is_asked_for_at_each_pause(clock: Clock):
    shares = iter([1.0, 1.0, 0.5] + [1.0] * 1000)
    with paced(lambda: next(shares)):
        clock.compute(0.01)
    assert len(clock.pauses) == 1


def test_work_without_a_pause_is_followed_by_one_even_if_it_fails(clock: Clock):
    def compute_and_fail() -> None:
        with paced(lambda: 0.5):
            clock.computed += 0.005
            raise ValueError

    with pytest.raises(ValueError):
        compute_and_fail()
    assert clock.pauses == [pytest.approx(0.005)]
    clock.compute(0.005)
    assert len(clock.pauses) == 1, "the limit ends with the block"


def test_only_the_paced_thread_pauses(clock: Clock):
    with paced(lambda: 0.25), ThreadPoolExecutor(1) as others:
        others.submit(clock.compute, 0.01).result()
        pauses_of_others = len(clock.pauses)
        clock.compute(0.003)
    assert pauses_of_others == 0
    assert clock.pauses


LARGE = ForwardBackward(
    "m",
    [
        Datum(
            ModelInput.from_ints(list(range(400))),
            {"target_tokens": TensorData(np.arange(400), "int64")},
        )
    ]
    * 1000,
    "cross_entropy",
)


def read_message() -> None:
    body = training.forward_backward_to_message(LARGE, 1)
    with paced(lambda: 0.5):
        training.forward_backward_from_body(training.parse_forward_backward(body))


def read_json() -> None:
    datum = {
        "model_input": {"chunks": [{"tokens": list(range(400))}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": list(range(400)), "dtype": "int64", "shape": [400]}
        },
    }
    body = orjson.dumps(
        {
            "model_id": "m",
            "seq_id": 1,
            "forward_backward_input": {"data": [datum] * 1000, "loss_fn": "cross_entropy"},
        }
    )
    with paced(lambda: 0.5):
        training.forward_backward_from_json(Fields.of(body), False)


@pytest.fixture
def no_garbage_collections() -> Iterator[None]:
    """A collection counts as the thread's computing, and takes 100 ms in a large process."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("read", [read_message, read_json])
def test_reading_a_large_body_pauses_often(
    monkeypatch: pytest.MonkeyPatch, no_garbage_collections: None, read
):
    """No stretch between two pauses is a large part of the whole."""
    stretches: list[float] = []

    def note_stretch(seconds: float) -> None:
        stretches.append(seconds)  # With a share of 1/2, a pause is as long as the stretch before.

    fake_time = SimpleNamespace(thread_time=time.thread_time, sleep=note_stretch)
    monkeypatch.setattr(pacing, "time", fake_time)
    read()
    assert len(stretches) >= 5
    assert max(stretches) < sum(stretches) / 2
