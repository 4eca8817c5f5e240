import asyncio
import pickle
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_policy import ScriptedPolicy, is_one_sequence, made, play
from virtual_time import run_in_virtual_time

from planish.completers import TokenCompleter
from planish.errors import UserError
from planish.recipes import tic_tac_toe
from planish.recipes.tic_tac_toe import (
    Options,
    TicTacToeDatasetBuilder,
    TicTacToeGroup,
    few_shot_messages,
    read_cell,
)
from planish.recipes.tic_tac_toe_board import Board
from planish.renderers import get_text_content
from planish.rl.environments.self_play import Turns
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.rollout.strategy import MinViableGroup, RetryOnFailure

X_WINS = "1 4 2 5 3"
O_WINS = "1 4 2 5 9 6"
DRAW = "1 2 3 5 4 6 8 7 9"


def moves(game):
    """Return a policy of both players that plays a given game. Its move depends only on the
    position.
    """
    said = game.split()

    def answer(told):
        taken, _, _ = told.partition("\n")
        return said[len(re.findall(r"\d", taken))]

    return answer


def self_play(model, game):
    policy = ScriptedPolicy(model, moves(game))
    return play(TicTacToeGroup(model, None), policy), policy


@pytest.mark.parametrize(
    ("game", "rewards", "forfeits", "turns"),
    [
        (X_WINS, [1, -1], [0, 0], [3, 2]),
        (O_WINS, [-1, 1], [0, 0], [3, 3]),
        (DRAW, [0, 0], [0, 0], [5, 4]),
        ("1 1", [1, -1], [0, 1], [1, 1]),
        ("1 2 3 ten", [1, -1], [0, 1], [2, 2]),
        ("1 2 0", [-1, 1], [1, 0], [2, 1]),
        ("1 2 I...", [-1, 1], [1, 0], [2, 1]),
        ("1 hm...", [1, -1], [0, 1], [1, 1]),
    ],
)
def test_rewards_of_both_players(small_model, game, rewards, forfeits, turns):
    group, _ = self_play(small_model, game)
    assert group.get_total_rewards() == rewards
    assert [metrics["forfeit"] for metrics in group.metrics_G] == forfeits
    assert [metrics["win"] - metrics["loss"] for metrics in group.metrics_G] == rewards
    assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == turns
    assert all(is_one_sequence(trajectory) for trajectory in group.trajectories_G)


@pytest.mark.parametrize("game", ["nothing", "11", "well..."])
def test_a_game_that_is_lost_by_the_first_move(small_model, game):
    group, _ = self_play(small_model, game)
    assert group.get_total_rewards() == [-1, 1]
    [turn] = group.trajectories_G[1].transitions
    assert turn.ac.tokens == [], "O had nothing to say, and is not trained"


def test_each_player_sees_the_moves_of_the_other(small_model):
    _, policy = self_play(small_model, O_WINS)
    assert policy.asked == [
        "X O\nChoose one of 1 2 3 4 5 6 7 8 9.",
        "X1 O\nChoose one of 2 3 4 5 6 7 8 9.",
        "X1 O4\nChoose one of 2 3 5 6 7 8 9.",
        "X12 O4\nChoose one of 3 5 6 7 8 9.",
        "X12 O45\nChoose one of 3 6 7 8 9.",
        "X129 O45\nChoose one of 3 6 7 8.",
    ]


class Broken(Exception):
    pass


@dataclass
class Failing(TokenCompleter):
    """A policy that plays a game and fails at some calls."""

    model: str
    game: str
    fails_at: set[int]
    hangs: bool = False
    calls: int = 0
    cancelled: int = 0
    policy: Any = field(init=False)

    def __post_init__(self):
        self.policy = ScriptedPolicy(self.model, moves(self.game))

    async def __call__(self, model_input, stop, *, max_tokens=None):
        call = self.calls
        self.calls += 1
        if call in self.fails_at:
            if not self.hangs:
                raise Broken
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return await self.policy(model_input, stop, max_tokens=max_tokens)


def within_seconds(work) -> Any:
    async def bounded():
        async with asyncio.timeout(20):
            return await work

    return run_in_virtual_time(bounded())


@pytest.mark.parametrize("call", range(5))
def test_a_player_that_fails_ends_the_game_for_both(small_model, call):
    group = TicTacToeGroup(small_model, None)
    with pytest.raises(Broken):
        within_seconds(do_group_rollout(group, Failing(small_model, X_WINS, {call})))


@pytest.mark.parametrize("call", range(5))
def test_a_game_whose_player_failed_is_played_again_from_its_beginning(small_model, call):
    policy = Failing(small_model, X_WINS, {call})
    group = within_seconds(
        do_group_rollout(TicTacToeGroup(small_model, None), policy, RetryOnFailure())
    )
    assert group.get_total_rewards() == [1, -1]
    assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == [3, 2]
    assert policy.calls == call + 1 + 5
    assert [error.error_type for error in group.rollout_errors] == ["Broken"]


