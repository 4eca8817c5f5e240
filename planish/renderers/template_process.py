"""Render chat templates in a process with limited time and memory.

Chat templates are programs of strangers. jinja2's sandbox keeps them from files and the network,
but a template may loop for ever, or compute one huge number or text, which cannot be interrupted
within a process. So a worker process (template_worker.py) renders them, under the kernel's limits.
It starts at the first template and ends by itself when no template comes for some seconds.
"""

import atexit
import json
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planish.errors import DamagedFileError
from planish.renderers.template_worker import CPU_SECONDS

WALL_SECONDS = 120.0
"""The time limit of a template on a machine that is too busy for the limit of CPU time."""
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateRefusedError(DamagedFileError):
    """A template rejected a conversation, as templates do with roles that they do not know, or
    failed on it.
    """

    reason: str = ""
    """What the template said."""


class TemplateProcess:
    """A worker process. Templates of several threads are rendered one after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, names: dict[str, Any], now: str = "") -> str:
        """Return the text that a template writes with the variables `names`; see `render_all`."""
        return self.render_all(template, [names], now)[0]

    def render_all(
        self, template: str, names: Sequence[dict[str, Any]], now: str = ""
    ) -> list[str]:
        """Return the texts that a template writes with each of the variables `names`. `now` is the
        time, in ISO format, for a template that writes it; "" = the present.

        Raises TemplateRefusedError if the template rejects its variables or fails on them, and
        DamagedFileError if it is no template or exceeds the limits.
        """
        request = json.dumps({"template": template, "names": list(names), "now": now}) + "\n"
        with self._lock:
            reply = self._ask(request) or self._ask(request)
        reply = reply or {"error": "the process that renders templates does not start"}
        if "error" in reply:
            kind = TemplateRefusedError if reply.get("kind") == "refused" else DamagedFileError
            error = kind(
                f"the chat template cannot be rendered ({reply['error']}); name the renderer "
                "yourself, and for chatml its default_system"
            )
            if isinstance(error, TemplateRefusedError):
                error.reason = reply["error"]
            raise error
        texts: list[str] = reply["texts"]
        return texts

    def close(self) -> None:
        """End the process. Another template would start a new one."""
        with self._lock:
            self._end()

    def _ask(self, request: str) -> dict[str, Any] | None:
        """Return the worker's reply, or None if it had ended before the request."""
        process = self._running_process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            poller = select.poll()
            poller.register(process.stdout, select.POLLIN)
            if not poller.poll(WALL_SECONDS * 1000):
                self._end()
                return {"error": f"it takes more than {WALL_SECONDS:g} s"}
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            # After Ctrl-C, the late reply would be read as the reply to the next request.
            self._end()
            raise
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        status = process.wait()
        self._end()
        if status == 0:
            return None
        reason = f"takes more than {CPU_SECONDS} s of CPU time"
        return {"error": f"it {reason if status == -signal.SIGXCPU else f'ends Python ({status})'}"}

    def _running_process(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            # In a session of its own, the worker does not get the terminal's Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


template_process = TemplateProcess()
"""The worker of this process."""
atexit.register(template_process.close)
