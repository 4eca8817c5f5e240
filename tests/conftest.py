"""Loads the rules of each_process.py, and shares out the test files over processes.

With `pytest -n 3 --dist each --share-files`, each of three processes collects and runs its share of
the files. With `--dist loadfile`, each process would collect all files, which takes as long as a
tenth of all tests.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails the run")
    parser.addoption(
        "--share-files",
        action="store_true",
        help="with --dist each: each process collects and runs only its share of the test files",
    )
    config = pluginmanager.get_plugin("pytestconfig")
    assert isinstance(config, pytest.Config)
    processes = getattr(config.known_args_namespace, "numprocesses", None)
    if "PYTEST_XDIST_WORKER" in os.environ or not processes:
        # Now, because the conftest.py of a directory may import Triton. The process that only
        # shares out the tests does without torch, whose import takes seconds.
        pluginmanager.import_plugin("each_process")


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.getoption("share_files"):
        number = int(worker["workerid"].removeprefix("gw"))
        config.args = shares(config.args, worker["workercount"])[number]


def shares(arguments: Sequence[str], processes: int) -> list[list[str]]:
    """Divide the test files that pytest's arguments name into shares of about equal size in bytes.
    The tests of such shares take about equally long.
    """
    sizes: dict[str, int] = {}
    for argument in arguments:
        path = Path(argument.partition("::")[0])
        for name in map(str, path.rglob("test_*.py")) if path.is_dir() else [argument]:
            sizes[name] = Path(name.partition("::")[0]).stat().st_size
    found: list[list[str]] = [[] for _ in range(processes)]
    totals = [0] * processes
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = totals.index(min(totals))
        found[least].append(name)
        totals[least] += sizes[name]
    return [sorted(share) for share in found]


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("no_skips") and reporter and reporter.stats.get("skipped"):
        reporter.write_line("\nFAILED: tests were skipped in spite of --no-skips", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
