"""Headless Chromium, controlled over its DevTools pipe, to test what a user of a page sees and
does.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
PATIENCE = 60.0


@contextmanager
def chromium(width: int = 1400, height: int = 1000) -> "Iterator[Chromium]":
    """Run a browser with one page until the end of the block."""
    assert EXECUTABLE is not None
    theirs_in, out = os.pipe()
    own_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            EXECUTABLE,
            *OPTIONS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Chromium(own_in, out)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(own_in)
            os.close(out)


class Chromium:
    """The page of a browser that is controlled through a pipe."""

    def __init__(self, answers: int, commands: int) -> None:
        self._in, self._out = answers, commands
        self._unread = b""
        self._calls = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and return its result."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._calls:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._in, 1 << 20)
            assert part, "the browser is gone"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, fragment: str = "") -> None:
        self.events.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + fragment)
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < end, f"not true within {PATIENCE} s: {condition}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point(self, selector: str) -> None:
        """Move the pointer to the middle of an element's first line."""
        box = self.run(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); "
            f"it.scrollIntoView({{block: 'center'}});"
            " const b = it.getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]; "
            "})()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def faults(self) -> list[dict[str, Any]]:
        """Return script errors and console errors of the page."""
        return [
            event
            for event in self.events
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
        ]

    def requests(self) -> list[str]:
        """Return the addresses of all requests, except local files and requests that the page's
        content security policy blocked.
        """
        refused = {
            event["params"]["requestId"]
            for event in self.events
            if event["method"] == "Network.loadingFailed"
            and event["params"].get("blockedReason") == "csp"
        }
        asked = [
            event["params"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        addresses = [each["request"]["url"] for each in asked if each["requestId"] not in refused]
        return [
            address for address in addresses if not address.startswith(("file:", "about:", "data:"))
        ]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )
