"""The built site: every link and asset is there, nothing comes from another host, and search finds
pages in a real browser.
"""

import ast
import importlib
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from http_thread import serving_app
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

import planish

pytest.importorskip("zensical", reason="zensical is not installed")
ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow

LOADED = {"script": "src", "img": "src", "link": "href", "source": "srcset", "iframe": "src"}
"""The attributes by which a page loads files. A link in `a` is only followed by a reader."""
NOT_LOADED = {"canonical", "describedby", "prev", "next", "edit", "alternate"}
"""The kinds of `link` that load nothing."""


class Page(HTMLParser):
    """The anchors of a page, its links, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and values.get(LOADED[tag]) and values.get("rel") not in NOT_LOADED:
            self.loaded.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> Path:
    from build_site import build

    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(html) -> dict[Path, Page]:
    return {path: Page(path) for path in html.rglob("*.html")}


def target_of(page: Path, link: str, html: Path) -> Path:
    path = link.partition("#")[0].partition("?")[0]
    target = html / path.lstrip("/") if path.startswith("/") else page.parent / path
    return (target / "index.html" if target.is_dir() else target).resolve() if path else page


def test_every_link_leads_to_a_page_and_an_anchor(html, pages):
    dead = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            target, anchor = target_of(path, link, html), link.partition("#")[2]
            is_page = target in pages
            if not target.exists() or (is_page and anchor and anchor not in pages[target].ids):
                dead.append(f"{path.relative_to(html)}: {link}")
    assert dead == []
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_every_page_loads_files_of_the_site_only(html, pages):
    for path, page in pages.items():
        assert page.loaded
        for link in page.loaded:
            assert not re.match(r"([a-z]+:)?//", link), f"{path} loads {link}"
            assert link.startswith("data:") or target_of(path, link, html).is_file(), (
                f"{path} loads {link}, which is not there"
            )
    for style in html.rglob("*.css"):
        foreign = re.findall(
            r"url\(['\"]?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*", style.read_text()
        )
        assert not foreign, f"{style} loads {foreign}"


def test_every_page_stands_beside_its_markdown_and_in_the_list(html, pages):
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (html / "llms.txt").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    twins = {(path.parent / "index.md") for path in pages if path.name == "index.html"}
    assert twins == {html / each for each in listed}
    for twin in twins:
        text = twin.read_text()
        assert text.startswith("# ")
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", prose):
            assert "://" in link or (twin.parent / link).exists(), f"{twin} links to {link}"


def imported_names() -> set[tuple[str, str]]:
    """Return (module, name) of everything that the pages' blocks of Python import from planish."""
    found = {("planish", name) for name in planish.__all__}
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(
            r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE
        ):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("planish"):
                    found |= {(str(node.module), alias.name) for alias in node.names}
    return {(module, name) for module, name in found if not module.startswith("planish.recipes")}


def test_every_public_name_has_an_entry_of_the_reference(pages):
    ids = set().union(*(page.ids for page in pages.values()))
    names = imported_names()
    assert len(names) > 80
    missing = []
    for module, name in names:
        found: Any = getattr(importlib.import_module(module), name, None)
        home = f"{getattr(found, '__module__', module)}.{getattr(found, '__qualname__', name)}"
        # A constant does not say which module defines it.
        is_constant = not hasattr(found, "__module__")
        if not ids & {f"{module}.{name}", home} and not (
            is_constant and any(each.endswith(f".{name}") for each in ids)
        ):
            missing.append(f"{module}.{name}")
    assert missing == []


@pytest.fixture
def watched_page(html) -> Iterator[Any]:
    """A page of a browser that shows the site. A request to another host fails the test."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH")
    app = Starlette(routes=[Mount("/", StaticFiles(directory=html, html=True))])
    foreign, errors = [], []
    with serving_app(app) as address, playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(base_url=address)
        page.set_default_timeout(60_000)
        page.on("request", lambda request: foreign.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
        assert errors == []
        local = (address, "data:", "blob:")
        assert [url for url in foreign if not url.startswith(local)] == []


@pytest.mark.browser
def test_search_finds_a_metric_and_a_method(watched_page):
    page = watched_page
    for words, address in (
        ("kl_sample_train_v2", r"h=kl_sample_train_v2"),
        ("save_weights_and_get_sampling_client", r"/api/clients/.*#planish\.TrainingClient\."),
        ("max_tokens_per_minute", r"/(guide/team-server|operators/server)/"),
    ):
        page.goto("/")
        box = page.locator("input[aria-label=Search]")
        box.wait_for(state="attached")
        while not box.is_visible():
            page.keyboard.press("/")  # is lost before the page's script listens
            page.wait_for_timeout(200)
        box.fill(words)
        page.get_by_role("option").filter(has_text=words).first.click()
        page.wait_for_url(re.compile(address))
        assert words in page.locator("article").inner_text()


@pytest.mark.browser
def test_each_kind_of_page_shows_without_the_network(watched_page):
    for path, heading in (
        ("/", "planish"),
        ("/api/clients/", "Clients"),
        ("/reference/command-line/", "Command line"),
        ("/recipes/rl_basic/", "rl_basic"),
        ("/guide/team-server/", "A server for a team"),
        ("/examples/tutorial_grpo/", "Learning from rewards"),
    ):
        watched_page.goto(path)
        watched_page.wait_for_load_state("networkidle")
        assert heading in watched_page.locator("h1").first.inner_text()
        for picture in watched_page.locator("article img").all():
            assert picture.evaluate("each => each.complete && each.naturalWidth > 0")
    # The last page is the recorded notebook: what its cells printed, and its curve.
    article = watched_page.locator("article")
    assert "test questions right after training: 78%" in article.inner_text()
    assert article.locator("img").count() == 1
