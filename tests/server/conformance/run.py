"""The conformance matrix: every probe with every SDK, each from PyPI in an environment of its own,
on one real server process.

    python tests/server/conformance/run.py [--envs DIR] [--only tinker-0.38] \
        [--write docs/operators/conformance.md]

Environments are made once and kept in DIR (by default below ~/.cache/planish). The exit status is 1
if anything failed, or was refused that should work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from conformance.bench import CLIENTS, FAILED, NOT_APPLICABLE, REFUSED, WORKS, Outcome, Probe  # noqa: E402
from conformance.probes import PROBES  # noqa: E402
from server_process import BASE_MODEL, ServerProcess, running_server  # noqa: E402

from planish.testing import tiny_model  # noqa: E402

# Installed first, so that no SDK draws in a larger one.
TORCH = "torch==2.13.0"
_CELLS = {NOT_APPLICABLE: "–"}


@dataclass(frozen=True)
class Sdk:
    title: str
    requirement: str
    module: str

    @property
    def directory(self) -> str:
        return self.title.replace(" ", "-")


SDKS = (
    Sdk("tinker 0.38", "tinker==0.38.*", "tinker"),
    Sdk("tinker 0.21", "tinker==0.21.*", "tinker"),
    Sdk("logits-sdk 0.1.6", "logits-sdk==0.1.6", "logits"),
)


def python_of(sdk: Sdk, environments: Path) -> Path:
    """The interpreter of the SDK's environment, which is made if it is not there."""
    directory = environments / sdk.directory
    python = directory / "bin" / "python"
    if not (directory / ".complete").exists():
        print(f"making {directory}", flush=True)
        venv.create(directory, clear=True, with_pip=True)
        for packages in ([TORCH], ["numpy", sdk.requirement]):
            subprocess.run(
                [
                    python,
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                    *packages,
                ],
                check=True,
            )
        (directory / ".complete").touch()
    return python


def probed(sdk: Sdk, python: Path, server: ServerProcess, hub: Path) -> dict[str, Outcome]:
    """The outcome of every probe."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": "tml-conformance",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(hub),
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-m", "conformance.probes", sdk.module, BASE_MODEL]
    found = {}
    with subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            outcome = Outcome(**json.loads(line))
            found[outcome.name] = outcome
            print(
                f"{sdk.title:18} {outcome.status:8} {outcome.name}  {outcome.note[:200]}",
                flush=True,
            )
    assert process.returncode == 0, (
        f"the probes of {sdk.title} ended with status {process.returncode}"
    )
    missing = {
        name: Outcome(name, FAILED, "the probes ended before this one")
        for name in PROBES
        if name not in found
    }
    return found | missing


def table(results: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Markdown: a column for each SDK, and a row for the methods of a client with the same outcomes.
    Methods that work in each SDK that has them are left out.
    """
    lines = [f"| | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    rows: defaultdict[tuple[str, ...], list[Probe]] = defaultdict(list)
    for probe in ordered():
        statuses = [found[probe.name].status for found in results.values()]
        if set(statuses) <= {WORKS, NOT_APPLICABLE}:
            continue
        client = probe.method.partition(".")[0]
        rows[client, *(_CELLS.get(status, status) for status in statuses)].append(probe)
    lines += [
        f"| `{client}`: {_methods(probes)} | {' | '.join(cells)} |"
        for (client, *cells), probes in rows.items()
    ]
    return "\n".join(lines)


def _methods(probes: Sequence[Probe]) -> str:
    """Name the methods, each with what was tried of it. A method stands for its `_async` form."""
    tried: defaultdict[str, list[str]] = defaultdict(list)
    for probe in probes:
        method = probe.method.rpartition(".")[2]
        tried[method].extend([probe.what] if probe.what else [])
    return ", ".join(
        f"`{method}`" + (f" ({'; '.join(whats)})" if whats else "")
        for method, whats in tried.items()
        if method.removesuffix("_async") not in tried or method.removesuffix("_async") == method
    )


def counts(results: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Markdown: of each SDK, how many probes came out how."""
    kinds = (WORKS, REFUSED, NOT_APPLICABLE, FAILED)
    lines = [f"| | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for title, found in results.items():
        number = Counter(outcome.status for outcome in found.values())
        lines.append(f"| {title} | {' | '.join(str(number[kind]) for kind in kinds)} |")
    return "\n".join(lines)


def ordered() -> list[Probe]:
    """By client, as a script meets them."""
    return sorted(PROBES.values(), key=lambda probe: CLIENTS.index(probe.method.partition(".")[0]))


def write_page(page: Path, results: Mapping[str, Mapping[str, Outcome]]) -> None:
    """Replace what stands between the marks of each table; all else is written by hand."""
    text = page.read_text()
    for name, made in (
        ("counts", counts(results)),
        ("matrix", table(results)),
    ):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise SystemExit(f"{page}: the marks {begin} and {end} are not there")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    page.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--envs", type=Path, default=Path("~/.cache/planish/conformance").expanduser()
    )
    parser.add_argument(
        "--only",
        action="append",
        help="tinker-0.38, tinker-0.21 or logits-sdk-0.1.6; may be repeated",
    )
    parser.add_argument("--write", type=Path, help="the page whose tables are to be replaced")
    parser.add_argument("--replicas", help="serve with so many replicas; needs planish[ray]")
    options = parser.parse_args(arguments)
    chosen = [sdk for sdk in SDKS if options.only is None or sdk.directory in options.only]
    pythons = {sdk: python_of(sdk, options.envs) for sdk in chosen}
    with tempfile.TemporaryDirectory() as directory:
        hub, model = Path(directory) / "hub", tiny_model(Path(directory) / "model")
        serve_options = ["--replicas", options.replicas] if options.replicas else []
        with running_server(
            Path(directory) / "data",
            model,
            "--hub-tokenizers",
            *serve_options,
            environment={"HF_HOME": str(hub)},
        ) as server:
            results = {
                sdk.title: probed(sdk, python, server, hub) for sdk, python in pythons.items()
            }
            status = server.stop()
    if options.write is not None:
        write_page(options.write, results)
    failed = [
        f"{title}: {o.name}"
        for title, found in results.items()
        for o in found.values()
        if o.status == FAILED
    ]
    print("\n".join([f"{len(failed)} failed, exit status of the server {status}", *failed]))
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
