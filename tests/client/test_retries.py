"""Which failed requests a client repeats, after which delay, and for how long."""

import asyncio
import threading

import pytest
from httpx2 import Request, Response

from planish.client.remote_errors import ServerFaultError
from planish.client.remote_retries import RetryState
from planish.errors import UserError

URL = "http://server"


@pytest.fixture
def delays(monkeypatch) -> list[float]:
    """The delays between requests, which are not waited for."""
    waited: list[float] = []
    real_sleep, test_thread = asyncio.sleep, threading.get_ident()

    async def sleep(seconds: float) -> None:
        if threading.get_ident() == test_thread:
            waited.append(seconds)
        else:  # a client that an earlier test left in another thread
            await real_sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


def response(status: int, **headers: str) -> Response:
    return Response(status, headers=headers, json={"detail": "why"}, request=Request("GET", URL))


async def test_a_client_waits_as_long_as_the_server_asks(delays):
    state = RetryState(600.0, URL)
    await state.wait_after_error(response(429, **{"Retry-After": "7"}))
    await state.wait_after_error(response(503, **{"Retry-After": "1000"}))
    assert 7.0 <= delays[0] <= 10.5
    assert 60.0 <= delays[1] <= 90.0


async def test_delays_double_up_to_five_seconds_and_start_again_after_an_answer(delays):
    state = RetryState(600.0, URL)
    for _ in range(8):
        await state.wait_after_error(response(503))
    state.reset()
    await state.wait_after_error(response(503))
    for found, least in zip(delays, [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 0.2], strict=True):
        assert least <= found <= 1.5 * least


async def test_five_faults_in_a_row_are_repeated_and_the_sixth_is_reported(delays):
    state = RetryState(600.0, URL)
    for _ in range(5):
        await state.wait_after_error(response(500))
    with pytest.raises(ServerFaultError, match="why"):
        await state.wait_after_error(response(500))
    assert len(delays) == 5


@pytest.mark.parametrize("status", [400, 404, 501, 505])
async def test_other_errors_are_reported_at_once(delays, status):
    with pytest.raises((UserError, ServerFaultError), match="why"):
        await RetryState(600.0, URL).wait_after_error(response(status))
    assert delays == []


async def test_only_a_rate_limit_may_last_longer_than_the_clients_patience(delays):
    state = RetryState(0.0, URL)
    await state.wait_after_error(response(429))
    with pytest.raises(ServerFaultError, match="why"):
        await state.wait_after_error(response(503))
