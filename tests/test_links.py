"""Links in the documents lead to existing files, headings and modules, and each page can be reached
from the README.
"""

import re
import tomllib
from pathlib import Path

import pytest
from build_site import nav_pages
from site_pages import EXAMPLES, site_path
from site_reference import API_PAGES, GENERATED

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = {"log.md"}
"""Names files that were there at its time."""

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"\b(?:planish|tests|benchmarks|examples|deploy)/[\w/-]+\.\w+")


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Return (file, anchor) of each link within the repository. The anchor is "" for a whole
    file.
    """
    targets = [link for link in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in link]
    parts = [target.partition("#") for target in targets]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parts]


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_the_page_points_to_is_there(page):
    for target, anchor in links_of(page):
        assert target.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors_of(target), (
            f"{target} has no heading for #{anchor}, to which {page} links"
        )
    if page.name not in HISTORY:
        missing = [name for name in NAMED.findall(page.read_text()) if not (ROOT / name).exists()]
        assert not missing, f"{page} names files that are not there"


def test_every_page_can_be_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        if (page := left.pop()) not in reached:
            reached.add(page)
            left += [target for target, _ in links_of(page) if target.suffix == ".md"]
    assert not set(PAGES) - reached


def test_every_page_is_in_the_order_of_the_site():
    project = tomllib.loads((ROOT / "docs" / "site.toml").read_text())["project"]
    shown = [path for _, path in nav_pages(project["nav"], "")]
    generated = {f"api/{name}.md" for name in API_PAGES} | set(GENERATED)
    pages = {site_path(path.relative_to(ROOT).as_posix()) for path in PAGES}
    assert sorted(shown) == sorted(pages | generated | {site_path(path) for path in EXAMPLES}), (
        "enter each page once in the nav of docs/site.toml"
    )


def test_a_heading_is_found_as_it_is_linked_to(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Files and metrics\n```\n# no heading\n[x](nowhere.md)\n```\n## `min_p`, twice\n[a](#x) "
        "[b](https://c.d)\n"
    )
    assert anchors_of(page) == {"files-and-metrics", "min_p-twice"}
    assert links_of(page) == [(page, "x")]
