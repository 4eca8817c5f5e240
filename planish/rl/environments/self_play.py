"""Players of one game that are all the policy: each an environment of the same group, played in a
task of its own.

A player waits inside `step` until the others have moved, so that prompts, tokens and rewards of
each player are an ordinary trajectory. What can go wrong is that one waits for ever:

* A player's episode may end in the midst of the game, by an answer that is cut off or malformed.
  `PlayerEnv` looks at each result and tells the game of it (`Player.forfeit`).
* A rollout may fail or be cancelled between two steps, where no environment notices. The group's
  builder must have `plays_together = True`: then all of its rollouts end together, and a strategy
  that retries plays a new game.
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
    """Whose turn it is, among players 0 .. players - 1; first that of player 0."""

    def __init__(self, players: int) -> None:
        self._may_go = [asyncio.Event() for _ in range(players)]
        self._may_go[0].set()

    async def wait(self, player: int) -> None:
        """Until it is the player's turn, or the game is over."""
        await self._may_go[player].wait()

    def give(self, player: int) -> None:
        for number, may_go in enumerate(self._may_go):
            if number == player:
                may_go.set()
            else:
                may_go.clear()

    def end(self) -> None:
        """The game is over; nobody waits any more."""
        for may_go in self._may_go:
            may_go.set()


class Player(MessageEnv):
    """One player's side of a game."""

    @abstractmethod
    async def until_turn(self) -> None:
        """Until the player is to move, or the game is over."""

    @abstractmethod
    def result(self) -> float | None:
        """The player's reward; None while the game goes on."""

    @abstractmethod
    def forfeit(self) -> None:
        """The player leaves. Nothing happens if the game is over."""


class PlayerEnv(Env):
    """A player over tokens. An answer that is cut off or malformed forfeits the game, at
    `forfeit_reward`.
    """

    def __init__(self, renderer: Renderer, player: Player, forfeit_reward: float = -1.0) -> None:
        self.player = player
        self._tokens = EnvFromMessageEnv(
            renderer,
            player,
            failed_parse_reward=forfeit_reward,
            context_overflow_reward=forfeit_reward,
        )

    async def initial_observation(
        self,
    ) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        """The first prompt; no prompt, but the reward, if the game ended before the player's first
        turn.
        """
        await self.player.until_turn()
        result = self.player.result()
        return (
            await self._tokens.initial_observation()
            if result is None
            else InitialObservationOverflow(result)
        )

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        result = await self._tokens.step(action, extra=extra)
        if result.episode_done:
            self.player.forfeit()
        return result
