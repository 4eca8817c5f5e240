"""A client that uses the protocol over a socket, call by call, for crash runs, soak runs and load
tests.

`WireClient` raises `RequestRejected` with the status if the server rejects a request, and
`ServerUnreachable` if it is not there; `RetryingClient` retries like the SDK.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from planish.server.results import Accepted, Done, Failed, Outcome, TryAgain
from planish.service import CreateModel, CreateSampler, Operation, Sample, UnloadModel
from planish.wire.messages import PROTOBUF
from planish.wire.operations import (
    JSON_MEDIA_TYPE,
    PostRequest,
    post_request_for,
)

_RETRIED = (408, 429, 503)
_PAUSE_SECONDS = 0.05


class ServerUnreachable(Exception):
    """The server is not there, or ended before it answered."""


class RequestRejected(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


class WireClient:
    """One key's connections to one address."""

    def __init__(self, url: str, key: str = "tml-anybody") -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=f"{url}/api/v1",
            headers={"X-API-Key": key},
            timeout=60,
            limits=limits,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def create_session(self) -> str:
        return (
            await self._post(
                "/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "test"}
            )
        )["session_id"]

    async def heartbeat(self, session_id: str) -> None:
        await self._post("/session_heartbeat", {"session_id": session_id})

    async def finish_session(self, session_id: str) -> None:
        await self._send(
            "POST", f"/sessions/{session_id}/finish", orjson.dumps({"reason": {"type": "success"}})
        )

    async def create_model(self, operation: CreateModel) -> Accepted:
        return await self._submit(post_request_for(operation))

    async def unload_model(self, model_id: str) -> Accepted:
        return await self._submit(post_request_for(UnloadModel(model_id)))

    async def submit_training(self, seq_id: int, operation: Operation[Any]) -> Accepted:
        return await self._submit(post_request_for(operation, seq_id))

    async def create_sampler(self, operation: CreateSampler) -> str:
        return orjson.loads((await self._send_posted(post_request_for(operation))).content)[
            "sampling_session_id"
        ]

    async def submit_sample(self, seq_id: int, operation: Sample) -> Accepted:
        return await self._submit(post_request_for(operation, seq_id))

    async def cancel(self, request_id: str) -> None:
        await self._send("POST", "/cancel_future", orjson.dumps({"request_id": request_id}))

    async def delete_checkpoint(self, path: str) -> None:
        await self._send("DELETE", _checkpoint_url(path))

    async def set_ttl(self, path: str, seconds: int | None) -> None:
        await self._send(
            "PUT", f"{_checkpoint_url(path)}/ttl", orjson.dumps({"ttl_seconds": seconds})
        )

    async def publish_checkpoint(self, path: str) -> None:
        await self._send("POST", f"{_checkpoint_url(path)}/publish")

    async def checkpoints(self) -> list[str]:
        found = orjson.loads((await self._send("GET", "/checkpoints?limit=1000")).content)
        return [checkpoint["tinker_path"] for checkpoint in found["checkpoints"]]

    async def result(self, request_id: str) -> Outcome:
        """Return the result of a request."""
        try:
            answer = await self._send(
                "POST", "/retrieve_future", orjson.dumps({"request_id": request_id})
            )
        except RequestRejected as error:
            if error.status != 408:
                raise
            return TryAgain()
        if PROTOBUF in answer.headers["content-type"]:
            return Done("", "protobuf", answer.content)
        fields = orjson.loads(answer.content)
        if "error" in fields:
            return Failed(fields["error"], fields["category"])
        return Done(fields.get("type", ""), "json", answer.content)

    async def _submit(self, posted: PostRequest) -> Accepted:
        return _accepted(await self._send_posted(posted))

    async def _send_posted(self, posted: PostRequest) -> httpx.Response:
        return await self._send("POST", posted.path, posted.content, posted.media_type)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return orjson.loads((await self._send("POST", path, orjson.dumps(body))).content)

    async def _send(
        self, method: str, path: str, body: bytes = b"", media: str = JSON_MEDIA_TYPE
    ) -> httpx.Response:
        headers = {"content-type": media, "accept": f"{PROTOBUF}, {JSON_MEDIA_TYPE}"}
        try:
            answer = await self._http.request(method, path, content=body, headers=headers)
        except httpx.TransportError as error:
            raise ServerUnreachable(str(error)) from error
        if answer.status_code >= 300:
            raise RequestRejected(answer.status_code, answer.text)
        return answer


@dataclass(frozen=True)
class RetryingClient:
    """Retries the calls of a `WireClient` until the server lives long enough to answer."""

    client: WireClient
    rejections: set[str] = field(default_factory=set)
    """The messages with which the server rejected calls that were repeated."""

    async def call(self, method: str, *args: Any) -> Any:
        while True:
            try:
                return await getattr(self.client, method)(*args)
            except ServerUnreachable:
                pass
            except RequestRejected as error:
                if error.status not in _RETRIED:
                    raise
                self.rejections.add(str(error))
            await asyncio.sleep(_PAUSE_SECONDS)

    async def answer(self, request_id: str) -> Done | Failed:
        while isinstance(outcome := await self.call("result", request_id), TryAgain):
            pass
        return outcome


def _accepted(answer: httpx.Response) -> Accepted:
    fields = orjson.loads(answer.content)
    return Accepted(
        fields["request_id"], fields.get("model_id"), fields.get("sample_sequence_ids", ())
    )


def _checkpoint_url(path: str) -> str:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"/training_runs/{run}/checkpoints/{checkpoint}"
