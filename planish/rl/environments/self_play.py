"""Self-play: the policy is every player of a game. Each player is an environment of the same group,
rolled out in its own task.

A player waits inside `step` until the others have moved, so the prompts, tokens and rewards of each
player form an ordinary trajectory. Two events must not leave a player waiting forever:

* A player's episode can end during the game, by an answer that is cut off or malformed. `PlayerEnv`
  then forfeits the game (`Player.forfeit`).
* A rollout can fail or be cancelled between two steps. No environment notices this. So the group's
  builder must have `plays_together = True`: all of its rollouts then end together, and a retry
  starts a new game.
"""

import asyncio
from abc import abstractmethod

from planish.completers import StopCondition
from planish.renderers import Renderer
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv
from planish.rl.types import (
    Action,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Observation,
    StepResult,
)


class Turns:
    """Tracks which player may move. The players are 0 to `players` - 1, and player 0 begins."""

    def __init__(self, players: int) -> None:
        self._may_move = [asyncio.Event() for _ in range(players)]
        self._may_move[0].set()

    async def wait(self, player: int) -> None:
        """Wait until it is the player's turn, or the game is over."""
        await self._may_move[player].wait()

    def give(self, player: int) -> None:
        """Let `player` move next."""
        for number, may_move in enumerate(self._may_move):
            if number == player:
                may_move.set()
            else:
                may_move.clear()

    def end(self) -> None:
        """End the game: all players stop waiting."""
        for may_move in self._may_move:
            may_move.set()


class Player(MessageEnv):
    """One player of a game."""

    @abstractmethod
    async def until_turn(self) -> None:
        """Wait until it is the player's turn, or the game is over."""

    @abstractmethod
    def result(self) -> float | None:
        """Return the player's reward; None while the game is not over."""

    @abstractmethod
    def forfeit(self) -> None:
        """End the game as a loss for the player. It must do nothing if the game is over."""


class PlayerEnv(Env):
    """The environment of a player. An answer that is cut off or malformed forfeits the game and
    gets `forfeit_reward`.
    """

    def __init__(self, renderer: Renderer, player: Player, forfeit_reward: float = -1.0) -> None:
        self.player = player
        self._token_env = EnvFromMessageEnv(
            renderer,
            player,
            failed_parse_reward=forfeit_reward,
            context_overflow_reward=forfeit_reward,
        )

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """Wait for the player's first turn and return its prompt. If the game ended
        before that turn, return the reward in an InitialObservationOverflow, the result of an
        episode in which nothing is sampled.
        """
        await self.player.until_turn()
        result = self.player.result()
        if result is not None:
            return InitialObservationOverflow(result)
        return await self._token_env.initial_observation()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Apply the player's answer. If the episode ends before the game is over, the player
        forfeits the game.
        """
        result = await self._token_env.step(action, extra=extra)
        if result.episode_done:
            self.player.forfeit()
        return result
