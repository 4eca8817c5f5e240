"""A process that plays groups, as seen from the one that trains: it is started, talked to, watched,
and ended.

Every group that is under way ends: with what came of it, or, if the process dies, with
ProcessDiedError. The end of the process is seen by a thread that waits for it, since its socket may
live on in processes that environments have forked.
"""

import asyncio
import atexit
import multiprocessing
import pickle
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from typing import Any, Self

from planish.completers import TokenCompleter
from planish.errors import UserError
from planish.processes.interruption import interrupts_held_back, run_uncancelled
from planish.rl.rollout.group_rollout import first_of_group
from planish.rl.rollout.processes import worker
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
    RolloutProcessError,
    Sample,
    Sampled,
    SampleFailed,
    Wire,
)
from planish.rl.rollout.rollouts import OnTurn

DRAIN_SECONDS = 2.0


class ProcessDiedError(RolloutProcessError):
    """A process that plays groups ended while it played."""


@dataclass(frozen=True)
class Ended:
    """In a group's inbox: nothing more will come, for this reason."""

    reason: Exception


class RolloutProcess:
    """One process and the groups it plays."""

    def __init__(self, process: SpawnProcess, wire: Wire) -> None:
        self._process = process
        self._wire = wire
        self._inboxes: dict[int, asyncio.Queue[Any]] = {}
        self._is_ready = False
        self._exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._attending = asyncio.create_task(self._attend())
        threading.Thread(
            target=self._watch, args=(asyncio.get_running_loop(),), daemon=True
        ).start()

    @classmethod
    async def start(cls) -> Self:
        here, there = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(target=worker.main, args=(there,))
        with interrupts_held_back(), there:
            process.start()
        # Not a daemon, which could not start processes of its own; so it must be gone before the
        # interpreter waits for it.
        atexit.register(process.kill)
        return cls(process, await Wire.over(here))

    @property
    def has_ended(self) -> bool:
        return self._attending.done()

    @property
    def groups(self) -> int:
        """How many groups it plays."""
        return len(self._inboxes)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def play(self, play: Play, policy: TokenCompleter, on_turn: OnTurn | None) -> Outcome:
        """Play a group, and answer its calls of the policy meanwhile."""
        assert not self.has_ended
        inbox = self._inboxes[play.group] = asyncio.Queue()
        try:
            await self._wire.send(play)
            with first_of_group():
                async with asyncio.TaskGroup() as tasks:
                    last = await Conversation(
                        self._wire, inbox, tasks, {0: policy}, on_turn
                    ).to_the_end()
        finally:
            del self._inboxes[play.group]
            self._wire.post(Cancel(play.group))  # nothing happens if it is done
        match last:
            case Done(_, outcome):
                return pickle.loads(outcome)
            case Failed(_, error):
                raise error.unpacked()
            case Ended(reason):
                raise reason

    async def close(self) -> None:
        """Let the groups clean up and the process end; kill it if that takes too long, or if this
        is cancelled.
        """
        self._wire.end()
        try:
            await asyncio.wait([self._exited], timeout=GRACE_SECONDS)
        finally:
            if not self._exited.done():
                self._process.kill()
            await run_uncancelled(self._release())

    async def _release(self) -> None:
        await self._attending
        await self._wire.close()
        atexit.unregister(self._process.kill)
        self._process.close()

    async def _attend(self) -> None:
        """Hand messages to their groups as long as the process lives, then tell all groups."""
        listening = asyncio.create_task(self._listen())
        await asyncio.wait([listening, self._exited], return_when=asyncio.FIRST_COMPLETED)
        if self._exited.done():
            await asyncio.wait([listening], timeout=DRAIN_SECONDS)
            listening.cancel()
        else:
            await asyncio.wait([self._exited], timeout=GRACE_SECONDS)
            self._process.kill()
        exit_code = await self._exited
        for inbox in self._inboxes.values():
            inbox.put_nowait(Ended(self._reason(exit_code)))

    async def _listen(self) -> None:
        while (message := await self._wire.receive()) is not None:
            if isinstance(message, Ready):
                self._is_ready = True
            elif message.group in self._inboxes:
                self._inboxes[message.group].put_nowait(message)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.join()
        code = self._process.exitcode
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._exited.set_result, code)

    def _reason(self, exit_code: int | None) -> Exception:
        if not self._is_ready:
            return UserError(
                f"a rollout process ended before it could play ({described(exit_code)}); its output says why. A script that "
                "uses such processes is imported by each of them: its work must begin under `if __name__ == '__main__':`"
            )
        return ProcessDiedError(
            f"the rollout process {self.pid} ended while it played ({described(exit_code)}), and its groups with it"
        )


@dataclass
class Conversation:
    """What is said about one group, until it ends."""

    wire: Wire
    inbox: asyncio.Queue[Any]
    tasks: asyncio.TaskGroup
    policies: dict[int, TokenCompleter]
    on_turn: OnTurn | None
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    async def to_the_end(self) -> Done | Failed | Ended:
        while True:
            match await self.inbox.get():
                case Sample() as request:
                    self.calls[request.call] = self.tasks.create_task(self.answer(request))
                case Abandon(_, call) if call in self.calls:
                    self.calls[call].cancel()
                case Done() | Failed() | Ended() as last:
                    for call in self.calls.values():
                        call.cancel()
                    return last

    async def answer(self, request: Sample) -> None:
        bound = {} if request.max_tokens is None else {"max_tokens": request.max_tokens}
        try:
            answer = await self.policy_of(request)(request.model_input, request.stop, **bound)
        except asyncio.CancelledError as error:
            # by the other side, which then ignores this, or within the policy
            self.wire.post(SampleFailed(request.call, PackedError.of(error)))
            raise
        except Exception as error:
            await self.wire.send(SampleFailed(request.call, PackedError.of(error)))
        else:
            if self.on_turn is not None:
                self.on_turn(answer)
            await self.wire.send(Sampled(request.call, answer))
        finally:
            del self.calls[request.call]

    def policy_of(self, request: Sample) -> TokenCompleter:
        """The policy that a call is for; one object for all calls of a seeded one, since it counts
        them.
        """
        if request.policy not in self.policies:
            policy = self.policies[0]
            for seed in request.seeds:
                policy = policy.seeded(seed)
            self.policies[request.policy] = policy
        return self.policies[request.policy]


def described(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"{name}, perhaps for lack of memory" if name == "SIGKILL" else name
