"""Tic-tac-toe by self-play: the policy plays both sides and learns from both.

    python -m planish.recipes.tic_tac_toe                       the embedded model
    python -m planish.recipes.tic_tac_toe preset=long           more games per step, and more steps

A group is one game with two trajectories, one for each player. Their rewards are

    1 for the winner, -1 for the loser, 0 for both in a draw; an illegal or unreadable move loses

The mean reward is 0, so the advantage of a player is its reward. The opponent improves as the
policy does. With self-play alone, the policy soon plays the same game again and again and learns
nothing more. So a training game begins after up to `opening_moves` random moves.

The test has games against two players that do not change, a random one and an optimal one. These
games begin with an empty board, and the policy is X in half of them. Their metrics are
test/env/vs_random/... and test/env/vs_optimal/....
"""

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.rl_options import RLOptions, run
from planish.recipes.tic_tac_toe_board import MOVE_FUNCTIONS, Board, random_move
from planish.renderers import Message, get_text_content
from planish.rl.environments.datasets import GeneratedDataset, evaluation_dataset
from planish.rl.environments.message_env import MessageStepResult
from planish.rl.environments.self_play import Player, PlayerEnv, Turns
from planish.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, RLDatasetBuilder, Trajectory
from planish.runlog.model_renderer import model_renderer
from planish.training.option_rules import at_least, between, check_fields, zero_for

MAX_OPENING_MOVES = 4
"""Limit of `opening_moves`. No player can win in four moves, so no game is over at its start."""
EXAMPLE_GAME = (5, 2, 1, 9, 4, 6, 7)
PRESETS: dict[str, dict[str, Any]] = {
    "long": {"batch_size": 128, "opening_moves": 4, "max_steps": 200},
}


@dataclass
class Game:
    """One game with its board and turns. Both players share it."""

    board: Board = field(default_factory=Board)
    forfeited_by: int | None = None

    def __post_init__(self) -> None:
        self.turns = Turns(2)
        self.turns.give(self.board.to_move)

    @property
    def is_over(self) -> bool:
        """Whether the game has ended, by forfeit or on the board."""
        return self.forfeited_by is not None or self.board.is_over

    def result(self, player: int) -> float | None:
        """Return the player's reward; None while the game is not over."""
        if not self.is_over:
            return None
        winner = self.board.winner if self.forfeited_by is None else 1 - self.forfeited_by
        if winner is None:
            return 0.0
        return 1.0 if winner == player else -1.0

    def move(self, cell: int) -> None:
        """Mark a free cell for the player whose turn it is."""
        self.board = self.board.after(cell)
        if self.is_over:
            self.turns.end()
        else:
            self.turns.give(self.board.to_move)

    def forfeit(self, player: int) -> None:
        """End the game as a loss for `player`. Does nothing if the game is over."""
        if not self.is_over:
            self.forfeited_by = player
            self.turns.end()


