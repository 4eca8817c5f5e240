"""An HTTP application on a real socket, in a thread of this process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serving_app(app: Any, port: int = 0, **options: Any) -> Iterator[str]:
    """Serve `app` during the block and yield its URL. `options` are those of uvicorn."""
    options = {"log_level": "critical", "timeout_graceful_shutdown": 5, **options}
    http_server = uvicorn.Server(uvicorn.Config(app, **options))
    with socket.create_server(("127.0.0.1", port), backlog=2048) as listener:
        # As in `planish serve`: without it, many responses take 40 ms more.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = threading.Thread(target=http_server.run, args=([listener],), daemon=True)
        thread.start()
        while not http_server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            http_server.should_exit = True
            thread.join(30)
