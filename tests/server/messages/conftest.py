"""A server with tiny models, whose engine can be told what to sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scripted_server import BASE, CHAT, EFFORTS, THINKER, WAIT, Served, serving

SYSTEM_FIRST = "HuggingFaceTB/SmolLM3-3B"
"""A model whose chat format has a system message at the start only."""


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    models: dict[str, Path] = dict.fromkeys((BASE, CHAT, THINKER, EFFORTS, SYSTEM_FIRST), model_dir)
    with serving(models, tmp_path_factory.mktemp("messages")) as served:
        yield served


@pytest.fixture(scope="module")
def http(served) -> Iterator[httpx.Client]:
    headers = {"x-api-key": "tml-first", "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=WAIT) as client:
        yield client
