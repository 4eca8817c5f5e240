"""Findings of `planish doctor` about planish's directories, their free space, and the hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

from huggingface_hub import constants

from planish.doctor.findings import Finding, write_problem
from planish.engine.checkpoints.store import data_directory
from planish.engine.memory import gib
from planish.files import cache_home, short_path
from planish.model.sources.resolve import HUB_TIMEOUT_SECONDS, hub_problem
from planish.server.settings import ServerSettings

MIN_FREE_BYTES = 4 * ServerSettings.min_free_disk_bytes
"""The free space below which a directory gets a remedy.

One more checkpoint of an 8B model's adapter could then use up so much space that a server accepts
no more work (`ServerSettings.min_free_disk_bytes`).
"""
_HUB_SECONDS = HUB_TIMEOUT_SECONDS + 2


def directory_findings(server_data: Path) -> Iterator[Finding]:
    """Yield planish's directories. `server_data`: the data directory of `planish serve`."""
    cache, checkpoints = cache_home(), data_directory(None)
    hub = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    uses = {
        "cache": (cache, "kernels and converted models", "set PLANISH_HOME to a directory"),
        "checkpoints": (checkpoints, "checkpoints", "set PLANISH_DATA to a directory"),
        "server_data": (
            server_data.expanduser().absolute(),
            "data of `planish serve`",
            "start it with --data-dir DIR, a directory",
        ),
        "hub_cache": (hub, "models of the hub", "set HF_HOME to a directory"),
    }
    for name, (directory, content, remedy) in uses.items():
        yield _directory_finding(name, directory, content, remedy)


def _directory_finding(name: str, directory: Path, content: str, remedy: str) -> Finding:
    existing_parent = directory
    while not existing_parent.exists() and existing_parent != existing_parent.parent:
        existing_parent = existing_parent.parent
    free = shutil.disk_usage(existing_parent).free
    value = {"path": str(directory), "exists": existing_parent == directory, "free_bytes": free}
    text = f"{short_path(directory)} ({content}), {gib(free)} free"
    if existing_parent != directory:
        text += ", not created yet"
    problem = write_problem(existing_parent)
    value["writable"] = problem is None
    if problem is not None:
        return Finding(name, f"{text}; {problem}", value, f"{remedy} that is writable")
    if free < MIN_FREE_BYTES:
        problem_text = f"{text}; the disk is nearly full"
        return Finding(name, problem_text, value, f"free space on it, or {remedy} on another disk")
    return Finding(name, text, value)


class HubProbe:
    """A request to the hub in a separate thread, so that a slow network delays no other probe."""

    def __init__(self) -> None:
        self._results: list[str | None] = []
        self._thread = Thread(target=self._probe, name="planish-doctor-hub", daemon=True)
        if not constants.HF_HUB_OFFLINE:
            self._thread.start()

    def _probe(self) -> None:
        self._results.append(hub_problem())

    def findings(self) -> Iterator[Finding]:
        if constants.HF_HUB_OFFLINE:
            text = "not asked, because HF_HUB_OFFLINE is set"
            yield Finding("hub", text, {"reachable": None, "offline": True})
            return
        self._thread.join(_HUB_SECONDS)
        problem = self._results[0] if self._results else f"no answer in {_HUB_SECONDS:.0f} s"
        value = {"reachable": problem is None, "offline": False, "endpoint": constants.ENDPOINT}
        if problem is None:
            yield Finding("hub", f"{constants.ENDPOINT} answers", value)
            return
        remedy = (
            "check the network, a proxy (HTTPS_PROXY) or HF_ENDPOINT; without the hub, name local "
            "models in PLANISH_MODELS and set HF_HUB_OFFLINE=1"
        )
        yield Finding("hub", f"{constants.ENDPOINT} cannot be reached ({problem})", value, remedy)
