"""Endpoints for the replicas of a server, which its operator lists, drains and adds."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from starlette.routing import Route

from planish.engine.engine import HostedEngine
from planish.errors import UserError
from planish.fleet.replica import Replica
from planish.fleet.served import ServedFleet
from planish.server.http.context import Json, RequestContext, endpoint
from planish.server.results import NotFound
from planish.server.server import Server

_CHECK_SECONDS = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FleetRoutes:
    """The routes, and the replicas that are being drained."""

    server: Server
    engine: HostedEngine
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            endpoint("/fleet", self._status, "GET"),
            endpoint("/fleet/add", self._add),
            endpoint("/fleet/{replica}/drain", self._drain),
        ]

    @property
    def fleet(self) -> ServedFleet:
        """The replicas. Raise NotFound if the server has none."""
        if not isinstance(self.engine, ServedFleet):
            raise NotFound(
                "this server has one engine and no replicas; `planish serve --replicas N` has several"
            )
        return self.engine

    async def _status(self, context: RequestContext) -> Json:
        """Answer with what each replica is and does."""
        context.check_operator("replicas are listed")
        return {"replicas": self.fleet.status()}

    async def _add(self, context: RequestContext) -> Json:
        """Begin to start one more replica."""
        context.check_operator("replicas are added")
        _log.info("adding replica %d", self.fleet.add_replica().number)
        return {"replicas": self.fleet.status()}

    async def _drain(self, context: RequestContext) -> Json:
        """Give a replica no new work, and end its process when its work is done."""
        context.check_operator("replicas are drained")
        text = context.path_parameter("replica")
        if not text.isdecimal():
            raise UserError(f"replica {text[:40]!r}: give the number of a replica")
        replica = self.fleet.drain(int(text))
        _log.info("draining replica %d", replica.number)
        task = asyncio.create_task(self._empty(replica), name=f"drain {replica.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return {"replicas": self.fleet.status()}

    async def _empty(self, replica: Replica) -> None:
        """Move the models of a draining replica to others, and end its process."""
        while replica.is_draining and not self.fleet.end_if_idle(replica):
            for model_id in self.fleet.models_on(replica):
                model = self.server.models.get(model_id)
                if model is not None:
                    await self.server.adapter_cache.evict(model.adapter)
            await asyncio.sleep(_CHECK_SECONDS)
