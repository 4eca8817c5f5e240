import random
from functools import partial
from itertools import combinations

import pytest

from planish.recipes.tic_tac_toe_board import (
    LINES,
    Board,
    cells_by_player,
    optimal_move,
    optimal_value,
    random_move,
)


def play(*moves):
    board = Board()
    for cell in moves:
        board = board.after(cell)
    return board


def games(board, first, second):
    """Yield all ends of the game if one side moves by a function and the other in every possible
    way.
    """
    if board.is_over:
        yield board
        return
    chooser = (first, second)[board.to_move]
    for cell in board.free_cells if chooser is None else [chooser(board)]:
        yield from games(board.after(cell), first, second)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("player", [0, 1])
def test_every_line_wins(line, player):
    others = [cell for cell in range(1, 10) if cell not in line]
    harmless = next(three for three in combinations(others, 3) if three not in LINES)
    first, second = (line, harmless) if player == 0 else (harmless, line)
    moves = [cell for pair in zip(first, second, strict=True) for cell in pair][: 5 + player]
    assert play(*moves).winner == player
    assert play(*moves).is_over
    assert not play(*moves[:-1]).is_over


def test_a_full_board_without_a_line_is_a_draw():
    board = play(1, 2, 3, 5, 4, 6, 8, 7, 9)
    assert board.is_over
    assert board.winner is None
    assert board.free_cells == []
    assert not play(1, 2, 3, 5, 4, 6, 8, 7).is_over


def test_a_taken_cell_is_no_move():
    with pytest.raises(AssertionError):
        play(1, 1)


def test_the_game_is_a_draw_if_both_play_well():
    assert optimal_value(*cells_by_player(Board())) == 0
    for seed in range(20):
        optimal = partial(optimal_move, rng=random.Random(seed))
        assert [board.winner for board in games(Board(), optimal, optimal)] == [None]


@pytest.mark.parametrize("side", [0, 1])
def test_the_optimal_player_never_loses(side):
    optimal = partial(optimal_move, rng=random.Random(0))
    ends = list(games(Board(), *((optimal, None) if side == 0 else (None, optimal))))
    assert len(ends) > 50
    assert {board.winner for board in ends} == {None, side}


def test_the_random_player_takes_any_free_cell():
    board = play(1, 2, 3)
    assert {random_move(board, random.Random(seed)) for seed in range(100)} == set(board.free_cells)
