"""Interface to the verifiers library (extra `planish[verifiers]`).

The library is imported on first use, because its import takes seconds. This module uses verifiers
0.3: `Environment`, its rubrics, and the `Client` through which an environment calls a model.
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

INSTALL_COMMAND = "pip install 'planish[verifiers]'"
POLICY_NAME = "planish"
"""The name under which environments know the policy."""


@dataclass(frozen=True)
class CompletionRequest:
    """A request of an environment to the policy."""

    messages: Any
    """The conversation, as objects of verifiers."""
    tools: Any


@dataclass(frozen=True)
class Completion:
    """The policy's answer to a request."""

    fields: Mapping[str, Any]
    """The fields of verifiers' assistant message."""
    tokens: list[int]
    """The sampled tokens."""
    prompt_tokens: int
    """The length of the prompt."""
    is_cut_off: bool
    """Whether the length limit ended the answer."""


class PromptTooLong(Exception):
    """The prompt has more tokens than `max_prompt_tokens`."""


CompleteFunction = Callable[[CompletionRequest], Awaitable[Completion]]


def require_verifiers() -> None:
    """Raise UserError if verifiers is not installed, and UnsupportedError for a version other than
    0.3.
    """
    try:
        installed_version = version("verifiers")
    except PackageNotFoundError:
        raise UserError(
            f"environments of verifiers need the package verifiers; run: {INSTALL_COMMAND}"
        ) from None
    if installed_version.split(".")[:2] != ["0", "3"]:
        raise UnsupportedError(
            f"verifiers {installed_version} is installed, but planish needs 0.3, because 0.4 has "
            f"no Environment class; run: {INSTALL_COMMAND}"
        )


@functools.lru_cache(maxsize=8)
def load_environment(env_id: str, env_args: str) -> Any:
    """Return verifiers.load_environment(env_id, **env_args). `env_args` is a JSON object.

    Each process loads an environment once. Call this in the main thread. Raise UserError if the
    environment cannot be loaded.
    """
    require_verifiers()
    verifiers = importlib.import_module("verifiers")  # takes a second or more
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "an environment of verifiers installs signal handlers; load it in the main thread"
        )
    with _restore_signal_handlers():
        try:
            environment = verifiers.load_environment(env_id, **json.loads(env_args))
        except Exception as error:  # the environment's module may raise anything
            raise UserError(
                f"env_id={env_id}: {error}; install the environment's package (prime env install), "
                "or put a module with a function load_environment on Python's path"
            ) from error
    check_environment(environment, env_id)
    return environment


def check_environment(environment: Any, name: str) -> None:
    """Raise UnsupportedError unless `environment` is a verifiers.Environment with chat messages."""
    verifiers = importlib.import_module("verifiers")
    if not isinstance(environment, verifiers.Environment):
        type_name = f"{type(environment).__module__}.{type(environment).__qualname__}"
        raise UnsupportedError(
            f"{name} is a {type_name}; planish runs verifiers.Environment (SingleTurnEnv, ToolEnv, "
            f"...)"
        )
    if environment.message_type != "chat":
        raise UnsupportedError(
            f"{name} has message_type={environment.message_type!r}; planish runs chat environments"
        )


@contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the handlers of Ctrl-C and SIGTERM after the block. Environments replace them when
    they are loaded, and the run's own handlers would be lost.
    """
    previous_handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@functools.cache
def _client_type() -> type:
    clients, errors, types = (
        importlib.import_module(f"verifiers.{name}") for name in ("clients", "errors", "types")
    )

    class PolicyClient(clients.Client):
        """The policy as the model of an environment."""

        def __init__(self, complete: CompleteFunction) -> None:
            super().__init__(complete)

        def setup_client(self, config: Any) -> Any:
            raise UnsupportedError(
                "the policy has no URL; give an environment's other models clients of their own"
            )

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Completion:
            check_sampling(sampling_args)
            if model != POLICY_NAME:
                raise UnsupportedError(
                    f"the environment requests the model {model!r}, but only the policy can be "
                    "called"
                )
            try:
                return await self.client(CompletionRequest(prompt, tools or []))
            except PromptTooLong as error:
                raise errors.OverlongPromptError from error

        async def raise_from_native_response(self, response: Completion) -> None:
            """Accept every answer, even an empty one, because an environment may reward silence."""

        async def from_native_response(self, response: Completion) -> Any:
            calls = response.fields["tool_calls"]
            finish_reason = "length" if response.is_cut_off else "tool_calls" if calls else "stop"
            num_tokens = len(response.tokens)
            return types.Response(
                id="",
                created=int(time.time()),
                model=POLICY_NAME,
                usage=types.Usage(
                    prompt_tokens=response.prompt_tokens,
                    reasoning_tokens=0,
                    completion_tokens=num_tokens,
                    total_tokens=response.prompt_tokens + num_tokens,
                ),
                message=types.ResponseMessage(
                    **{
                        **response.fields,
                        "tool_calls": calls and [types.ToolCall(**call) for call in calls],
                    },
                    finish_reason=finish_reason,
                    is_truncated=response.is_cut_off,
                ),
            )

        async def close(self) -> None:
            """Do nothing: the policy has no connection to close."""

    return PolicyClient


def policy_client(complete: CompleteFunction) -> Any:
    """Return a verifiers.Client through which an environment calls the policy."""
    return _client_type()(complete)
