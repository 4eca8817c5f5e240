"""What the process that trains and the processes that play groups say to each other.

A message is a pickled dataclass behind its length, on a socket pair that only the two ends hold:
nobody else can write to it, which is what makes unpickling safe. Groups and calls are told apart by
number, so any number of them are under way on one socket.

An error crosses with its type, its message, its notes, and the text of its traceback as its cause.
One that cannot be pickled crosses as a RolloutProcessError that names it.
"""

import asyncio
import pickle
import socket
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from planish import logtree
from planish.completers import StopCondition, TokensWithLogprobs
from planish.errors import PlanishError
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rollout.strategy import RolloutStrategy
from planish.rl.types import EnvGroupBuilder, RolloutError, TrajectoryGroup
from planish.types import ModelInput

GRACE_SECONDS = 10.0
"""How long a process may take to end after it was told to."""
LENGTH_BYTES = 8
BUFFER_BYTES = 1 << 20


class RolloutProcessError(PlanishError, RuntimeError):
    """A process that plays groups ended, or an error in it that cannot be told otherwise."""


class ProcessTraceback(Exception):
    """The traceback of an error in the process where it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(f'in a rollout process\n"""\n{text}"""')


@dataclass(frozen=True)
class PackedError:
    """An exception on its way."""

    pickled: bytes
    summary: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        trail = "".join(traceback.format_exception(error))
        summary = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        try:
            return cls(pickle.dumps(error), summary, trail)
        except Exception:  # whatever an exception's own arguments raise when they are pickled
            return cls(b"", summary, trail)

    def unpacked(self) -> Exception:
        error: Any = None
        with suppress(Exception):
            # also one that pickles may not come back: its class may want other arguments
            error = pickle.loads(self.pickled)
        if not isinstance(error, Exception):
            error = RolloutProcessError(self.summary)
        error.__cause__ = ProcessTraceback(self.traceback)
        return error


@dataclass(frozen=True)
class Play:
    """To the player: play a group."""

    group: int
    task: bytes
    """A pickled `Task`, so that a message can be read whatever a program's classes are."""
    builder_name: str
    seed: int | None
    is_logged: bool


@dataclass(frozen=True)
class Task:
    """What is to be played, and how."""

    builder: EnvGroupBuilder
    strategy: RolloutStrategy
    termination: TerminationRewardPolicy | None


@dataclass(frozen=True)
class Cancel:
    """To the player: end a group as it is."""

    group: int


@dataclass(frozen=True)
class Sampled:
    """To the player: the answer to a call."""

    call: int
    answer: TokensWithLogprobs


@dataclass(frozen=True)
class SampleFailed:
    """To the player: what the policy raised."""

    call: int
    error: PackedError


@dataclass(frozen=True)
class Ready:
    """From the player: it has started."""


@dataclass(frozen=True)
class Sample:
    """From the player: call the policy."""

    group: int
    call: int
    policy: int
    """0 is the group's policy itself; any other number is one that was seeded, in turn, by `seeds`.
    """
    seeds: tuple[int, ...]
    model_input: ModelInput
    stop: StopCondition
    max_tokens: int | None


@dataclass(frozen=True)
class Abandon:
    """From the player: nobody waits for this call any more."""

    group: int
    call: int


@dataclass(frozen=True)
class Done:
    """From the player: a group has ended."""

    group: int
    outcome: bytes
    """A pickled `Outcome`."""


@dataclass(frozen=True)
class Outcome:
    """What came of a group."""

    group: TrajectoryGroup | None
    """None: it was dropped."""
    failures: list[RolloutError]
    logged: list[logtree.Node | str]


@dataclass(frozen=True)
class Failed:
    """From the player: what the group raised."""

    group: int
    error: PackedError


class Wire:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._has_ended = False

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=end, limit=BUFFER_BYTES))

    def post(self, message: Any) -> None:
        """Send without waiting; what is posted after `end`, or after the other end is gone, is
        lost.
        """
        payload = pickle.dumps(message)
        if not self._has_ended and not self._writer.is_closing():
            self._writer.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)

    async def send(self, message: Any) -> None:
        """Send, and wait while the other end is behind."""
        self.post(message)
        with suppress(ConnectionError):
            # the reader learns of it, and whoever waits for an answer learns it there
            await self._writer.drain()

    async def receive(self) -> Any | None:
        """The next message; None when the other end is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return pickle.loads(payload)

    def end(self) -> None:
        """Say that nothing more will be sent; what the other end sends is still received."""
        self._has_ended = True
        if not self._writer.is_closing():
            with suppress(OSError):  # the other end is gone
                self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
