"""A rollout worker as seen from the training process: start, calls, supervision, end.

If a worker dies, its calls raise ProcessDiedError, or UserError if it had not started yet. A thread
waits for the exit of the process. The socket is no reliable sign of the exit, since processes that
environments forked can keep it open.
"""

import asyncio
import atexit
import multiprocessing
import pickle
import signal
import socket
import threading
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from typing import Self

from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.errors import UserError
from planish.processes.interruption import blocked_interrupts, run_uncancelled
from planish.rl.rollout.processes import worker
from planish.rl.rollout.processes.peer import GRACE_SECONDS, Call, Peer, RolloutProcessError
from planish.rl.rollout.processes.worker import RolloutRequest, RolloutResult, SampleRequest
from planish.rl.rollout.rollouts import OnTurn

DRAIN_SECONDS = 2.0
"""Maximum seconds to read the last messages of a dead worker from its socket."""


class ProcessDiedError(RolloutProcessError):
    """A rollout worker died while it rolled out groups."""


class RolloutProcess:
    """One worker and the groups that it rolls out."""

    def __init__(self, process: SpawnProcess, peer: Peer) -> None:
        self._process = process
        self._peer = peer
        self._exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._supervising = asyncio.create_task(self._supervise())
        threading.Thread(
            target=self._watch, args=(asyncio.get_running_loop(),), daemon=True
        ).start()

    @classmethod
    async def start(cls) -> Self:
        """Start a worker and return without waiting for it. Calls can be sent at once; they wait
        until the worker has started.
        """
        parent_socket, worker_socket = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(
            target=worker.main, args=(worker_socket,)
        )
        with blocked_interrupts(), worker_socket:
            process.start()
        # The worker is not a daemon, because daemons cannot start processes of their own. So kill
        # it before the interpreter waits for it at exit.
        atexit.register(process.kill)
        return cls(process, await Peer.from_socket(parent_socket))

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
        return self._process.pid

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
                self._process.kill()
            await run_uncancelled(self._release())

    async def _release(self) -> None:
        await self._supervising
        await self._peer.close()
        atexit.unregister(self._process.kill)
        self._process.close()

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
            self._process.kill()
        self._peer.fail_calls(self._reason(await self._exited))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.join()
        code = self._process.exitcode
        with suppress(RuntimeError):  # the loop is closed, so no task waits for the exit code
            loop.call_soon_threadsafe(self._exited.set_result, code)

    def _reason(self, exit_code: int | None) -> Exception:
        if not self._peer.is_other_ready:
            return UserError(
                f"a rollout process ended before it was ready ({describe_exit(exit_code)}); its "
                "output says why. Each rollout process imports the script that uses it, so its "
                "work must begin under `if __name__ == '__main__':`"
            )
        return ProcessDiedError(
            f"the rollout process {self.pid} ended during its rollouts "
            f"({describe_exit(exit_code)}), so its groups failed"
        )


def describe_exit(exit_code: int | None) -> str:
    """Return an exit code in words, with the name of the signal if one ended the process."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"{name}, perhaps for lack of memory" if name == "SIGKILL" else name
