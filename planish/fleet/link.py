"""`Link`, the connection to an engine in another process, and what is sent over it."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from planish.engine.memory import ModelMemory
from planish.errors import EngineClosedError, PlanishError
from planish.service import SampledToken


class ReplicaLostError(EngineClosedError):
    """The process of an engine has ended, or the process was given up because it did not answer."""


@dataclass(frozen=True)
class EngineOptions:
    """The arguments of `Engine`, for an engine in another process."""

    models: Mapping[str, str] | None = None
    data_dir: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `EngineSettings`."""
    adapter_bytes: int | None = None
    """The maximum memory of all adapters of a server. None: the engine does not belong to a server.
    An engine of a server knows the base models in `models` only.
    """


@dataclass(frozen=True)
class EngineMemory:
    """The memory that an engine has planned for base models (engine/memory.py)."""

    device: str
    models: Mapping[str, ModelMemory]
    """The memory of each base model, by name."""


@dataclass(frozen=True)
class EngineStatus:
    """What an engine answers when it is asked for a sign of life."""

    progress: int | None = None
    """See `Engine.progress`."""
    num_preemptions: int = 0
    num_preempted_samples: int = 0
    resident_bytes: int = 0
    """The resident memory of the engine's process."""


@dataclass(frozen=True)
class Outcome:
    """The end of a submitted operation: its result, its error, or its cancellation."""

    call_id: int
    value: Any = None
    error: BaseException | None = None
    is_cancelled: bool = False


@dataclass(frozen=True)
class StreamedToken:
    """A token of a `Sample` that streams its tokens."""

    call_id: int
    token: SampledToken


Event = Outcome | StreamedToken


class Link(Protocol):
    """The connection to the `EngineHost` of another process.

    Every method may be called from any thread. A method raises ReplicaLostError if the process has
    ended.
    """

    def request(self, name: str, *args: Any) -> Any:
        """Call the method `name` of the host. Return its result, or raise its error."""
        ...

    def send(self, name: str, *args: Any) -> None:
        """Call the method `name` of the host, whose result and errors nobody needs. These calls and
        requests to cancel run one after another.
        """
        ...

    def poll(self) -> Sequence[Event]:
        """Wait for the next events of submitted operations, in order. One thread may call this."""
        ...

    def end(self) -> None:
        """Let the process end by itself. It first finishes checkpoints that are being saved."""

    def kill(self) -> None:
        """End the process at once, even if it is stopped."""


def transportable(error: BaseException) -> BaseException:
    """Return `error`, or its description if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PlanishError(f"{type(error).__name__}: {error}")
    return error
