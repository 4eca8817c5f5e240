"""Policies, environments and builders with planned failures, which worker processes can import."""

import asyncio
import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planish import logtree
from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.errors import EngineClosedError, UserError
from planish.rl.types import Env, EnvGroupBuilder, StepResult
from planish.types import ModelInput

PROMPT = ModelInput.from_ints([1, 2, 3])


class Odd(Exception):
    """An error that can be pickled but not unpickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Flaky(Exception):
    """A temporary error."""


@dataclass
class Draws(TokenCompleter):
    """Samples `length` random digits. As in a seeded real policy, each call advances the seed."""

    seed: int = 0
    length: int = 3
    calls: list[int] = field(default_factory=list)
    """The seed of each call, of this policy and of all policies seeded from it."""

    def __post_init__(self) -> None:
        self.generator = random.Random(self.seed)

    def seeded(self, seed: int) -> "Draws":
        return Draws(seed, self.length, self.calls)

    async def __call__(self, model_input: ModelInput, stop: Any, *, max_tokens: int | None = None):
        await asyncio.sleep(0)
        self.calls.append(self.seed)
        length = self.length if max_tokens is None else min(max_tokens, self.length)
        tokens = [self.generator.randrange(48, 58) for _ in range(length)]
        return TokensWithLogprobs(
            tokens, [-self.generator.random() for _ in tokens], "stop", f"s{len(tokens)}", 1
        )


@dataclass
class Plain(Env):
    """An environment of `turns` turns with a growing prompt; the last digit is the reward."""

    turns: int = 2
    prompt: ModelInput = PROMPT
    actions: list[list[int]] = field(default_factory=list)

    async def initial_observation(self):
        return self.prompt, [10]

    async def step(self, action, *, extra=None):
        self.actions.append(action)
        with logtree.scope_header(f"Turn {len(self.actions)}"):
            logtree.log_text(f"{bytes(action).decode()} {extra}")
        self.prompt = ModelInput.from_ints([*self.prompt.to_ints(), *action, 10])
        return StepResult(
            float(action[-1] - 48),
            len(self.actions) == self.turns,
            self.prompt,
            [10],
            {"digit": action[-1] - 48},
        )


@dataclass
class Breaking(Plain):
    """An environment that does `what` in its last turn."""

    what: str = "flaky"

    async def step(self, action, *, extra=None):
        result = await super().step(action, extra=extra)
        if result.episode_done:
            await self.breaks()
        return result

    async def breaks(self) -> None:
        match self.what:
            case "flaky":
                raise Flaky("the sandbox is gone")
            case "user error":
                raise UserError("temperature=-1: give at least 0")
            case "engine closed":
                raise EngineClosedError("the engine was closed")
            case "odd":
                raise Odd("this", "that")
            case "lambda":
                raise Flaky(lambda: 0)
            case "cancelled":
                raise asyncio.CancelledError
            case "hangs":
                await asyncio.sleep(60)
            case "interrupted":
                raise KeyboardInterrupt
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exits":
                os._exit(3)
            # like a forked sandbox: a process that keeps every file open
            case "forks":
                if os.fork() == 0:
                    time.sleep(8)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            case "computes":
                threading.Event().wait(60)
            case "matches":  # holds the interpreter lock
                re.match(r"(a+)+$", "a" * 40 + "b")


@dataclass
class Group(EnvGroupBuilder):
    """Builds environments by plan: plan[i] lists the attempts at trajectory i; "" succeeds."""

    plan: Sequence[Sequence[str]] = (("",), ("",), ("",), ("",))
    turns: int = 2
    made: int = 0
    graded: list[int] = field(default_factory=list)
    cleaned: int = 0
    events: list[str] = field(default_factory=list)
    tags: Sequence[str] = ("fake",)

    async def make_envs(self) -> Sequence[Env]:
        self.events.append("make")
        await asyncio.sleep(0)
        envs = [self._env(attempts[min(self.made, len(attempts) - 1)]) for attempts in self.plan]
        self.made += 1
        return envs

    def _env(self, what: str) -> Env:
        return Breaking(self.turns, what=what) if what else Plain(self.turns)

    async def compute_group_rewards(self, trajectory_group, env_group) -> Any:
        self.graded.append(len(trajectory_group))
        logtree.log_text(f"graded {len(env_group)}")
        return [(0.5 * index, {"place": index}) for index, _ in enumerate(trajectory_group)]

    async def cleanup(self):
        self.events.append("clean")
        await asyncio.sleep(0.01)
        self.cleaned += 1

    def logging_tags(self):
        return list(self.tags)


@dataclass
class Duel(Group):
    """A group whose environments depend on each other, as in a game."""

    plays_together = True


def bad(what: str, size: int = 4, at: int = 1, again: str = "") -> list[list[str]]:
    """Return a plan in which one trajectory does `what` first and `again` in later attempts."""
    return [[what, again] if index == at else [""] for index in range(size)]


@dataclass
class Files(Group):
    """Writes files to `directory`, which other processes can see. "once" kills the first process
    that runs the group, "computes once" and "matches once" block it.
    """

    directory: str = ""

    async def make_envs(self) -> Sequence[Env]:
        self._write("pid", str(os.getpid()))
        return await super().make_envs()

    def _env(self, what: str) -> Env:
        if what in ("computes once", "matches once"):
            what = "" if self._exists("blocked") else what.removesuffix(" once")
            self._write("blocked", "")
        if what == "once":
            what = "" if self._exists("killed") else "killed"
            self._write("killed", "")
        return super()._env(what)

    async def cleanup(self):
        await super().cleanup()
        self._write("cleaned", str(self.cleaned))

    def _write(self, name: str, text: str) -> None:
        with open(os.path.join(self.directory, name), "a") as file:
            file.write(text + "\n")

    def _exists(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.directory, name))


class Locked(Draws):
    """A policy that cannot be pickled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lock = threading.Lock()


@dataclass
class Refusing(TokenCompleter):
    """A policy that raises `errors` in order, then answers."""

    errors: list[Exception]

    async def __call__(self, model_input: ModelInput, stop: Any, *, max_tokens: int | None = None):
        if self.errors:
            raise self.errors.pop(0)
        return TokensWithLogprobs([49], [-1.0])


@dataclass
class Stuck(TokenCompleter):
    """A policy that does not answer its first `times` calls."""

    times: int = 1000
    events: list[str] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return self.events.count("call")

    async def __call__(self, model_input: ModelInput, stop: Any, *, max_tokens: int | None = None):
        self.events.append("call")
        if self.calls > self.times:
            return TokensWithLogprobs([49], [-1.0])
        try:
            await asyncio.sleep(60)
        finally:
            self.events.append("cancelled")
        raise AssertionError
