"""Which answers of a group are compared with each other, and how each of them scored.

Shape suffix: _G answers of a group.

A group is split into chunks, and every answer meets every other one of its chunk. So 16 answers in
chunks of 4 make 24 pairs instead of 120. Chunks are as equal in size as possible, with at least two
answers each. Then all answers have about the same number of matchups, and their rewards are equally
noisy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from planish.errors import UserError


class TournamentPattern(StrEnum):
    """How often each pair of a chunk is compared, and in which order."""

    ALL_PAIRS_BOTH_WAYS = "all_pairs_both_ways"
    """Each pair is compared twice, with its answers swapped, so that a judge's position bias
    cancels.
    """
    ALL_PAIRS_ONE_WAY = "all_pairs_one_way"
    """Each pair is compared once, at half the cost. Positions alternate, so that no answer is
    always A.
    """


@dataclass(frozen=True)
class Matchup:
    """Two answers, as indices into the group, for positions A and B of a comparison."""

    a: int
    b: int


@dataclass(frozen=True)
class MatchupResult:
    """A matchup and the judge's preference."""

    matchup: Matchup
    preference: float
    """A number from -1 (A is better) to 1 (B is better)."""


@dataclass(frozen=True)
class Standing:
    """The total score of one answer."""

    num_matchups: int
    net_wins: float
    """Wins minus losses; a preference between -1 and 1 counts in part."""

    @property
    def win_minus_loss(self) -> float:
        """The balance per matchup, from -1 to 1; 0 for an answer without matchups."""
        return self.net_wins / self.num_matchups if self.num_matchups else 0.0


def make_matchups(
    num_answers: int,
    pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS,
    matchup_group_size: int = 4,
) -> list[Matchup]:
    """Return the matchups of `num_answers` answers in chunks of about `matchup_group_size`.

    A chunk has at most `matchup_group_size` answers, or one more if one answer would be left over.
    """
    pairs = [
        pair
        for chunk in split_into_chunks(num_answers, matchup_group_size)
        for pair in combinations(chunk, 2)
    ]
    if pattern is TournamentPattern.ALL_PAIRS_BOTH_WAYS:
        return [Matchup(*sides) for i, j in pairs for sides in ((i, j), (j, i))]
    return [Matchup(i, j) if (j - i) % 2 else Matchup(j, i) for i, j in pairs]


def split_into_chunks(num_answers: int, matchup_group_size: int) -> list[range]:
    """Split the indices of the answers into contiguous chunks that are as equal as possible.

    A single answer is a chunk without matchups.
    """
    require_chunks(matchup_group_size)
    num_chunks = max(1, min(-(-num_answers // matchup_group_size), num_answers // 2))
    return [
        range(index * num_answers // num_chunks, (index + 1) * num_answers // num_chunks)
        for index in range(num_chunks)
    ]


def require_chunks(matchup_group_size: int) -> None:
    """Raise UserError for a chunk size below 2."""
    if matchup_group_size < 2:
        raise UserError(
            f"matchup_group_size={matchup_group_size}: give at least 2: answers are compared with "
            "each other"
        )


def standings(num_answers: int, results: Sequence[MatchupResult]) -> list[Standing]:
    """Return the standing of each answer, in the order of the group."""
    num_matchups_G = [0] * num_answers
    net_wins_G = [0.0] * num_answers
    for result in results:
        for answer, sign in ((result.matchup.a, -1), (result.matchup.b, 1)):
            num_matchups_G[answer] += 1
            net_wins_G[answer] += sign * result.preference
    return [
        Standing(num_matchups, net_wins)
        for num_matchups, net_wins in zip(num_matchups_G, net_wins_G, strict=True)
    ]
