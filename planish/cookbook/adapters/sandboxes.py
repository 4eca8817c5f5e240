"""Interfaces of the cookbook's sandboxes. Sandboxes of other providers are rejected."""

from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import chz

from planish.errors import PlanishError
from planish.tinker.refused import refused_type

_REFUSAL_REASON = "programs run on this machine; see planish.sandbox and docs/reference/sandbox.md"
ModalSandbox = refused_type("ModalSandbox", _REFUSAL_REASON)
ModalSandboxPool = refused_type("ModalSandboxPool", _REFUSAL_REASON)


class SandboxBackend(StrEnum):
    """The sandboxes that the cookbook knows. planish's own environments use neither."""

    SANDBOXFUSION = "sandboxfusion"
    MODAL = "modal"


class SandboxTerminatedError(PlanishError):
    """A sandbox ended although nothing had stopped it."""


@chz.chz
class SandboxResult:
    """The result of a command in a sandbox."""

    stdout: str
    stderr: str
    exit_code: int
    metrics: dict[str, Any] = chz.field(default_factory=dict)


@runtime_checkable
class SandboxInterface(Protocol):
    """The methods of a sandbox that the cookbook's environments call."""

    @property
    def sandbox_id(self) -> str: ...

    async def send_heartbeat(self, timeout: int = 30) -> None: ...

    async def run_command(
        self,
        command: str,
        workdir: str | None = None,
        timeout: int = 60,
        max_output_bytes: int | None = None,
    ) -> SandboxResult: ...

    async def read_file(
        self, path: str, max_bytes: int | None = None, timeout: int = 60
    ) -> SandboxResult: ...

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult: ...

    async def cleanup(self) -> None: ...
