"""The board of tic-tac-toe, and two players for evaluation, a random one and an optimal one.

Cells are 1 to 9, row by row. Player 0 is X and begins, player 1 is O.
"""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

CELLS = range(1, 10)
LINES = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 4, 7), (2, 5, 8), (3, 6, 9), (1, 5, 9), (3, 5, 7))


@dataclass(frozen=True)
class Board:
    """A position of the game."""

    moves: tuple[int, ...] = ()
    """The cells of all moves in order; X and O alternate."""

    @property
    def to_move(self) -> int:
        """The player whose turn it is."""
        return len(self.moves) % 2

    @property
    def free_cells(self) -> list[int]:
        """The free cells."""
        return [cell for cell in CELLS if cell not in self.moves]

    def cells_of_player(self, player: int) -> list[int]:
        """Return the cells of a player."""
        return sorted(self.moves[player::2])

    def after(self, cell: int) -> Self:
        """Return the board after a move to a free cell."""
        assert cell in self.free_cells
        return replace(self, moves=(*self.moves, cell))

    @property
    def winner(self) -> int | None:
        """The player with three cells in a line; None if there is none."""
        # Only the player who moved last can have completed a line.
        last_player = 1 - self.to_move
        cells = self.cells_of_player(last_player)
        return last_player if any(all(cell in cells for cell in line) for line in LINES) else None

    @property
    def is_over(self) -> bool:
        """Whether a player has won or no cell is free."""
        return self.winner is not None or len(self.moves) == 9


def random_move(board: Board, rng: random.Random) -> int:
    """Return a random free cell."""
    return rng.choice(board.free_cells)


def optimal_move(board: Board, rng: random.Random) -> int:
    """Return a random one of the best moves."""
    optimal_values = {
        cell: -optimal_value(*cells_by_player(board.after(cell))) for cell in board.free_cells
    }
    best = max(optimal_values.values())
    return rng.choice([cell for cell in board.free_cells if optimal_values[cell] == best])


MOVE_FUNCTIONS = {"random": random_move, "optimal": optimal_move}


def cells_by_player(board: Board) -> tuple[frozenset[int], frozenset[int]]:
    """Return the cells of the player whose turn it is, and those of the other player."""
    return frozenset(board.cells_of_player(board.to_move)), frozenset(
        board.cells_of_player(1 - board.to_move)
    )


@cache
def optimal_value(own: frozenset[int], others: frozenset[int]) -> int:
    """Return the value of a position for the player whose turn it is, if both play optimally: 1 for
    a win, 0 for a draw, -1 for a loss.
    """
    if any(others.issuperset(line) for line in LINES):
        return -1
    free_cells = [cell for cell in CELLS if cell not in own and cell not in others]
    return max((-optimal_value(others, own | {cell}) for cell in free_cells), default=0)
