"""Limits of what requests may hold at once: the sizes of bodies, the memory for bodies, and the
downloads in progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from planish.server.results import Tenant, Unavailable

MIB = 1 << 20
MAX_SMALL_BODY = 4 * MIB
MAX_TELEMETRY_BODY = 16 * MIB
MAX_SAMPLE_BODY = 64 * MIB
MAX_TRAINING_BODY = 256 * MIB
MAX_TOTAL_BODIES = 1024 * MIB
"""Limit for the bodies of all requests together, in bytes. One tenant may use half of the limit.
This half is twice MAX_TRAINING_BODY, because a compressed body and its decompressed copy are in
memory at the same time, and each may have that size.
"""
MAX_DOWNLOADS, MAX_TENANT_DOWNLOADS = 32, 8
"""The maximum numbers of simultaneous checkpoint downloads, of all tenants and of one tenant. Each
download keeps files open.
"""


@dataclass
class BodyBudget:
    """The memory for request bodies. One tenant may use half of it."""

    limit: int = MAX_TOTAL_BODIES
    held: Counter[str] = field(default_factory=Counter[str])
    """The reserved bytes of each tenant."""

    @property
    def used(self) -> int:
        """The reserved bytes of all tenants."""
        return self.held.total()

    def reserve(self, tenant: Tenant, size: int) -> None:
        """Reserve `size` bytes for a tenant. Raise Unavailable if they exceed the limit."""
        if self.used + size > self.limit or self.held[tenant.name] + size > self.limit // 2:
            raise Unavailable(
                f"the bodies of the requests in progress fill the {self.limit >> 20} MiB that this "
                "server has for them, or the half that one tenant may use; send the request again "
                "in a few seconds, or fewer large requests at once",
                2.0,
            )
        self.held[tenant.name] += size

    def release(self, tenant: Tenant, size: int) -> None:
        """Give `size` reserved bytes of a tenant back to the budget."""
        self.held[tenant.name] -= size


@dataclass
class DownloadSlots:
    """The downloads in progress."""

    running: Counter[str] = field(default_factory=Counter[str])
    """The number of downloads of each tenant."""

    @contextmanager
    def slot(self, tenant: Tenant) -> Generator[ExitStack]:
        """Take a slot until the end of the `with` block. Raise Unavailable if no slot is free.

        The context is an ExitStack that releases the slot. To keep the slot longer, call `pop_all`
        on this stack, and close the returned stack later.
        """
        if (
            self.running.total() >= MAX_DOWNLOADS
            or self.running[tenant.name] >= MAX_TENANT_DOWNLOADS
        ):
            raise Unavailable("too many downloads at once; try again when others are done", 5.0)
        self.running[tenant.name] += 1
        with ExitStack() as stack:
            stack.callback(self.running.subtract, [tenant.name])
            yield stack