@dataclass
class TicTacToePlayer(Player):
    """The policy as one player of a game."""

    game: Game
    player: int
    opponent: Callable[[Board], int] | None = None
    """Chooses the other player's moves; None if another environment of the group plays them."""
    messages: list[Message] = field(default_factory=list)

    async def until_turn(self) -> None:
        """Wait until it is the player's turn, or the game is over."""
        if self.opponent is None:
            await self.game.turns.wait(self.player)
        elif not self.game.is_over and self.game.board.to_move != self.player:
            self.game.move(self.opponent(self.game.board))

    def result(self) -> float | None:
        """Return 1 for a win, 0 for a draw, -1 for a loss; None while the game is not over."""
        return self.game.result(self.player)

    def forfeit(self) -> None:
        """End the game as a loss for the player. Does nothing if the game is over."""
        self.game.forfeit(self.player)

    async def initial_observation(self) -> list[Message]:
        """Return the example game and the position."""
        self.messages = [*few_shot_messages(), position_message(self.game.board)]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Make the player's move and wait for the opponent's. An illegal move forfeits the game."""
        cell = read_cell(get_text_content(message))
        if cell in self.game.board.free_cells:
            self.game.move(cell)
            await self.until_turn()
        else:
            self.forfeit()
        result = self.result()
        self.messages = [*self.messages, message, position_message(self.game.board)]
        return MessageStepResult(
            reward=result or 0.0,
            episode_done=result is not None,
            next_messages=self.messages,
            logs={"moves": " ".join(map(str, self.game.board.moves))},
        )


def read_cell(text: str) -> int | None:
    """Return the number in a text; None if the text has no one-digit number, or several numbers."""
    numbers = re.findall(r"[0-9]+", text)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) == 1 else None


def position_message(board: Board) -> Message:
    """Return the message with the cells of both players, as in "X15 O9", and the free cells."""
    marks = " ".join(
        name + "".join(map(str, board.cells_of_player(player))) for player, name in enumerate("XO")
    )
    return {
        "role": "user",
        "content": f"{marks}\nChoose one of {' '.join(map(str, board.free_cells))}.",
    }


def few_shot_messages() -> list[Message]:
    """Return an example game that X wins, as X sees it. Without it an untrained small model does
    not know what to write.
    """
    messages: list[Message] = []
    board = Board()
    for cell in EXAMPLE_GAME:
        if board.to_move == 0:
            messages += [position_message(board), {"role": "assistant", "content": str(cell)}]
        board = board.after(cell)
    return messages


@dataclass(frozen=True)
class TicTacToeGroup(EnvGroupBuilder):
    """One game of the policy against itself, or against one of `MOVE_FUNCTIONS`."""

    model_name: str
    renderer_name: str | None
    opening: tuple[int, ...] = ()
    """Moves before the players begin."""
    opponent: str | None = None
    number: int = 0
    """Number of the game against `opponent`. The policy is X in games with an even number."""

    plays_together = True

    async def make_envs(self) -> Sequence[Env]:
        """Return the environments of both players, or of one player against `opponent`."""
        game = Game(Board(self.opening))
        if self.opponent is None:
            players = [TicTacToePlayer(game, player) for player in (0, 1)]
        else:
            rng = random.Random(f"{self.opponent}:{self.number}")
            players = [
                TicTacToePlayer(
                    game, self.number % 2, partial(MOVE_FUNCTIONS[self.opponent], rng=rng)
                )
            ]
        renderer = model_renderer(self.model_name, self.renderer_name)
        return [PlayerEnv(renderer, player) for player in players]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Return no further reward, and how the game ended as metrics."""
        return [(0.0, outcome(player)) for player in map(player_of, env_group)]

    def logging_tags(self) -> list[str]:
        """Return the tag self_play or vs_OPPONENT."""
        return ["self_play" if self.opponent is None else f"vs_{self.opponent}"]


def player_of(env: Env) -> TicTacToePlayer:
    """Return the player of an environment of this game."""
    assert isinstance(env, PlayerEnv)
    assert isinstance(env.player, TicTacToePlayer)
    return env.player


def outcome(player: TicTacToePlayer) -> Metrics:
    """Return how a game ended for the player."""
    result = player.result()
    return {
        "win": float(result == 1),
        "draw": float(result == 0),
        "loss": float(result == -1),
        "forfeit": float(player.game.forfeited_by == player.player),
        "moves": len(player.game.board.moves),
    }


@chz.chz
class GameOptions:
    """How many games are played, and how they begin."""

    batch_size: int = chz.field(
        default=32, doc="games per step, each with two players", metadata=at_least(1)
    )
    opening_moves: int = chz.field(
        default=3,
        doc="maximum number of random moves before a training game",
        metadata=between(0, MAX_OPENING_MOVES),
    )
    test_games: int = chz.field(
        default=32,
        doc="number of test games against each opponent; 0 = no evaluation",
        metadata=zero_for("no evaluation"),
    )


@chz.chz
class TicTacToeDatasetBuilder(GameOptions, RLDatasetBuilder):
    """Games of the policy against itself, and test games against each of `MOVE_FUNCTIONS`."""

    model_name: str
    renderer_name: str | None = None
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test games, the latter is None."""
        train = GeneratedDataset(self._training_group, self.batch_size, self.seed)
        test_games = [
            (opponent, number) for opponent in MOVE_FUNCTIONS for number in range(self.test_games)
        ]
        return train, evaluation_dataset(test_games, self._test_group)

    def _training_group(self, rng: random.Random) -> TicTacToeGroup:
        board = Board()
        for _ in range(rng.randint(0, self.opening_moves)):
            board = board.after(random_move(board, rng))
        return TicTacToeGroup(self.model_name, self.renderer_name, board.moves)

    def _test_group(self, test_game: tuple[str, int]) -> TicTacToeGroup:
        return TicTacToeGroup(self.model_name, self.renderer_name, (), *test_game)


@chz.chz
class Options(GameOptions, RLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/tic_tac_toe"
    learning_rate: float = 1e-4
    max_tokens: int = 4
    max_steps: int | None = 40
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check_fields(options)
    builder = training_run.build(TicTacToeDatasetBuilder, options)
    return run(options, builder, recipe_name="tic_tac_toe", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
