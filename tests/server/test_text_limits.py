"""Tokenizing the texts of OpenAI requests: how much runs at once, and what a crash in it leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.store import Store
from planish.server.openai.models import (
    MAX_CHARACTERS_PER_TOKEN,
    MAX_TOKENIZED_BYTES,
    ModelTokenization,
    OpenAIModels,
)
from planish.server.results import Abandoned, Tenant
from planish.tokenizer import load_tokenizer

ALICE, BOB = Tenant("alice"), Tenant("bob")


def models_with(guard: Any) -> OpenAIModels:
    server: Any = SimpleNamespace(crash_guard=guard)
    return OpenAIModels(server, {})


def request_with(body: bytes) -> Request:
    http = SimpleNamespace(paced=lambda tenant, work: work())
    app = SimpleNamespace(state=SimpleNamespace(http=http))
    request = Request({"type": "http", "headers": [], "app": app})
    request.state.body = body
    return request


class Work:
    """Counts how many bytes are in work at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_crowded = threading.Event()
        self.running = self.peak = 0
        self.order: list[str] = []

    def of(self, name: str, size: int) -> None:
        with self.lock:
            self.running += size
            self.peak = max(self.peak, self.running)
            self.order.append(name)
            if self.running > MAX_TOKENIZED_BYTES // 2:
                self.is_crowded.set()
        assert self.is_crowded.wait(60)
        time.sleep(0.1)  # longer than a thread is paused between its turn and the record
        with self.lock:
            self.running -= size


async def test_texts_that_are_tokenized_at_once_are_bounded_and_shared():
    models, work = models_with(SimpleNamespace(is_active=False)), Work()
    sizes = [MAX_TOKENIZED_BYTES // 4] * 10 + [MAX_TOKENIZED_BYTES // 3, 100]

    def of(tenant: Tenant, size: int) -> Any:
        return models.run_tokenizer(
            tenant, request_with(bytes(size)), lambda: work.of(tenant.name, size)
        )

    await asyncio.gather(*(of(ALICE, size) for size in sizes), of(BOB, MAX_TOKENIZED_BYTES // 4))
    assert MAX_TOKENIZED_BYTES // 2 < work.peak <= MAX_TOKENIZED_BYTES
    assert work.order.index("bob") <= 6  # Bob does not wait for all that Alice sent before
    assert await models.run_tokenizer(
        ALICE, request_with(bytes(10 * MAX_TOKENIZED_BYTES)), lambda: 1
    )


async def test_a_body_that_crashes_the_server_while_it_is_tokenized_is_abandoned(tmp_path: Path):
    body, innocent = b'{"prompt": "poison"}', b'{"prompt": "hello"}'

    async def marked(store: Store) -> list[str]:
        query = "SELECT id FROM crash_guard WHERE is_marked"
        return [row[0] for row in await store.read(lambda db: db.execute(query).fetchall())]

    async def life(sent: bytes, is_killed: bool) -> str | None:
        """One process. Return what the database says is running while it tokenizes `sent`."""
        store = Store(tmp_path)
        guard = CrashGuard(store, nothing)
        await guard.begin()
        running: list[str] = []
        loop = asyncio.get_running_loop()

        def work() -> None:
            running.extend(asyncio.run_coroutine_threadsafe(marked(store), loop).result(100))
            if is_killed:
                # Cancelled here, the guard is never told of an end, as after a kill.
                guard.leave = guard.pause = lambda key: None

        try:
            await models_with(guard).run_tokenizer(ALICE, request_with(sent), work)
        finally:
            if not is_killed:
                await guard.end()
            store.close()
        return running[0] if running else None

    async def nothing() -> None:
        pass

    assert await life(body, is_killed=True) is None  # no process before it crashed
    for _ in range(4):
        key = await life(body, is_killed=True)
        assert key is not None
        assert key.startswith("text of alice:")
    with pytest.raises(Abandoned, match="text of alice"):
        await life(body, is_killed=True)
    assert await life(innocent, is_killed=False) is not None


def test_a_text_has_a_limit_by_context(model_dir: Path):
    texts = ModelTokenization("planish/tiny-model", model_dir)
    longest = max(map(len, load_tokenizer(model_dir).get_vocab()))
    assert texts.max_characters == texts.max_context * min(longest, MAX_CHARACTERS_PER_TOKEN)
