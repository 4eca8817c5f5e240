"""Finding of `planish doctor` about the sandbox, in which programs written by a model run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

from planish.doctor.findings import Finding
from planish.sandbox import Limits, Sandbox, SandboxUnavailableError

_LIMITS = Limits(wall_seconds=5)


def sandbox_findings() -> Iterator[Finding]:
    """Run the sandbox's own self-test, a program that tries to escape."""
    if sys.platform != "linux":
        yield Finding(
            "self_test", "needs Linux; recipes that run programs are not available", False
        )
        return
    try:
        asyncio.run(Sandbox(_LIMITS).check())
    except SandboxUnavailableError as error:
        problem, _, remedy = str(error).partition("; ")
        text = f"not available, so code_rl cannot run: {problem}"
        yield Finding("self_test", text, False, remedy or "see docs/reference/sandbox.md")
        return
    yield Finding(
        "self_test", "passed: a program that tries to escape from the sandbox cannot", True
    )
