"""A link to an engine in a spawned process of this machine.

The two processes talk over a socket pair, in pickled messages. The child's end of the socket is
closed when the child dies, and the parent's end when the parent dies, so each side notices the
death of the other at once.
"""

import itertools
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from planish.fleet.link import EngineOptions, Event, ReplicaLostError
from planish.processes.background import BackgroundThread
from planish.processes.interruption import blocked_interrupts

_CHILD_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from planish.fleet.process_main import main; main(int(sys.argv[1]))"
)
"""The child does not import the caller's main module. So a script needs no guard
`if __name__ == "__main__"`.
"""
_EXIT_SECONDS = 90.0
"""How long the parent waits at exit for the child, which may still be saving checkpoints."""


class ProcessLink:
    """A spawned process with an engine, and the messages to and from the process."""

    def __init__(self, options: EngineOptions) -> None:
        """Start the process, and an engine in it. Raise UserError for an invalid option."""
        parent_socket, child_socket = socket.socketpair()
        with blocked_interrupts(), child_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD_PROGRAM, str(child_socket.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
            )
        self._connection = Connection(parent_socket.detach())
        self._ids = itertools.count()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._replies: dict[int, Future[Any]] = {}
        self._events: SimpleQueue[Sequence[Event] | None] = SimpleQueue()
        self._lost_error: ReplicaLostError | None = None
        self._sender = BackgroundThread(
            self._send, "planish-process-send", stop=self.end, exit_seconds=_EXIT_SECONDS
        )
        self._receiver = BackgroundThread(
            self._receive, "planish-process-receive", exit_seconds=_EXIT_SECONDS
        )
        try:
            self.request("start", options)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def request(self, name: str, *args: Any) -> Any:
        """Call a method of the host. See `Link`."""
        reply: Future[Any] = Future()
        request_id = next(self._ids)
        message = pickle.dumps((request_id, name, args), protocol=5)
        self._replies[request_id] = reply
        self._outbox.put(message)
        if self._lost_error is not None:
            self._replies.pop(request_id, None)
            raise self._new_lost_error()
        return reply.result()

    send = request
    """An answer costs little here, so `send` waits too."""

    def poll(self) -> Sequence[Event]:
        """Wait for the next events. See `Link`."""
        events = self._events.get()
        if events is None:
            self._events.put(None)
            raise self._new_lost_error()
        return events

    def end(self) -> None:
        """Let the process end by itself, without waiting for it."""
        self._outbox.put(None)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._outbox.put(None)

    def _send(self) -> None:
        """Send the messages of the outbox until `end` or `kill`."""
        with suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)
            # Shut down this direction only: the child's last messages can still be received.
            with socket.socket(fileno=self._connection.fileno()) as end:
                end.shutdown(socket.SHUT_WR)
                end.detach()

    def _receive(self) -> None:
        """Receive messages until the process has ended. Then fail what waits for an answer."""
        try:
            while True:
                kind, *content = pickle.loads(self._connection.recv_bytes())
                if kind == "events":
                    self._events.put(content[0])
                    continue
                request_id, value, error = content
                reply = self._replies.pop(request_id, None)
                if reply is not None:
                    _complete(reply, value, error)
        except (EOFError, OSError):
            pass
        finally:
            self._outbox.put(None)
            self._process.kill()  # It has closed its socket, so nobody can use the process.
            self._lost_error = ReplicaLostError(_describe_end(self._process))
            for request_id in list(self._replies):
                reply = self._replies.pop(request_id, None)
                if reply is not None:
                    reply.set_exception(self._new_lost_error())
            self._events.put(None)

    def _new_lost_error(self) -> ReplicaLostError:
        """Return a new exception, because each raise adds to the traceback of an exception."""
        return ReplicaLostError(str(self._lost_error))


def _complete(reply: Future[Any], value: Any, error: BaseException | None) -> None:
    if error is None:
        reply.set_result(value)
    else:
        reply.set_exception(error)


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    status = process.wait()
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            how += ", as the kernel does when the memory is full"
    else:
        how = f"has ended with exit status {status}"
    return (
        f"the engine's process {process.pid} {how}; make a new ServiceClient, and load the last "
        "checkpoint"
    )
