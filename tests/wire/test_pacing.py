"""Tests of threads that compute for a share of the time only."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
import pytest

from planish.service import ForwardBackward
from planish.tensors import TensorData
from planish.types import Datum, ModelInput
from planish.wire import pacing, training
from planish.wire.fields import Fields
from planish.wire.pacing import paced, pause_if_due


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of all pauses, which are not slept."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pause_if_due()


def test_pauses_are_in_proportion_to_the_computing(pauses: list[float]):
    with paced(lambda: 0.25):
        compute(0.02)
    assert len(pauses) >= 5
    assert sum(pauses) == pytest.approx(3 * 0.02, rel=0.3)


def test_a_share_of_one_never_pauses(pauses: list[float]):
    with paced(lambda: 1.0):
        compute(0.01)
    assert not pauses


def test_the_share_is_asked_for_at_each_pause(pauses: list[float]):
    shares = iter([1.0, 1.0, 0.5] + [1.0] * 1000)
    with paced(lambda: next(shares)):
        compute(0.01)
    assert len(pauses) == 1


def test_work_without_a_pause_is_followed_by_one_even_if_it_fails(pauses: list[float]):
    def compute_and_fail() -> None:
        with paced(lambda: 0.5):
            end = time.thread_time() + 0.005
            while time.thread_time() < end:
                pass
            raise ValueError

    with pytest.raises(ValueError):
        compute_and_fail()
    assert sum(pauses) == pytest.approx(0.005, rel=0.5)
    pause_if_due()
    assert len(pauses) == 1


def test_only_the_paced_thread_pauses(pauses: list[float]):
    with paced(lambda: 0.25), ThreadPoolExecutor(1) as others:
        others.submit(compute, 0.01).result()
        computing = len(pauses)
        compute(0.003)
    assert computing == 0
    assert pauses


LARGE = ForwardBackward(
    "m",
    [
        Datum(
            ModelInput.from_ints(list(range(400))),
            {"target_tokens": TensorData(np.arange(400), "int64")},
        )
    ]
    * 300,
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
            "forward_backward_input": {"data": [datum] * 300, "loss_fn": "cross_entropy"},
        }
    )
    with paced(lambda: 0.5):
        training.forward_backward_from_json(Fields.of(body), False)


@pytest.mark.parametrize("read", [read_message, read_json])
def test_reading_a_large_body_pauses_often(monkeypatch: pytest.MonkeyPatch, read):
    """No stretch between two pauses is a large part of the whole."""
    stretches: list[float] = []

    def note_stretch(seconds: float) -> None:
        stretches.append(seconds)  # With a share of 1/2, a pause is as long as the stretch before.

    monkeypatch.setattr(pacing.time, "sleep", note_stretch)
    read()
    assert len(stretches) >= 5
    assert max(stretches) < sum(stretches) / 2
