"""One HTML file with the curves, rollouts, options, evaluations and findings of runs, which opens
without planish and without a network.

The file has the console's own modules as one script, and the answers to the requests that its views
send. A content security policy with the hash of the script allows nothing else.
"""

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from planish.console.answers import Answers, Parameters
from planish.console.saved_rollouts import saved_rollouts
from planish.logtree.html import PALETTE
from planish.reports.rollout_page import TOKEN_SCRIPT

_STATIC = Path(__file__).parent / "static"
SHARED = {"palette.css": PALETTE, "token_text.js": TOKEN_SCRIPT}
"""Files of static/ that the pages of rollouts have too, by name."""
_VIEWS = ("curves", "evaluations", "checkpoints", "findings", "options")
_ROLLOUT_VIEWS = ("rollouts", "group")
_MAX_POINTS = 1000
"""MAX_POINTS of static/curves.js."""
TEMPLATES = Environment(
    loader=PackageLoader("planish.console", "pages"), autoescape=True, undefined=StrictUndefined
)
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z_]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|const|class) (\w+))", re.MULTILINE)


def export_page(answers: Answers, runs: Sequence[str], to_json: Callable[[Any], bytes]) -> str:
    """Return the page. Raises LookupError if there is no such run."""
    readers = {run: answers.catalog.run(run) for run in runs}
    for reader in readers.values():
        reader.refresh_metrics()
        while reader.is_partly_read():
            reader.refresh_metrics()
    rollouts = {run: saved_rollouts(reader, len(runs)) for run, reader in readers.items()}
    has_rollouts = any(saved["total"] for saved in rollouts.values())
    data = {
        "views": _VIEWS + (_ROLLOUT_VIEWS if has_rollouts else ()),
        "start": "/curves?" + urlencode([("run", run) for run in runs]),
        "answers": _recorded_answers(answers, runs),
        "rollouts": rollouts,
    }
    script = joined_modules("app")
    chart = (_STATIC / "uplot/uPlot.iife.min.js").read_text()
    styles = (_STATIC / "uplot/uPlot.min.css", PALETTE, _STATIC / "console.css")
    css = "\n".join(path.read_text() for path in styles)
    # In a JSON string "<" may be written as an escape, so no text can end the element.
    embedded = to_json(data).replace(b"<", b"\\u003c").decode()
    return TEMPLATES.get_template("export.html").render(
        base="",
        note="exported",
        title=", ".join(runs),
        chart=Markup(chart),
        chart_hash=_hash(chart),
        script=Markup(script),
        script_hash=_hash(script),
        css=Markup(css),
        css_hash=_hash(css),
        data=Markup(embedded),
    )


def joined_modules(name: str) -> str:
    """Return a module of static/ and all modules that it imports as one script. Each module is a
    function that returns its exports.
    """
    done: list[str] = []

    def add(module: str) -> str:
        if module in done:
            return ""
        done.append(module)
        name = f"{module}.js"
        text = SHARED.get(name, _STATIC / name).read_text()
        before = "".join(add(imported) for _, imported in _IMPORT.findall(text))
        body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const {\1} = modules.\2;\n", text))
        exports = ", ".join(match[2] for match in _EXPORT.finditer(text))
        return f"{before}modules.{module} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();\n"

    return f'"use strict";\nconst modules = {{}};\n{add(name)}'


def _hash(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _recorded_answers(answers: Answers, runs: Sequence[str]) -> dict[str, Any]:
    """Return the answers to the requests of all exported views, by the path of the request."""
    recorded: dict[str, Any] = {}

    def record(path: str, *pairs: tuple[str, str]) -> Any:
        answer = getattr(answers, path)(Parameters(pairs))
        recorded[request_path(path, pairs)] = answer
        return answer

    for run in runs:
        detail = record("run", ("run", run))
        for path in ("evaluations", "checkpoints", "findings"):
            record(path, ("run", run))
        main = {metric["name"] for metric in detail["main_metrics"]}
        for metric in detail["metrics"]:
            name = metric["name"]
            for axis in ("step", "time") if name in main else ("step",):
                pairs = [("run", run), ("metric", name), ("axis", axis)]
                record("curves", *pairs, ("points", str(_MAX_POINTS)))
    return recorded


def request_path(path: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return the path of a request with sorted parameters, as `requestPath` in static/api.js."""
    query = urlencode(sorted(pairs, key=lambda pair: pair[0]), safe="*")
    return f"{path}?{query.replace('~', '%7E')}"
