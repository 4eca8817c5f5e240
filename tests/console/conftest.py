from collections.abc import Iterator
from typing import Any

import pytest
from watched_page import CHROMIUM, Watched

from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser, for modules that skip their tests where there is none."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def watched(browser) -> Iterator[Watched]:
    found = Watched(browser)
    yield found
    found.close()


@pytest.fixture
def page(watched) -> Any:
    return watched.page