def test_a_game_that_keeps_failing_is_dropped(small_model):
    policy = Failing(small_model, X_WINS, set(range(100)))
    strategy = MinViableGroup(min_successful=1, max_retries=2)
    assert (
        within_seconds(do_group_rollout(TicTacToeGroup(small_model, None), policy, strategy))
        is None
    )
    assert policy.calls == 3


def test_a_player_that_hangs_is_cut_off_with_its_game(small_model):
    policy = Failing(small_model, X_WINS, {2}, hangs=True)
    strategy = RetryOnFailure(max_retries=1, per_rollout_timeout=0.3)
    group = within_seconds(do_group_rollout(TicTacToeGroup(small_model, None), policy, strategy))
    assert policy.cancelled == 1
    assert group.get_total_rewards() == [1, -1]


def test_a_game_can_be_cancelled(small_model):
    policy = Failing(small_model, X_WINS, {3}, hangs=True)

    async def cancelled():
        task = asyncio.create_task(do_group_rollout(TicTacToeGroup(small_model, None), policy))
        while policy.calls < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(0)
        return others

    assert not within_seconds(cancelled())
    assert policy.cancelled == 1


@pytest.mark.parametrize(("number", "turns"), [(0, (3, 5)), (1, (3, 4))])
def test_games_against_an_optimal_player_are_not_won(small_model, number, turns):
    """The policy takes the first free cell, as X in games of an even number and as O in the
    others.
    """
    group = TicTacToeGroup(small_model, None, (), "optimal", number)
    policy = ScriptedPolicy(small_model, lambda told: re.findall(r"one of (\d)", told)[0])
    rollout = play(group, policy)
    assert len(rollout.trajectories_G) == 1
    assert rollout.get_total_rewards()[0] <= 0
    assert turns[0] <= len(rollout.trajectories_G[0].transitions) <= turns[1]
    assert ("X O\n" in policy.asked[0]) == (number == 0)
    again = play(group, ScriptedPolicy(small_model, policy.answer))
    assert again.trajectories_G[0].final_ob == rollout.trajectories_G[0].final_ob


def test_a_test_game_that_is_forfeited(small_model):
    group = play(
        TicTacToeGroup(small_model, None, (), "random", 1),
        ScriptedPolicy(small_model, lambda _: "0"),
    )
    assert group.get_total_rewards() == [-1]
    assert group.metrics_G[0]["forfeit"] == 1


def test_evaluations_have_separate_metrics_per_tag(small_model):
    train, test = made(TicTacToeDatasetBuilder(model_name=small_model, batch_size=3, test_games=4))
    assert [group.logging_tags() for group in train.get_batch(0)] == [["self_play"]] * 3
    tags = [tag for group in test.get_batch(0) for tag in group.logging_tags()]
    assert tags == ["vs_random"] * 4 + ["vs_optimal"] * 4


def test_games_of_training_begin_at_random_positions(small_model):
    train, test = made(TicTacToeDatasetBuilder(model_name=small_model, opening_moves=4))
    batch = train.get_batch(9)
    assert pickle.loads(pickle.dumps(batch)) == batch == train.get_batch(9) != train.get_batch(8)
    openings = [group.opening for index in range(20) for group in train.get_batch(index)]
    assert {len(opening) for opening in openings} == {0, 1, 2, 3, 4}
    assert len(set(openings)) > 200
    assert not any(Board(opening).is_over for opening in openings)
    assert {group.opening for group in test.get_batch(0)} == {()}


def test_a_game_continues_from_its_opening(small_model):
    policy = ScriptedPolicy(small_model, moves(X_WINS))
    group = play(TicTacToeGroup(small_model, None, (1, 4, 2)), policy)
    assert policy.asked[0] == "X12 O4\nChoose one of 3 5 6 7 8 9."
    assert group.get_total_rewards() == [1, -1]
    assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == [1, 1]


@pytest.mark.parametrize(
    ("text", "cell"), [("5", 5), (" 5. ", 5), ("5 7", None), ("12", None), ("x", None), ("٣", None)]
)
def test_reading_a_move(text, cell):
    assert read_cell(text) == cell


def test_the_shown_game_is_won():
    said = [
        int(get_text_content(message))
        for message in few_shot_messages()
        if message["role"] == "assistant"
    ]
    assert len(said) == 4
    assert get_text_content(few_shot_messages()[-2]).startswith("X145 O269")


def test_nobody_waits_when_a_game_is_over():
    async def wait():
        turns = Turns(3)
        waiting = [asyncio.create_task(turns.wait(player)) for player in range(3)]
        await asyncio.sleep(0)
        turns.give(2)
        await asyncio.sleep(0)
        moved = [task.done() for task in waiting]
        turns.end()
        await asyncio.gather(*waiting)
        return moved

    assert asyncio.run(wait()) == [True, False, True]


@pytest.mark.parametrize(
    ("option", "value"), [("batch_size", 0), ("test_games", -1), ("opening_moves", 5)]
)
def test_options_that_cannot_be_right(option, value):
    with pytest.raises(UserError, match=f"{option}={value}"):
        tic_tac_toe.main(Options(**{option: value}))
