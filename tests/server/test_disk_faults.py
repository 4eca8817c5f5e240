"""A few of the faults of disk_fault_run.py: nothing that was acknowledged is lost when file calls
fail or memory runs out.
"""

import asyncio
import random

import pytest
from disk_fault_run import Case, Fault, new_machine, run_and_check, run_case
from disk_shim import compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(compiler() is None, reason="needs a C compiler"),
]

CASES = 6


@pytest.fixture(scope="module")
def expected(model_dir, tmp_path_factory) -> Case:
    """The run without faults."""
    return asyncio.run(
        run_case(new_machine(model_dir, tmp_path_factory.mktemp("calm") / "one"), None)
    )


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "memory"])
def test_faults_lose_nothing(model_dir, tmp_path, expected, error):
    last = 100 if error == "memory" else expected.calls // 2
    numbers = random.Random(error).sample(range(1, last), CASES)

    async def scenario() -> list[str]:
        cases = [
            await run_and_check(model_dir, tmp_path / "case", Fault(error, number), expected)
            for number in numbers
        ]
        return [case for case in cases if isinstance(case, str)]

    assert asyncio.run(scenario()) == []


def test_wrong_states_are_reported(model_dir, tmp_path, expected):
    other = Case(expected.facts, {**expected.state, "step": b"wrong"})
    found = asyncio.run(run_and_check(model_dir, tmp_path / "case", Fault("EIO", 1_000_000), other))
    assert found == "EIO at 1000000 (): the last state differs"
