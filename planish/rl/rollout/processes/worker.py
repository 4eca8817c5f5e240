"""A rollout worker: a process that runs environments, while the policy stays in the training
process.

The worker runs until its socket is closed. When the training process closes the socket or dies, the
worker cancels all groups, lets their builders clean up, and ends. If the training process has died
and the cleanup takes longer than GRACE_SECONDS (an environment may be in an endless loop), a thread
ends the worker.

The worker ignores Ctrl-C and SIGTERM. The training process handles them and closes the socket.
Processes that environments start get these signals as usual.
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
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rollout.processes.loop_watch import LoopWatch
from planish.rl.rollout.processes.peer import GRACE_SECONDS, Call, Peer
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.rollout.strategy import RolloutStrategy
from planish.rl.types import EnvGroupBuilder, RolloutError, TrajectoryGroup
from planish.types import ModelInput


@dataclass(frozen=True)
class RolloutTask:
    """The builder of a group, and the rules for its rollout."""

    builder: EnvGroupBuilder
    strategy: RolloutStrategy
    termination: TerminationRewardPolicy | None


@dataclass(frozen=True)
class RolloutRequest:
    """Asks the worker to roll out a group."""

    task: bytes
    """A pickled `RolloutTask`. It is pickled separately, so that the worker can read the request
    even if it cannot import the builder's class.
    """
    builder_name: str
    seed: int | None
    is_logged: bool


@dataclass(frozen=True)
class RolloutResult:
    """The reply to a RolloutRequest, sent pickled."""

    group: TrajectoryGroup | None
    """None if the strategy dropped the group."""
    failures: list[RolloutError]
    logged: list[logtree.Node | str]


@dataclass(frozen=True)
class SampleRequest:
    """Asks the training process for one answer of the group's policy."""

    policy: int
    """0 for the group's policy itself, a positive number for a policy seeded with `seeds`."""
    seeds: tuple[int, ...]
    """The arguments of successive calls of `TokenCompleter.seeded`."""
    model_input: ModelInput
    stop: StopCondition
    max_tokens: int | None


@dataclass(frozen=True)
class RemotePolicy(TokenCompleter):
    """The policy of a group, which runs in the training process."""

    peer: Peer
    rollout: int
    """Number of the call with the group's RolloutRequest, the scope of all calls of the policy."""
    number: int = 0
    seeds: tuple[int, ...] = ()
    numbers: Any = field(default_factory=lambda: count(1))
    """Yields the numbers of the group's seeded policies."""

    def seeded(self, seed: int) -> "RemotePolicy":
        """Return this policy with `seed`, which the training process applies at the first call."""
        return replace(self, number=next(self.numbers), seeds=(*self.seeds, seed))

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Ask the training process for an answer and return it."""
        request = SampleRequest(self.number, self.seeds, model_input, stop, max_tokens)
        return await self.peer.call(request, self.rollout)


def _ignore_signal(*_: object) -> None:
    """Do nothing."""


def main(end: socket.socket) -> None:
    """Serve the training process until it closes its end of the socket."""
    # Programs started by environments would inherit SIG_IGN, so use handlers that do nothing.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore_signal)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(serve(end))


def end_with_parent() -> None:
    """Wait for the end of the training process, then end this one after GRACE_SECONDS."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


async def serve(end: socket.socket) -> None:
    """Roll out the groups that the training process asks for."""
    peer, watch = await Peer.from_socket(end), LoopWatch()

    async def answer(call: Call) -> bytes:
        with watch.group():
            return await roll_out(call.request, RemotePolicy(peer, call.number))

    watching = asyncio.create_task(watch.run())
    try:
        await peer.serve(answer)
    finally:
        watching.cancel()


async def roll_out(request: RolloutRequest, policy: TokenCompleter) -> bytes:
    """Return the pickled RolloutResult of a group."""
    task = load_task(request)
    log_scope = (
        logtree.capture(request.builder_name) if request.is_logged else logtree.scope_disable()
    )
    failures: list[RolloutError] = []
    with log_scope as tree:
        group = await do_group_rollout(
            task.builder,
            policy,
            task.strategy,
            task.termination,
            seed=request.seed,
            failures=failures,
        )
    log_nodes: list[logtree.Node | str] = []
    if tree is not None:
        _, body = tree.children
        assert isinstance(body, logtree.Node)
        log_nodes = body.children
    try:
        return pickle.dumps(RolloutResult(group, failures, log_nodes))
    except Exception as error:
        raise UserError(
            f"the result of {request.builder_name} cannot be sent back from its process: "
            f"{type(error).__name__}: {error}; metrics and logs must contain only numbers and text"
        ) from error


def load_task(request: RolloutRequest) -> RolloutTask:
    """Return the request's task. Raises UserError if the worker cannot import its builder."""
    try:
        return pickle.loads(request.task)
    except Exception as error:
        raise UserError(
            f"{request.builder_name} cannot be made in a rollout process: {type(error).__name__}: "
            f"{error}; define the builder and the classes of its attributes in a module that can "
            "be imported, not in a notebook or under `if __name__ == '__main__':`"
        ) from error
