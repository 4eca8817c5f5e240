"""FairShare gives the next turn to the waiting key that has used the least time."""

from hypothesis import given, strategies as st

from planish.engine.fairness import FairShare


def test_two_waiting_keys_get_half_of_the_time_each():
    share: FairShare[str] = FairShare()
    used = {"long": 0.0, "short": 0.0}
    for _ in range(1000):
        chosen = share.pick(["short", "long"])
        cost = 3.0 if chosen == "long" else 0.1
        share.charge(chosen, cost)
        used[chosen] += cost
    assert abs(used["long"] - used["short"]) <= 3.0


def test_a_short_absence_does_not_cancel_used_time():
    """A key that leaves briefly after each long turn must not take all of the time."""
    share: FairShare[str] = FairShare()
    used = {"long": 0.0, "short": 0.0}
    for turn in range(2000):
        waiting = ["short"] if turn % 2 else ["long", "short"]
        chosen = share.pick(waiting)
        cost = 3.0 if chosen == "long" else 0.1
        share.charge(chosen, cost)
        used[chosen] += cost
    assert used["long"] <= used["short"] + 3.0


def test_an_absent_key_earns_no_time():
    share: FairShare[str] = FairShare()
    for _ in range(100):
        share.charge(share.pick(["a"]), 1.0)
    turns = []
    for _ in range(10):
        turns.append(share.pick(["a", "b"]))
        share.charge(turns[-1], 1.0)
    assert turns.count("a") >= 4


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.floats(0.01, 5)), max_size=200)
)
def test_a_key_that_always_waits_gets_its_share(turns):
    """Key 0 always waits, with up to four other keys. So it gets at least a fifth of the time,
    except for one long turn of each other key.
    """
    share: FairShare[int] = FairShare()
    mine = total = 0.0
    for others, cost in turns:
        chosen = share.pick(sorted({0, *others}))
        share.charge(chosen, cost)
        total += cost
        mine += cost if chosen == 0 else 0
    assert mine >= total / 5 - 5 * 5.0


def test_keys_that_left_without_a_debt_are_forgotten():
    share: FairShare[int] = FairShare()
    for key in range(100):
        share.charge(share.pick([key]), 1.0)
    for _ in range(3):
        share.charge(share.pick([0]), 1.0)
    assert len(share._used_seconds) == 1
