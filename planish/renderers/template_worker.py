"""The main program of the process that renders chat templates (template_process.py).

It reads one request per line, a JSON object with the template and a list of its variables, and
answers each with one line, {"texts": [TEXT]} or {"error": REASON}. The kernel limits its memory, and its CPU time
for each request. It imports nothing from planish, so that it starts fast, and ends when standard
input ends or no request comes for some seconds.
"""

import json
import resource
import select
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

CPU_SECONDS = 2
MEMORY_BYTES = 1 << 30
MAX_TEXT_LENGTH = 4 << 20
IDLE_SECONDS = 20.0


class GenerationBlocks(jinja2.ext.Extension):
    """The tag `generation` of transformers, which marks the assistant's text. It writes the
    variables planish_generation and planish_endgeneration around the text, if they are defined.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        """Return the statements between the tags, in a scope of their own."""
        line = next(parser.stream).lineno
        statements = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load")])
            for name in ("planish_generation", "planish_endgeneration")
        )
        return jinja2.nodes.Scope([begin, *statements, end], lineno=line)


class TextLimitError(Exception):
    """A template writes too long a text."""


REASONS: dict[type[Exception], str] = {
    MemoryError: f"it needs more than {MEMORY_BYTES:,} bytes of memory",
    RecursionError: "it is nested too deeply",
    TextLimitError: f"it writes more than {MAX_TEXT_LENGTH:,} characters",
}


def raise_exception(message: object) -> None:
    """Refuse the conversation; templates call this function."""
    raise jinja2.TemplateError(str(message))


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML's escapes, as the filter `tojson` of transformers does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_clock: dict[str, datetime | None] = {"now": None}


def strftime_now(text: str) -> str:
    """Return the time of the request, by default the present, in a format; templates call this
    function.
    """
    return (_clock["now"] or datetime.now()).strftime(text)


@lru_cache(8)
def compiled(template: str) -> Any:
    """Compile a template in the environment of transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(template)


def render(template: str, names: dict[str, Any], now: str = "") -> str:
    """Return the template's text. Raises TextLimitError if it is too long. `now`: the time, in ISO
    format, for templates that write it; "" = the present.
    """
    _clock["now"] = datetime.fromisoformat(now) if now else None
    pieces: list[str] = []
    length = 0
    for piece in compiled(template).generate(names):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_TEXT_LENGTH:
            raise TextLimitError
    return "".join(pieces)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request: one text for each set of variables."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + 1 + CPU_SECONDS
    # The kernel ends the process at this limit: one operation on huge numbers cannot be interrupted.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    try:
        template, now = request["template"], request["now"]
        return {"texts": [render(template, names, now) for names in request["names"]]}
    except (MemoryError, RecursionError, TextLimitError, jinja2.TemplateSyntaxError) as error:
        return {"error": REASONS.get(type(error), str(error))}
    except Exception as error:  # a template can raise whatever Python's operators raise
        reason = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
        return {"error": reason[:2000], "kind": "refused"}


def main() -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
