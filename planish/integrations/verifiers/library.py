"""The verifiers library (extra `planish[verifiers]`), loaded when it is first needed: its import
takes seconds.

Written against verifiers 0.3: `Environment`, its rubrics, and the `Client` through which an
environment asks a model.
"""

import functools
import importlib
import json
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from planish.errors import UnsupportedError, UserError
from planish.integrations.verifiers.messages import check_sampling

INSTALL = "pip install 'planish[verifiers]'"
MODEL = "planish"
"""The name under which environments know the policy."""


@dataclass(frozen=True)
class Asked:
    """What an environment asks the policy."""

    messages: Any
    """verifiers' messages."""
    tools: Any


@dataclass(frozen=True)
class Told:
    """What the policy answers."""

    fields: Mapping[str, Any]
    """Of an assistant message."""
    tokens: list[int]
    prompt_tokens: int
    is_cut_off: bool


class PromptTooLong(Exception):
    """There is no room for an answer."""


Ask = Callable[[Asked], Awaitable[Told]]


def require_verifiers() -> None:
    """UserError, with the remedy, unless the library is there in a version that is known here."""
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise UserError(f"environments of verifiers need that library: {INSTALL}") from None
    if found.split(".")[:2] != ["0", "3"]:
        raise UnsupportedError(
            f"verifiers {found} is installed, and planish works with 0.3, whose Environment 0.4 left out: {INSTALL}"
        )


@functools.lru_cache(maxsize=8)
def load_environment(env_id: str, env_args: str) -> Any:
    """verifiers.load_environment(env_id, **env_args), with `env_args` as JSON; once in each
    process. UserError if it cannot be.
    """
    require_verifiers()
    verifiers = importlib.import_module("verifiers")  # a second or more
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "an environment of verifiers sets up signals, so it must be loaded in the main thread"
        )
    with _own_signals():
        try:
            environment = verifiers.load_environment(env_id, **json.loads(env_args))
        except Exception as error:  # whatever the module of the environment raises
            raise UserError(
                f"env_id={env_id}: {error}; install the environment's package (prime env install), or have its module, with a "
                "function load_environment, where Python finds it"
            ) from error
    check_environment(environment, env_id)
    return environment


def check_environment(environment: Any, name: str) -> None:
    """UnsupportedError for what is no environment that can be played."""
    verifiers = importlib.import_module("verifiers")
    if not isinstance(environment, verifiers.Environment):
        kind = f"{type(environment).__module__}.{type(environment).__qualname__}"
        raise UnsupportedError(
            f"{name} is a {kind}; planish plays verifiers.Environment (SingleTurnEnv, ToolEnv, ...)"
        )
    if environment.message_type != "chat":
        raise UnsupportedError(
            f"{name} has message_type={environment.message_type!r}; planish plays chat environments"
        )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Environments put handlers of their own on Ctrl-C and SIGTERM, which would take these from the
    run.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@functools.cache
def _client_type() -> type:
    clients, errors, types = (
        importlib.import_module(f"verifiers.{name}") for name in ("clients", "errors", "types")
    )

    class PolicyClient(clients.Client):
        """The policy as the model of an environment."""

        def __init__(self, ask: Ask) -> None:
            super().__init__(ask)

        def setup_client(self, config: Any) -> Any:
            raise UnsupportedError(
                "the policy has no address; an environment's other models need clients of their own"
            )

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Told:
            check_sampling(sampling_args)
            if model != MODEL:
                raise UnsupportedError(
                    f"the environment asks for the model {model!r}; the policy is all there is"
                )
            try:
                return await self.client(Asked(prompt, tools or []))
            except PromptTooLong as error:
                raise errors.OverlongPromptError from error

        async def raise_from_native_response(self, response: Told) -> None:
            """An answer without text is one: an environment may reward silence."""

        async def from_native_response(self, response: Told) -> Any:
            calls = response.fields["tool_calls"]
            finish = "length" if response.is_cut_off else "tool_calls" if calls else "stop"
            written = len(response.tokens)
            return types.Response(
                id="",
                created=int(time.time()),
                model=MODEL,
                usage=types.Usage(
                    prompt_tokens=response.prompt_tokens,
                    reasoning_tokens=0,
                    completion_tokens=written,
                    total_tokens=response.prompt_tokens + written,
                ),
                message=types.ResponseMessage(
                    **{
                        **response.fields,
                        "tool_calls": calls and [types.ToolCall(**call) for call in calls],
                    },
                    finish_reason=finish,
                    is_truncated=response.is_cut_off,
                ),
            )

        async def close(self) -> None:
            """There is nothing to close."""

    return PolicyClient


def policy_client(ask: Ask) -> Any:
    """A client of verifiers by which an environment asks the policy."""
    return _client_type()(ask)
