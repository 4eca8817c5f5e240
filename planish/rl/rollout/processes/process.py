"""A rollout worker as seen from the training process: start, calls, supervision, end.

If a worker dies, its calls raise ProcessDiedError, or UserError if it had not started yet. A thread
waits for the exit of the process. The socket is no reliable sign of the exit, since processes that
environments forked can keep it open.
"""

import asyncio
import pickle
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, Self

from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.errors import UserError
from planish.processes.interruption import run_uncancelled
from planish.rl.rollout.processes.peer import GRACE_SECONDS, Call, Peer, RolloutProcessError
from planish.rl.rollout.processes.worker import RolloutRequest, RolloutResult, SampleRequest
from planish.rl.rollout.rollouts import OnTurn

DRAIN_SECONDS = 2.0
"""Maximum seconds to read the last messages of a dead worker from its socket."""


class ProcessDiedError(RolloutProcessError):
    """A rollout worker died while it rolled out groups."""


class NoRoomError(UserError):
    """A rollout worker cannot be started, because nothing is left that it could run on."""


class Worker(Protocol):
    """The process of a rollout worker, on this machine (local_worker.py) or on a Ray cluster
    (ray_worker.py).
    """

    start_remedy: str
    """What to look at if the process ends before it is ready."""

    @property
    def pid(self) -> int | None:
        """Process id, if it is known."""
        ...

    def wait(self) -> str:
        """Wait until the process has ended. Return how it ended, in words."""
        ...

    def kill(self) -> None:
        """End the process at once."""

    def close(self) -> None:
        """Free what belongs to a process that has ended."""


StartWorker = Callable[[socket.socket], Awaitable[Worker]]
"""Starts a worker that serves this end of a socket pair (see worker.py). It closes the end here."""


class RolloutProcess:
    """One worker and the groups that it rolls out."""

    def __init__(self, worker: Worker, peer: Peer) -> None:
        self._worker = worker
        self._peer = peer
        self._exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._supervising = asyncio.create_task(self._supervise())
        threading.Thread(
            target=self._watch, args=(asyncio.get_running_loop(),), daemon=True
        ).start()

    @classmethod
    async def start(cls, start_worker: StartWorker) -> Self:
        """Start a worker and return without waiting for it. Calls can be sent at once; they wait
        until the worker has started.
        """
        parent_socket, worker_socket = socket.socketpair()
        try:
            worker = await start_worker(worker_socket)
        except BaseException:
            parent_socket.close()
            raise
        return cls(worker, await Peer.from_socket(parent_socket))

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone and its last messages are read."""
        return self._supervising.done()

    @property
    def groups(self) -> int:
        """Number of groups in progress."""
        return self._peer.calls

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._worker.pid

    async def run(
        self, request: RolloutRequest, policy: TokenCompleter, on_turn: OnTurn | None
    ) -> RolloutResult:
        """Return the result of a group. Meanwhile, call `policy` here whenever the worker asks for
        samples.
        """
        assert not self.has_ended
        policies = {0: policy}

        async def answer(call: Call) -> TokensWithLogprobs:
            sample: SampleRequest = call.request
            # A seeded policy derives the seed of each call from the number of its calls so far, so
            # keep one object for all calls.
            if sample.policy not in policies:
                seeded_policy = policy
                for seed in sample.seeds:
                    seeded_policy = seeded_policy.seeded(seed)
                policies[sample.policy] = seeded_policy
            limits = {} if sample.max_tokens is None else {"max_tokens": sample.max_tokens}
            tokens = await policies[sample.policy](sample.model_input, sample.stop, **limits)
            if on_turn is not None:
                on_turn(tokens)
            return tokens

        return pickle.loads(await self._peer.call(request, answer=answer))

    async def close(self) -> None:
        """Let the groups clean up and the worker end. Kill it if that takes longer than
        GRACE_SECONDS, or if this call is cancelled.
        """
        self._peer.end()
        try:
            await asyncio.wait([self._exited], timeout=GRACE_SECONDS)
        finally:
            if not self._exited.done():
                self._worker.kill()
            await run_uncancelled(self._release())

    async def _release(self) -> None:
        await self._supervising
        await self._peer.close()
        self._worker.close()

    async def _supervise(self) -> None:
        """Receive messages until the worker has ended, then fail the calls in progress. A worker
        that closes its socket and does not exit is killed after GRACE_SECONDS.
        """
        listening = asyncio.create_task(self._peer.listen())
        await asyncio.wait([listening, self._exited], return_when=asyncio.FIRST_COMPLETED)
        if self._exited.done():
            await asyncio.wait([listening], timeout=DRAIN_SECONDS)
            listening.cancel()
        else:
            await asyncio.wait([self._exited], timeout=GRACE_SECONDS)
            self._worker.kill()
        self._peer.fail_calls(self._reason(await self._exited))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        how = self._worker.wait()
        with suppress(RuntimeError):  # the loop is closed, so no task waits for the end
            loop.call_soon_threadsafe(self._exited.set_result, how)

    def _reason(self, how: str) -> Exception:
        if not self._peer.is_other_ready:
            return UserError(
                f"a rollout process ended before it was ready ({how}); {self._worker.start_remedy}"
            )
        return ProcessDiedError(
            f"the rollout process {self.pid} ended during its rollouts ({how}), so its groups "
            "failed"
        )
