"""Which answers of a group meet each other, and how each of them did.

Legend: G answers of a group.

Every answer meets every other one of its chunk, so a group of 16 in chunks of 4 has 24 pairs rather
than 120. Chunks are as equal as can be, and none has less than two answers: all answers have about
as many matchups, so their rewards are about as noisy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from planish.errors import UserError


class TournamentPattern(StrEnum):
    ALL_PAIRS_BOTH_WAYS = "all_pairs_both_ways"
    """Each pair meets twice, each answer once as A and once as B: what a judge feels for a side
    cancels out.
    """
    ALL_PAIRS_ONE_WAY = "all_pairs_one_way"
    """Each pair meets once, at half of the cost. Sides alternate, so that no answer is always A."""


@dataclass(frozen=True)
class Matchup:
    """Two answers by their numbers in the group, which take the places A and B of a comparison."""

    a: int
    b: int


@dataclass(frozen=True)
class Result:
    matchup: Matchup
    preference: float
    """From -1, A is better, to 1, B is better."""


@dataclass(frozen=True)
class Standing:
    """How one answer did."""

    matchups: int
    balance: float
    """Wins minus losses; what is between the two counts in part."""

    @property
    def win_minus_loss(self) -> float:
        """From -1 to 1; 0 of an answer that met no other."""
        return self.balance / self.matchups if self.matchups else 0.0


def matchups_of(
    num_answers: int,
    pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS,
    matchup_group_size: int = 4,
) -> list[Matchup]:
    """Of `num_answers` answers in chunks of at most `matchup_group_size`, or of one more where one
    answer would be left over.
    """
    pairs = [
        pair
        for chunk in chunks_of(num_answers, matchup_group_size)
        for pair in combinations(chunk, 2)
    ]
    if pattern is TournamentPattern.ALL_PAIRS_BOTH_WAYS:
        return [Matchup(*sides) for i, j in pairs for sides in ((i, j), (j, i))]
    return [Matchup(i, j) if (j - i) % 2 else Matchup(j, i) for i, j in pairs]


def chunks_of(num_answers: int, matchup_group_size: int) -> list[range]:
    """Contiguous and as equal as can be; a single answer is a chunk without matchups."""
    require_chunks(matchup_group_size)
    count = max(1, min(-(-num_answers // matchup_group_size), num_answers // 2))
    return [
        range(index * num_answers // count, (index + 1) * num_answers // count)
        for index in range(count)
    ]


def require_chunks(matchup_group_size: int) -> None:
    if matchup_group_size < 2:
        raise UserError(
            f"matchup_group_size={matchup_group_size}: give at least 2: answers are compared with each other"
        )


def standings(num_answers: int, results: Sequence[Result]) -> list[Standing]:
    """Of each answer, in order."""
    met_G = [0] * num_answers
    balance_G = [0.0] * num_answers
    for result in results:
        for answer, sign in ((result.matchup.a, -1), (result.matchup.b, 1)):
            met_G[answer] += 1
            balance_G[answer] += sign * result.preference
    return [Standing(met, balance) for met, balance in zip(met_G, balance_G, strict=True)]
