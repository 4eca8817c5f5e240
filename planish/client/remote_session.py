"""A client's session with a server: begin, heartbeat and end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from planish.client.remote_connection import ServerConnection
from planish.client.remote_errors import json_body_of
from planish.errors import EngineClosedError, PlanishError, UserError
from planish.wire.operations import PostRequest

WIRE_FIELD = "planish_wire"
"""The field of the server's settings with the version of planish's additions to the protocol."""
WIRE_VERSION = 1

_FIRST_CONTACT_TIMEOUT_SECONDS = 5.0
_HEARTBEAT_SECONDS = 10.0
_WARN_AFTER_SECONDS = 120.0
_FINISH_TIMEOUT_SECONDS = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteSession:
    """An open session on a server."""

    session_id: str
    connection: ServerConnection

    @classmethod
    async def begin(
        cls, connection: ServerConnection, user_metadata: Mapping[str, str]
    ) -> RemoteSession:
        """Begin a session. Raise ServerUnreachableError if no server answers, and UserError if the
        server is not a planish server, speaks another version, or rejects the key.
        """
        sdk_fields = {"sdk_version": f"planish {version('planish')}"}
        settings = await _first_contact(connection, PostRequest.json("/client/config", sdk_fields))
        server_version = settings.get(WIRE_FIELD, WIRE_VERSION)
        if server_version != WIRE_VERSION:
            raise UserError(
                f"the server at {connection.url} speaks version {server_version} of planish's "
                f"protocol, but this client speaks version {WIRE_VERSION}; install the same "
                "planish on both sides"
            )
        fields: dict[str, Any] = {
            "type": "create_session",
            "tags": [],
            "user_metadata": dict(user_metadata),
            **sdk_fields,
        }
        created = await _first_contact(connection, PostRequest.json("/create_session", fields))
        if not isinstance(created.get("session_id"), str):
            raise _not_planish_error(connection, "its answer to create_session has no session_id")
        return cls(created["session_id"], connection)

    async def keep_alive(self) -> None:
        """Send heartbeats until the session has ended."""
        posted = PostRequest.json(
            "/session_heartbeat", {"session_id": self.session_id, "type": "session_heartbeat"}
        )
        last_answer = time.monotonic()
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            try:
                await self.connection.post(posted, max_retry_seconds=0)
                last_answer = time.monotonic()
            except EngineClosedError as error:
                _log.warning("%s", error)
                return
            except PlanishError as error:
                if time.monotonic() - last_answer >= _WARN_AFTER_SECONDS:
                    _log.warning(
                        "the server at %s has not answered for %.0f s: %s",
                        self.connection.url,
                        _WARN_AFTER_SECONDS,
                        error,
                    )
                    last_answer = time.monotonic()

    async def finish(self, reason: str) -> None:
        """End the session, so that the server frees its models and samplers. If the request fails,
        the server frees them after its session timeout.
        """
        posted = PostRequest.json(
            f"/sessions/{self.session_id}/finish", {"reason": {"type": reason}, "detail": None}
        )
        with suppress(PlanishError, TimeoutError):
            await asyncio.wait_for(
                self.connection.post(posted, max_retry_seconds=0), _FINISH_TIMEOUT_SECONDS
            )


async def _first_contact(connection: ServerConnection, posted: PostRequest) -> Mapping[str, Any]:
    seconds = _FIRST_CONTACT_TIMEOUT_SECONDS
    response = await connection.post(
        posted, returned_statuses=(404, 405), max_retry_seconds=seconds, response_timeout=seconds
    )
    body = json_body_of(response)
    if not response.is_success or (not body and response.content.strip() != b"{}"):
        raise _not_planish_error(
            connection,
            f"its answer to {posted.path} is {response.status_code} {response.text[:100]!r}",
        )
    return body


def _not_planish_error(connection: ServerConnection, reason: str) -> UserError:
    return UserError(
        f"base_url={connection.url}: a server answers, but it is not a planish server ({reason}); "
        "give the URL that `planish serve` prints"
    )
