"""Short generated histories (history_run.py), and faults that their checks must find."""

import asyncio
import gc
from collections import Counter

import pytest
from crash_history import cancel_and_wait, run_concurrently
from disk_shim import compiler
from history_run import Contract, Outcome, check_history, differences, run_history
from wire_client import RequestRejected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_a_history_with_faults_keeps_the_contract(model_dir, tmp_path):
    counts = asyncio.run(check_history(model_dir, tmp_path, seed=1, length=25, faults=20))
    assert counts["kill"] + counts["power loss"] >= 2
    assert counts["answers"] > 40


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_a_history_on_a_disk_that_ignores_syncs_breaks_the_contract(model_dir, tmp_path):
    with pytest.raises((AssertionError, RequestRejected)):
        asyncio.run(run_history(model_dir, tmp_path, 1, 15, 20, ignores_syncs=True))


async def test_programs_that_end_early_leave_no_unread_errors():
    """asyncio would log "exception was never retrieved" at the end of a failing history."""
    unread = list[str]()
    has_failed = asyncio.Event()

    async def fail() -> None:
        has_failed.set()
        raise RequestRejected(400, "it failed")

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await fail()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unread.append(context["message"]))
    with pytest.raises(RequestRejected):
        await run_concurrently(fail(), fail_when_cancelled(), fail_when_cancelled())
    has_failed.clear()
    cancelled = asyncio.create_task(run_concurrently(fail_when_cancelled(), fail_when_cancelled()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not has_failed.is_set()
    await cancel_and_wait(cancelled)
    assert has_failed.is_set()
    del cancelled
    gc.collect()
    await asyncio.sleep(0)
    assert unread == []


def test_a_sampler_must_repeat_itself():
    contract = Contract()
    contract.check_sample("one", 1, [1, 2])
    contract.check_sample("one", 1, [1, 2])
    contract.check_sample("one", 2, [3])
    with pytest.raises(AssertionError, match="another sample for seed 1"):
        contract.check_sample("one", 1, [1, 3])


def test_differences_from_the_run_without_faults_are_named():
    expected = Outcome([{"step 1": 0.5, "step 2": 1.0}], [{"master": b"12"}], Counter())
    assert differences(expected, expected) == []
    seen = Outcome([{"step 1": 0.5, "step 3": 1.0}], [{"master": b"13"}], Counter())
    assert differences(seen, expected) == ["client 0: step 2", "client 0: step 3", "state 0"]
