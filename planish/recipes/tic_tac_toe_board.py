"""Tic-tac-toe: the board, and two players to measure oneself against.

Cells are 1 to 9, row by row. Player 0 writes X and begins, player 1 writes O.
"""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

CELLS = range(1, 10)
LINES = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 4, 7), (2, 5, 8), (3, 6, 9), (1, 5, 9), (3, 5, 7))


@dataclass(frozen=True)
class Board:
    moves: tuple[int, ...] = ()
    """The cells that were taken, X and O in turn."""

    @property
    def to_move(self) -> int:
        return len(self.moves) % 2

    @property
    def free(self) -> list[int]:
        return [cell for cell in CELLS if cell not in self.moves]

    def cells_of(self, player: int) -> list[int]:
        return sorted(self.moves[player::2])

    def after(self, cell: int) -> Self:
        assert cell in self.free
        return replace(self, moves=(*self.moves, cell))

    @property
    def winner(self) -> int | None:
        """Only who moved last can have completed a line."""
        last = 1 - self.to_move
        cells = self.cells_of(last)
        return last if any(all(cell in cells for cell in line) for line in LINES) else None

    @property
    def is_over(self) -> bool:
        return self.winner is not None or len(self.moves) == 9


def random_move(board: Board, rng: random.Random) -> int:
    return rng.choice(board.free)


def optimal_move(board: Board, rng: random.Random) -> int:
    """One of the moves after which the game's value is best."""
    values = {cell: -value(*position(board.after(cell))) for cell in board.free}
    best = max(values.values())
    return rng.choice([cell for cell in board.free if values[cell] == best])


PLAYERS = {"random": random_move, "optimal": optimal_move}


def position(board: Board) -> tuple[frozenset[int], frozenset[int]]:
    """The cells of the player to move, and those of the other: all that matters for what follows."""
    return frozenset(board.cells_of(board.to_move)), frozenset(board.cells_of(1 - board.to_move))


@cache
def value(own: frozenset[int], others: frozenset[int]) -> int:
    """1, 0 or -1 for the player to move, if both play as well as one can."""
    if any(others.issuperset(line) for line in LINES):
        return -1
    free = [cell for cell in CELLS if cell not in own and cell not in others]
    return max((-value(others, own | {cell}) for cell in free), default=0)
