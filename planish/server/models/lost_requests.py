"""What a model does when the replica on which it was trained is lost: it is restored on another one,
and the requests without an answer run again, as after a crash of the server.
"""

from __future__ import annotations

import asyncio
import logging

from planish.errors import is_out_of_memory
from planish.server.durable.request_log import RequestLog
from planish.server.models.adapter import ModelAdapter
from planish.server.models.request_queue import QueueItem
from planish.server.request import Request
from planish.server.results import Abandoned
from planish.server.turn import Turns

_log = logging.getLogger(__name__)

_MAX_LOSSES = 5
"""A request is abandoned after so many replicas were lost while they ran it."""


class LostRequests:
    """The items of a model's queue that ended without an effect."""

    def __init__(self, adapter: ModelAdapter, turns: Turns, request_log: RequestLog) -> None:
        self._adapter, self._turns, self._request_log = adapter, turns, request_log
        self.items: dict[int, QueueItem] = {}
        """The items, by number."""

    def note(self, item: QueueItem) -> None:
        """Note that an item has no effect, because the replica was lost."""
        # A snapshot must not include this item.
        self._adapter.note_lost_work()
        if isinstance(item, Request):
            self._turns.pause(item)
        self.items[item.seq] = item
        self._adapter.in_flight.running.pop(item.seq, None)
        self._adapter.in_flight.notify()

    def precede(self, seq: int) -> bool:
        """Return whether an item before `seq` was lost, so that `seq` must run again too."""
        return any(number < seq for number in self.items)

    def check(self, request: Request) -> None:
        """Raise Abandoned for a request that was lost too often, and may be the cause."""
        if request.num_lost_replicas >= _MAX_LOSSES:
            raise Abandoned(
                f"{request.id} is not run again: {_MAX_LOSSES} replicas were lost while they ran "
                "it. Send less data in one request, or ask the server's operator for more memory"
            )

    async def restore(self) -> None:
        """Restore the adapter, after the items have returned to the queue."""
        adapter = self._adapter
        await adapter.in_flight.wait_until_idle()
        if self.items:
            await self._put_back()
        await adapter.remove_from_engine()
        try:
            await self._request_log.disk_faults.retry_until_fixed(adapter.restore, adapter.id)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise Abandoned(
                f"model_id={adapter.id!r}: the replica that trained it was lost, and the replica "
                f"that should continue it lacks the memory ({error}). {await adapter.advice()}"
            ) from error

    async def _put_back(self) -> None:
        """Return the items to the queue. Answered requests between them are repeated in their turn."""
        items, self.items = self.items, {}
        adapter, first = self._adapter, items[min(items)]
        await asyncio.gather(*adapter.in_flight.unwritten_answers.values())
        rows = await self._request_log.rows_after(adapter.id, first.seq - 1)
        taken = [row for row in rows if row.seq < adapter.queue.next_seq]
        adapter.queue.put_back(
            {row.seq: items[row.seq] if row.is_unanswered else row for row in taken}
        )
        if isinstance(first, Request):
            first.num_lost_replicas += 1
        _log.warning(
            "the replica of %s was lost; the model is restored on another one, and runs %d "
            "requests again",
            adapter.id,
            len(items),
        )
