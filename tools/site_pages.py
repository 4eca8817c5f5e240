"""The pages of the site, as Markdown: those of docs/ with links that stay within the site, and
sources and notebooks that they link to.

A page keeps its path below docs/, so links between pages hold on the forge and on the site.
"""

import ast
import base64
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOP_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages in the root of the repository, with their paths on the site."""
NOTEBOOKS = {"examples/tutorial_grpo.py": "examples/tutorial_grpo.ipynb"}
"""Examples that are shown as a recorded notebook instead of as source."""
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.py"))

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")


def site_path(source: str) -> str:
    """Return where a file of the repository lies on the site, as a path below its root."""
    if source in TOP_PAGES:
        return TOP_PAGES[source]
    if source in EXAMPLES:
        return str(PurePosixPath(source).with_suffix(".md"))
    return source.removeprefix("docs/") if source.startswith("docs/") else f"source/{source}"


def write_pages(pages: Path) -> None:
    """Write every page, picture and linked source of the repository below `pages`."""
    sources = [*TOP_PAGES, *(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]
    for path in DOCS.rglob("*"):
        if path.suffix in (".png", ".svg"):
            _copy(path.relative_to(ROOT).as_posix(), pages)
    for source in sources:
        text = (ROOT / source).read_text(encoding="utf-8")
        _write(pages / site_path(source), _with_site_links(text, source, pages))
    for source in EXAMPLES:
        notebook = ROOT / NOTEBOOKS.get(source, "")
        is_recorded = notebook.is_file()
        text = _notebook_text(notebook, pages) if is_recorded else _source_text(ROOT / source)
        _write(pages / site_path(source), text)


def _with_site_links(text: str, source: str, pages: Path) -> str:
    """Return the text of a page with links that hold on the site. Sources that it links to are
    copied there. A link to a directory becomes its text, because the site has no directories.
    """

    def replaced(match: re.Match[str]) -> str:
        label, link = match.groups()
        path, mark, anchor = link.partition("#")
        if "://" in link or not path:
            return match[0]
        target = os.path.relpath((ROOT / source).parent / path, ROOT)
        if (ROOT / target).is_dir():
            return label[1:-1]
        if not target.endswith(".md") and not target.startswith("docs/") and target not in EXAMPLES:
            _copy(target, pages)
        here = PurePosixPath(site_path(source)).parent
        return f"{label}({os.path.relpath(site_path(target), here)}{mark}{anchor})"

    return outside_fences(text, lambda prose: LINK.sub(replaced, _for_zensical(prose)))


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Return the text with its prose changed, and with its blocks of code as they are."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _for_zensical(prose: str) -> str:
    """Return prose in the Markdown of Zensical, which differs from the forge's in three ways: a
    table or list does not begin after a comment, a list within a list is indented by four, and
    formulas need a script.
    """
    prose = COMMENT.sub("", prose)
    prose = re.sub(r"^ {2,3}(?=\* )", "    ", prose, flags=re.MULTILINE)
    return re.sub(r"\$([^$\n]*\\[^$\n]*)\$", r"`\1`", prose)


def _source_text(path: Path) -> str:
    """Return a page that shows a Python file: its docstring as text, and then the code."""
    code = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(code)) or ""
    title = docstring.partition("\n")[0].partition(":")[0].rstrip(".")
    name = path.relative_to(ROOT).as_posix()
    return f"# {title}\n\n`{name}`\n\n```python\n{code}```\n"


def _notebook_text(path: Path, pages: Path) -> str:
    """Return a recorded notebook as Markdown: texts, code, and what the code printed and drew.
    Pictures are written below `pages`. The import of marimo, which shows the texts in the notebook,
    is left out.
    """
    parts = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_for_zensical(source))
        elif source.strip() not in ("", "import marimo as mo"):
            parts.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                data = output.get("data", {})
                printed = "".join(output.get("text") or data.get("text/plain", ""))
                if "image/png" in data:
                    picture = pages / "examples" / f"{path.stem}_{number}.png"
                    picture.parent.mkdir(parents=True, exist_ok=True)
                    picture.write_bytes(base64.b64decode(data["image/png"]))
                    parts.append(f"![output of the code above]({picture.name})")
                elif printed.strip():
                    parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _copy(source: str, pages: Path) -> None:
    target = pages / site_path(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / source, target)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
