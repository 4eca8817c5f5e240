"""Pages of a real browser whose errors and foreign requests fail the test."""

import shutil
import sys
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PACKAGES = Path(sys.prefix) / "node_modules"
_LOCAL = ("http://127.0.0.1:", "data:", "file:", "about:")


class Watched:
    """A page whose errors and foreign requests fail the test."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1400, "height": 900}, **options}
        )
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_message)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _on_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def close(self) -> None:
        """Close the page, and check what it has done."""
        self.context.close()
        assert self.errors == []
        assert [each for each in self.requests if not each.startswith(_LOCAL)] == []


def panel(page: Any, metric: str) -> Any:
    """Return the chart of a metric."""
    return page.locator(f'.panel[data-metric="{metric}"]')


def serious_faults(page: Any) -> list[Any]:
    """Return what axe-core finds serious on the page, which must bypass its CSP."""
    page.evaluate((PACKAGES / "axe-core/axe.min.js").read_text())
    result = page.evaluate("axe.run()")
    return [
        (fault["id"], [node["target"] for node in fault["nodes"]][:3])
        for fault in result["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
