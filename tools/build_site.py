"""Build the site of the documentation with Zensical.

    python tools/build_site.py         write build/site/html; `make site` calls this
    python -m http.server -d build/site/html

docs/site.toml has the order of the pages. Beside each `index.html` stands `index.md`, the page as
Markdown, and `llms.txt` lists these. A warning of the build is an error. The site loads nothing
from other hosts.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from site_pages import DOCS, LINK, ROOT, outside_fences, write_pages
from site_reference import API_PAGES, api_twin_text, read_package, write_reference

BUILD = ROOT / "build" / "site"


def build(directory: Path = BUILD) -> Path:
    """Build the site below a directory, which is emptied first. Return the directory of its HTML.

    Raise RuntimeError with the output of Zensical if it fails or warns.
    """
    shutil.rmtree(directory, ignore_errors=True)
    pages = directory / "pages"
    write_pages(pages)
    write_reference(pages)
    config = directory / "zensical.toml"
    shutil.copyfile(DOCS / "site.toml", config)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    # The directory of planish, and that of the extension chz_fields.
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    if done.returncode or "warning" in (done.stdout + done.stderr).lower():
        raise RuntimeError(f"{done.stdout}{done.stderr}the site was not built without warnings")
    html = directory / "html"
    write_twins(pages, html)
    return html


def write_twins(pages: Path, html: Path) -> None:
    """Write each page as Markdown beside its HTML, and llms.txt with a line for each page."""
    project = tomllib.loads((DOCS / "site.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"# {project['site_name']}\n", f"> {project['site_description']}\n"]
    package = read_package()
    for page in pages.rglob("*.md"):
        path = page.relative_to(pages)
        if path.parent.name == "api":
            text = api_twin_text(API_PAGES[path.stem], package)
        else:
            text = page.read_text(encoding="utf-8")
        twin = html / twin_path(path.as_posix())
        twin.write_text(with_twin_links(text, path.as_posix()), encoding="utf-8")
    for entry in project["nav"]:
        [(section, content)] = entry.items()
        lines.append(f"\n## {section}\n")
        lines += [f"- [{title}]({twin_path(path)})" for title, path in nav_pages(content, section)]
    (html / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def twin_path(page: str) -> str:
    """Return where a page lies as Markdown: beside its HTML, which has a directory of its own."""
    return page if Path(page).name == "index.md" else f"{page.removesuffix('.md')}/index.md"


def with_twin_links(text: str, page: str) -> str:
    """Return a page as Markdown with the links that hold where its twin lies."""
    here = PurePosixPath(twin_path(page)).parent

    def replaced(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        if "://" in match[2] or not path:
            return match[0]
        target = os.path.normpath(PurePosixPath(page).parent / path)
        twin = twin_path(target) if target.endswith(".md") else target
        return f"{match[1]}({os.path.relpath(twin, here)}{mark}{anchor})"

    return outside_fences(text, lambda prose: LINK.sub(replaced, prose))


def nav_pages(content: Any, title: str) -> Iterator[tuple[str, str]]:
    """Yield (title, page) of a part of the navigation."""
    if isinstance(content, str):
        yield title, content
        return
    for entry in content:
        [(inner_title, inner)] = entry.items()
        yield from nav_pages(inner, inner_title)


if __name__ == "__main__":
    print(build())
