"""The process that plays groups, as seen from inside: environments here, the policy in the process
that trains.

It lives as long as its socket. When the other end says that nothing more will come, or is gone,
every group is cancelled, its builder cleans up, and the process ends. If the other process is gone
and that takes longer than GRACE_SECONDS, say because an environment computes without end, the
process is ended from a thread.

Ctrl-C and SIGTERM are for the process that trains, which then closes the socket; here they do
nothing. Processes that environments start get them as usual.
"""

import asyncio
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from planish import logtree
from planish.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from planish.errors import UserError
from planish.rl.rollout.processes.messages import (
    GRACE_SECONDS,
    Abandon,
    Cancel,
    Done,
    Failed,
    Outcome,
    PackedError,
    Play,
    Ready,
    Sample,
    Sampled,
    SampleFailed,
    Task,
    Wire,
)
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.types import RolloutError
from planish.types import ModelInput


def main(end: socket.socket) -> None:
    """Serve the other end until it closes."""
    # not SIG_IGN, which programs started here would inherit
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(serve(end))


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


async def serve(end: socket.socket) -> None:
    player = Player(await Wire.over(end))
    await player.serve()


@dataclass(frozen=True)
class RemotePolicy(TokenCompleter):
    """The policy of a group, which is called in the process that trains."""

    player: "Player"
    group: int
    number: int = 0
    seeds: tuple[int, ...] = ()

    def seeded(self, seed: int) -> "RemotePolicy":
        return replace(self, number=next(self.player.numbers), seeds=(*self.seeds, seed))

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        call = next(self.player.numbers)
        return await self.player.sample(
            Sample(self.group, call, self.number, self.seeds, model_input, stop, max_tokens)
        )


@dataclass
class Player:
    """All groups of this process."""

    wire: Wire
    numbers: Any = field(default_factory=lambda: count(1))
    """Of policies and calls."""
    groups: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    waiting: dict[int, asyncio.Future[TokensWithLogprobs]] = field(default_factory=dict)
    """Calls of the policy that are not answered."""

    async def serve(self) -> None:
        await self.wire.send(Ready())
        async with asyncio.TaskGroup() as tasks:
            while (message := await self.wire.receive()) is not None:
                match message:
                    case Play(group):
                        self.groups[group] = tasks.create_task(self.play(message))
                    case Cancel(group) if group in self.groups:
                        self.groups[group].cancel()
                    case Sampled(call, answer) if (waiting := self.waits(call)) is not None:
                        waiting.set_result(answer)
                    case SampleFailed(call, error) if (waiting := self.waits(call)) is not None:
                        waiting.set_exception(error.unpacked())
            for group in self.groups.values():
                group.cancel()
        await self.wire.close()

    def waits(self, call: int) -> asyncio.Future[TokensWithLogprobs] | None:
        """Whoever still waits for the answer to a call."""
        waiting = self.waiting.pop(call, None)
        return None if waiting is None or waiting.cancelled() else waiting

    async def play(self, play: Play) -> None:
        """Play a group and send what came of it."""
        try:
            outcome = await self.outcome(unpickled(play), play)
            await self.wire.send(Done(play.group, pickled(outcome, play)))
        except asyncio.CancelledError as error:
            # by the other end, which then ignores this, or by the environment
            self.wire.post(Failed(play.group, PackedError.of(error)))
            raise
        except Exception as error:
            await self.wire.send(Failed(play.group, PackedError.of(error)))
        finally:
            del self.groups[play.group]

    async def outcome(self, task: Task, play: Play) -> Outcome:
        policy = RemotePolicy(self, play.group)
        listening = (
            logtree.capture(play.builder_name) if play.is_logged else logtree.scope_disable()
        )
        failures: list[RolloutError] = []
        with listening as tree:
            group = await do_group_rollout(
                task.builder,
                policy,
                task.strategy,
                task.termination,
                seed=play.seed,
                failures=failures,
            )
        if tree is None:
            return Outcome(group, failures, [])
        _, body = tree.children
        assert isinstance(body, logtree.Node)
        return Outcome(group, failures, body.children)

    async def sample(self, request: Sample) -> TokensWithLogprobs:
        answer = self.waiting[request.call] = asyncio.get_running_loop().create_future()
        try:
            await self.wire.send(request)
            return await answer
        finally:
            if self.waiting.pop(request.call, None) is not None:
                self.wire.post(Abandon(request.group, request.call))


def unpickled(play: Play) -> Task:
    try:
        return pickle.loads(play.task)
    except Exception as error:
        raise UserError(
            f"{play.builder_name} cannot be made in a rollout process: {type(error).__name__}: {error}; define it, and what "
            "it holds, in a module that can be imported, not in a notebook or under `if __name__ == '__main__':`"
        ) from error


def pickled(outcome: Outcome, play: Play) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        raise UserError(
            f"what {play.builder_name} gave cannot be sent back from its process: {type(error).__name__}: {error}; metrics and "
            "logs are to hold numbers and text"
        ) from error
