"""Programs that end in the middle of their work, without `close()`, on a busy machine."""

import pytest
from exit_run import exits


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_programs_end_cleanly_on_a_busy_machine():
    outcomes = list(exits(20, seed=29, load=2, at_once=2))
    assert len(outcomes) == 20
    faults = [outcome for outcome in outcomes if outcome.fault]
    assert not faults, "\n\n".join(f"{each.run}: {each.fault}\n{each.stderr}" for each in faults)
