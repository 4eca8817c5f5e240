"""The vLLM servers of one base model that are in use. Lost servers return when they are ready again.

A server is lost when its connections break and it is not healthy, when it does not answer for a
while, as a stopped process, or when it answers and its engine computes nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import httpx2

from planish.errors import EngineClosedError, UserError
from planish.fleet.vllm.server import ServerLostError, VllmServer
from planish.processes.stall_watch import StallWatch

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0
_RETURN_SECONDS = 2.0
"""How often a lost server is asked whether it is ready again."""


class ServerSet:
    """The servers, and the tasks that watch them. All methods run in one event loop."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        prepare: Callable[[VllmServer], Awaitable[None]],
        silent_seconds: float,
        stall_seconds: float,
    ) -> None:
        """`prepare` checks a server before its first sample, and after each loss. For the two
        limits, see `VllmSampler`.
        """
        self.servers = servers
        self._prepare = prepare
        self._silent_seconds = silent_seconds
        self._stall_seconds = stall_seconds
        self._ready: set[VllmServer] = set()
        self._losses: dict[VllmServer, str] = {}
        """Why each server was lost last."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until all servers are ready. Raise the error of the first that is not."""
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self.servers]
        try:
            for server in self.servers:
                await self._prepare(server)
                self._ready.add(server)
        except BaseException:
            await self.stop()
            raise
        self._tasks += [asyncio.create_task(self._restore(server)) for server in self.servers]

    async def stop(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ready(self) -> list[VllmServer]:
        """Return the servers in use. Raise ServerLostError if all are lost."""
        ready = [
            server for server in self.servers if server in self._ready and server.fault is None
        ]
        if not ready:
            losses = [server.fault or self._losses.get(server) for server in self.servers]
            raise ServerLostError("\n".join(filter(None, losses)))
        return ready

    async def _watch(self, server: VllmServer) -> None:
        """Give the server up when it does not answer or hangs."""
        silence, stall = StallWatch(self._silent_seconds), StallWatch(self._stall_seconds)
        num_signs, progress = 0, None
        sign: asyncio.Task[int | None] | None = None
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if not server.has_requests:
                num_signs, progress = num_signs + 1, None
            elif sign is None:
                sign = asyncio.create_task(server.sign_of_life())
            elif sign.done():
                error = sign.exception()
                if isinstance(error, httpx2.HTTPStatusError):
                    server.give_up(await server.describe_loss(f"is not healthy ({error})"))
                elif error is None:
                    num_signs, progress = num_signs + 1, sign.result()
                sign = None
            if silence.is_stalled(num_signs):
                reason = f"has not answered for {self._silent_seconds:g} s"
            elif stall.is_stalled(progress):
                reason = f"answers, but has computed nothing for {self._stall_seconds:g} s"
            else:
                continue
            server.give_up(await server.describe_loss(reason))

    async def _restore(self, server: VllmServer) -> None:
        """Use the server again whenever it was lost and is ready again."""
        while server.process is None or server.process.status is None:
            await asyncio.sleep(_RETURN_SECONDS)
            if server.fault is None:
                continue
            if server in self._ready:
                self._ready.remove(server)
                _log.warning("%s", server.fault)
            self._losses[server] = server.fault
            if not await server.is_healthy():
                continue
            server.revive()
            try:
                await self._prepare(server)
            except (EngineClosedError, UserError) as error:
                if str(error) != self._losses[server]:
                    _log.warning("%s", error)
                server.give_up(str(error))
            else:
                self._ready.add(server)
                _log.warning("%s is used again", server.url)
