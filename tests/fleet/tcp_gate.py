"""A TCP proxy that cuts or holds connections, as a broken or slow network does."""

import socket
import threading
from contextlib import suppress


class TcpGate:
    """Passes the bytes of each connection on to a port of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = threading.Event()
        self._open.set()
        self._num_cut = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_cut = 0
        """How many requests were cut."""
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Pass no more bytes on, but the answers to questions after the health of the server."""
        self._open.clear()

    def release(self) -> None:
        """Pass bytes on again."""
        self._open.set()

    def cut_next(self, count: int) -> None:
        """Close the connections of the next requests for samples, without an answer."""
        self._num_cut = count

    def close(self) -> None:
        """Close all connections."""
        self.release()
        for end in [self._listener, *self._sockets]:
            with suppress(OSError):
                end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self._port)) as end:
            self._sockets += [client, end]
            answers = threading.Thread(target=self._pass_answers, args=(end, client), daemon=True)
            answers.start()
            while data := client.recv(1 << 16):
                if not data.startswith((b"GET /health", b"GET /metrics")):
                    self._open.wait()
                if data.startswith(b"POST /v1/completions") and self._num_cut:
                    self._num_cut -= 1
                    self.num_cut += 1
                    client.shutdown(socket.SHUT_RDWR)
                    break
                end.sendall(data)
            end.shutdown(socket.SHUT_WR)
            answers.join()

    def _pass_answers(self, end: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := end.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
