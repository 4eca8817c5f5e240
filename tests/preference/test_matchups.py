"""Which answers are compared, and the rewards that follow."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from planish.errors import UserError
from planish.preference.matchups import (
    Matchup,
    MatchupResult,
    Standing,
    TournamentPattern,
    make_matchups,
    split_into_chunks,
    standings,
)

BOTH, ONE = TournamentPattern.ALL_PAIRS_BOTH_WAYS, TournamentPattern.ALL_PAIRS_ONE_WAY
PATTERNS = st.sampled_from(TournamentPattern)


def test_both_matchup_patterns_equal_a_hand_computation():
    assert [(m.a, m.b) for m in make_matchups(3, BOTH)] == [
        (0, 1),
        (1, 0),
        (0, 2),
        (2, 0),
        (1, 2),
        (2, 1),
    ]
    assert [(m.a, m.b) for m in make_matchups(4, ONE)] == [
        (0, 1),
        (2, 0),
        (0, 3),
        (1, 2),
        (3, 1),
        (2, 3),
    ]
    assert TournamentPattern("all_pairs_both_ways") is BOTH
    assert TournamentPattern("all_pairs_one_way") is ONE


@pytest.mark.parametrize(
    ("answers", "size", "chunks"),
    [
        (4, 4, [4]),
        (16, 4, [4, 4, 4, 4]),
        (5, 4, [2, 3]),
        (6, 4, [3, 3]),
        (9, 4, [3, 3, 3]),
        (3, 2, [3]),
        (7, 2, [2, 2, 3]),
        (2, 9, [2]),
        (1, 4, [1]),
    ],
)
def test_every_answer_takes_part_in_a_matchup(answers, size, chunks):
    assert [len(chunk) for chunk in split_into_chunks(answers, size)] == chunks


@given(st.integers(2, 60), st.integers(2, 9), PATTERNS)
def test_answers_meet_exactly_the_others_of_their_chunk(answers, size, pattern):
    chunks = split_into_chunks(answers, size)
    assert [answer for chunk in chunks for answer in chunk] == list(range(answers))
    assert {len(chunk) for chunk in chunks} <= set(range(2, size + 2))
    found = Counter(frozenset((m.a, m.b)) for m in make_matchups(answers, pattern, size))
    expected = {frozenset((i, j)) for chunk in chunks for i in chunk for j in chunk if i != j}
    assert found == Counter(dict.fromkeys(expected, 2 if pattern is BOTH else 1))


@given(st.integers(2, 40), st.integers(2, 9), PATTERNS)
def test_a_position_biased_judge_favours_no_answer(answers, size, pattern):
    """Up to the single matchup that remains for an odd number."""
    results = [MatchupResult(matchup, 1.0) for matchup in make_matchups(answers, pattern, size)]
    most = 0 if pattern is BOTH else 1
    assert all(abs(standing.net_wins) <= most for standing in standings(answers, results))


@pytest.mark.slow
@given(st.integers(2, 12), PATTERNS, st.randoms())
def test_matchup_rewards_sum_to_zero(answers, pattern, rng):
    results = [
        MatchupResult(matchup, rng.uniform(-1, 1)) for matchup in make_matchups(answers, pattern)
    ]
    found = standings(answers, results)
    assert sum(standing.net_wins for standing in found) == pytest.approx(0, abs=1e-9)
    assert all(-1 <= standing.win_minus_loss <= 1 for standing in found)


def test_standings_equal_a_hand_computation():
    results = [
        MatchupResult(Matchup(0, 1), 1.0),
        MatchupResult(Matchup(1, 0), -0.5),
        MatchupResult(Matchup(0, 2), 0.25),
    ]
    assert standings(4, results) == [
        Standing(3, -1.75),
        Standing(2, 1.5),
        Standing(1, 0.25),
        Standing(0, 0.0),
    ]
    assert [standing.win_minus_loss for standing in standings(4, results)] == pytest.approx(
        [-1.75 / 3, 0.75, 0.25, 0]
    )


def test_chunks_of_one_are_rejected():
    with pytest.raises(UserError, match="matchup_group_size=1"):
        make_matchups(4, BOTH, 1)
