"""The engine's side of the processes that compile constraints and compute masks (see worker.py)."""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.engine.constraints.worker import ProcessLimits, receive_message, send_message
from planish.errors import PlanishError

_WORKER_PROGRAM = Path(__file__).with_name("worker.py")
_ANSWER_SECONDS = 120.0
"""The maximum time for an answer. The limits of CPU time are much lower, so only a process that
does not run at all takes so long.
"""


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer for the template process."""

    text: str
    """The contents of a tokenizer.json."""
    n_vocab: int
    """The number of bits in a mask."""
    end_token: int
    """The id of the token that means the end of a text."""


class ProcessEndedError(PlanishError):
    """A constraint process ended instead of answering. The message says which limit it exceeded."""


class ProcessStoppedError(ProcessEndedError):
    """The engine has ended a constraint process that is within its limits."""


class ProcessTemplate:
    """The template process of one tokenizer. It starts with the first constraint process, and again
    if it has ended. All methods are thread-safe.
    """

    def __init__(self, limits: ProcessLimits) -> None:
        self.limits = limits
        # Reentrant, because a garbage collection during `start` may call `close`.
        self._lock = threading.RLock()
        self._peer: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.is_closed = False
        self._numbers = itertools.count()
        self._unused_numbers: deque[int] = deque()
        """The numbers of constraint processes that were dropped and may still run."""

    def start(self, spec: TokenizerSpec) -> ConstraintProcess:
        """Start a constraint process. Raise PlanishError if that is impossible."""
        own_end, other_end = socket.socketpair()
        number = next(self._numbers)
        try:
            with other_end, self._lock:
                for is_retry in (False, True):
                    try:
                        peer = self._ensure_running(spec)
                        while self._unused_numbers:
                            send_message(peer, {"stop": self._unused_numbers.popleft()})
                            receive_message(peer)
                        send_message(peer, {"start": number})
                        socket.send_fds(peer, [b"\0"], [other_end.fileno()])
                        receive_message(peer)
                        break
                    except (OSError, EOFError):
                        self._end()
                        if is_retry or self.is_closed:
                            raise
        except BaseException as error:
            own_end.close()
            if not isinstance(error, (OSError, EOFError)) or isinstance(error, PlanishError):
                raise
            raise PlanishError(
                "the process that compiles constraints could not be started, or has ended "
                f"({error or type(error).__name__})"
            ) from error
        return ConstraintProcess(self, number, own_end, self._unused_numbers)

    def stop(self, number: int) -> int:
        """End a constraint process, and return how it ended, as in `subprocess.Popen.returncode`."""
        with self._lock:
            if self._peer is not None:
                with suppress(OSError, EOFError):
                    send_message(self._peer, {"stop": number})
                    return int(receive_message(self._peer)[0]["status"])
        return -signal.SIGKILL  # it ended with the template process

    def close(self) -> None:
        """End the template process and all constraint processes. It cannot be started again."""
        self.is_closed = True
        with self._lock:
            self._end()

    def _ensure_running(self, spec: TokenizerSpec) -> socket.socket:
        if self.is_closed:
            raise OSError("the engine is closed")
        if self._peer is not None:
            return self._peer
        peer, other_end = socket.socketpair()
        try:
            with other_end:
                # A new session, because a terminal sends signals such as that of Ctrl-C to the
                # whole process group. -P keeps the program's directory out of sys.path.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER_PROGRAM), str(other_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[other_end.fileno()],
                    start_new_session=True,
                )
            peer.settimeout(_ANSWER_SECONDS)
            send_message(
                peer,
                {
                    "n_vocab": spec.n_vocab,
                    "eos_token": spec.end_token,
                    "limits": self.limits.as_dict(),
                },
                spec.text.encode(),
            )
            answer, _ = receive_message(peer)
            if "error" in answer:
                raise PlanishError(
                    f"llguidance cannot read the model's tokenizer: {answer['error']}"
                )
        except BaseException:
            peer.close()
            self._end()
            raise
        self._peer = peer
        return peer

    def _end(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        if self._process is not None:
            process, self._process = self._process, None
            try:
                process.wait(_ANSWER_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class ConstraintProcess:
    """A process that has compiled one constraint, or will. It ends with this object."""

    def __init__(
        self,
        template: ProcessTemplate,
        number: int,
        peer: socket.socket,
        unused_numbers: deque[int],
    ) -> None:
        """Use `ProcessTemplate.start`."""
        self.memory_bytes = 0
        """The memory that counts against the limit, after the last answer."""
        self.failure: ProcessEndedError | None = None
        """Why the process has ended. None while it runs."""
        self._template = template
        self._number = number
        self._peer = peer
        peer.settimeout(_ANSWER_SECONDS)
        self._end_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _drop, peer, number, unused_numbers)

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Send a request, and return the answer (see `worker.ConstraintProcess`). Only one thread
        may call this at a time. Raise ProcessEndedError if the process ends or has ended.
        """
        try:
            send_message(self._peer, request)
            answer, data = receive_message(self._peer)
            self.memory_bytes = int(answer["memory"])
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise self._end(error) from error
        return answer, data

    def stop(self, reason: str) -> None:
        """Let the process end, even while another thread waits for its answer. `reason` becomes the
        message of the error. This does not block.
        """
        with self._end_lock:
            if self.failure is None:
                self.failure = ProcessStoppedError(reason)
                with suppress(OSError):
                    # The process ends at the end of the stream. If it is busy, the thread that
                    # waits for its answer ends it.
                    self._peer.shutdown(socket.SHUT_RDWR)

    def _end(self, error: Exception) -> ProcessEndedError:
        with self._end_lock:
            status = self._template.stop(self._number)
            if self.failure is None:
                self.failure = (
                    ProcessStoppedError("the engine is closed")
                    if self._template.is_closed
                    else ProcessEndedError(self._explain(status, error))
                )
            self._finalizer.detach()
            self._peer.close()
        return self.failure

    def _explain(self, status: int, error: Exception) -> str:
        limits = self._template.limits
        if isinstance(error, TimeoutError):
            return f"it gave no answer for {_ANSWER_SECONDS:g} s"
        if status == -signal.SIGPROF:
            return (
                f"it takes more than {limits.compile_seconds:g} s of CPU time to compile, or more "
                f"than {limits.step_seconds:g} s for its tokens"
            )
        return (
            f"it needs more than {limits.memory_bytes >> 20} MiB of memory, or it crashes "
            "llguidance"
        )


def _drop(peer: socket.socket, number: int, unused_numbers: deque[int]) -> None:
    """Let a process end that no sample uses any more.

    A garbage collection may call this function in any thread, so it must not take a lock. The
    template process collects the ended process when it starts the next one.
    """
    peer.close()
    unused_numbers.append(number)
