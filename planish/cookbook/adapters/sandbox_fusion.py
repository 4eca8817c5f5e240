"""The client of a SandboxFusion server, which runs programs in its own container.

planish's own sandbox is `planish.sandbox`. This client is for environments of the cookbook that
use SandboxFusion.
"""

import base64
import os
from collections.abc import Mapping
from typing import Any

from planish.errors import UserError

URL_VARIABLE = "SANDBOX_URL"
CONCURRENCY_VARIABLE = "SANDBOX_MAX_CONCURRENCY"
DEFAULT_URL = "http://localhost:8080/run_code"
RESPONSE_SECONDS = 6000.0
"""The time limit of a response. It is long, because a program may wait in the server's queue."""


class SandboxFusionClient:
    """Runs programs at the address `url`, at most `max_concurrency` at a time.

    The defaults are the environment variables SANDBOX_URL and SANDBOX_MAX_CONCURRENCY, then
    http://localhost:8080/run_code and 4.
    """

    def __init__(self, url: str | None = None, max_concurrency: int | None = None) -> None:
        given = os.environ.get(CONCURRENCY_VARIABLE, "4")
        self.url = url or os.environ.get(URL_VARIABLE, DEFAULT_URL)
        try:
            self.max_concurrency = int(given) if max_concurrency is None else max_concurrency
        except ValueError:
            raise UserError(f"{CONCURRENCY_VARIABLE}={given}: give a whole number") from None
        if self.max_concurrency < 1:
            raise UserError(f"max_concurrency={self.max_concurrency}: give at least 1")
        self._http: Any = None

    async def run(
        self, code: str, files: Mapping[str, str], timeout: float, language: str = "python"
    ) -> tuple[bool, dict[str, Any]]:
        """Run `code` beside `files` for at most `timeout` seconds.

        Returns whether the program succeeded, and the server's answer. A server that fails or
        cannot be reached gives False and {"error": reason}.
        """
        import httpx2

        if self._http is None:
            self._http = httpx2.AsyncClient(
                timeout=httpx2.Timeout(RESPONSE_SECONDS, pool=None),
                limits=httpx2.Limits(max_connections=self.max_concurrency),
            )
        encoded = {
            name: base64.b64encode(text.encode()).decode("ascii") for name, text in files.items()
        }
        request = {
            "code": code,
            "language": language,
            "run_timeout": int(timeout),
            "files": encoded,
        }
        try:
            response = await self._http.post(self.url, json=request)
            if response.status_code != 200:
                return False, {"error": f"HTTP {response.status_code}: {response.text}"}
            answer = response.json()
        except (httpx2.RequestError, ValueError) as error:
            return False, {"error": str(error) or type(error).__name__}
        if not isinstance(answer, dict):
            return False, {"error": f"the server answered {answer!r}"}
        if answer.get("status") == "SandboxError":
            return False, {"error": answer.get("message", "SandboxError"), **answer}
        return answer.get("status") == "Success", answer

    async def close(self) -> None:
        """Close the connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()
