"""The main function of a spawned process with an engine (see process.py)."""

import logging
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from planish.fleet.host import RequestHandler

_NUM_THREADS = 32
"""The number of calls that can run at once. A call that loads a base model takes seconds."""


def main(descriptor: int) -> None:
    """Serve the parent over the socket `descriptor`, until the parent closes it or has died."""
    # Ctrl-C reaches all processes of a terminal. The parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent blocked both signals while it started this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    logging.basicConfig(level=logging.WARNING, format="planish engine: %(message)s")
    _ProcessMain(Connection(descriptor)).run()


class _ProcessMain:
    """Receives calls of the host's methods, runs them in threads, and sends replies and events."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._handler = RequestHandler()
        self._is_started = False
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="planish-call")

    def run(self) -> None:
        """Answer calls until the parent closes the connection."""
        with suppress(EOFError, OSError):
            while True:
                self._threads.submit(self._answer, *pickle.loads(self._connection.recv_bytes()))
        if self._is_started:
            self._handler.host.close(finish=False)

    def _answer(self, request_id: int, name: str, args: tuple[Any, ...]) -> None:
        value, error = self._handler.answer(name, *args)
        if name == "start" and error is None:
            self._is_started = True
            threading.Thread(target=self._send_events, daemon=True).start()
        self._send("reply", request_id, value, error)

    def _send_events(self) -> None:
        while True:
            self._send("events", self._handler.host.poll())

    def _send(self, *message: Any) -> None:
        content = pickle.dumps(message, protocol=5)
        # The parent may be gone. Then `run` ends this process.
        with suppress(OSError), self._send_lock:
            self._connection.send_bytes(content)
