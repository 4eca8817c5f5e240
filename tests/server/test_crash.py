"""A few of the kills of crash_run.py: a server that dies while clients use it loses nothing."""

import pytest
from crash_run import CALM, SETTINGS, Kill, Round, differences, kills, run_round

from planish.server.durable.crash_points import CRASH_POINTS, arm_crash_point

pytestmark = pytest.mark.slow

KILLS = (
    Kill("before commit:12"),
    Kill("snapshot saved before recording:1"),
    Kill("between replayed operations:1"),
    Kill("sampler saved before recording:2"),
    Kill(crash_after=0.3),
)


@pytest.mark.timeout(600)
async def test_a_killed_server_gives_the_same_answers_as_an_undisturbed_one(model_dir, tmp_path):
    undisturbed = await run_round(model_dir, tmp_path / "calm", iter(()), 0, CALM, 1)
    killed = await run_round(model_dir, tmp_path / "killed", iter(KILLS), len(KILLS), SETTINGS, 1)
    assert differences(killed, undisturbed) == []
    assert killed.kills.total() >= 3


def test_differences_are_named():
    expected = Round([{"step 1": 0.5, "step 2": 0.25}], [{"master": b"12"}])
    assert differences(expected, expected) == []
    seen = Round([{"step 1": 0.5, "step 3": 0.25}], [{"master": b"13"}])
    assert sorted(differences(seen, expected)) == [
        "client 0: step 2",
        "client 0: step 3",
        "state 0: master",
    ]


def test_every_crash_point_is_chosen_in_turn():
    deaths = kills(seed=0)
    named = [next(deaths).place for _ in range(2 * len(CRASH_POINTS))]
    assert set(named) == {*CRASH_POINTS, "at random"}


@pytest.mark.parametrize("setting", ["nowhere:1", "before commit:x", ""])
def test_an_unknown_crash_point_is_rejected(setting):
    with pytest.raises(ValueError, match="NAME:COUNT|invalid literal"):
        arm_crash_point(setting)
