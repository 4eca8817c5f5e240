"""The runs below the directories that the console shows, and how their options differ."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from planish.console.run_reader import RunReader, config_text
from planish.errors import UserError
from planish.evaluation.files import SAMPLES
from planish.runlog.run_directory import CHECKPOINTS, METRICS

_MAX_DEPTH = 4
_MAX_RUNS = 2000
_SCAN_SECONDS = 3.0
_MAX_READ_BYTES = 8 << 20
"""How much of a metrics file one request reads. It takes a few tenths of a second."""
_RUN_FILES = (METRICS, CHECKPOINTS)
PLACE_OPTIONS = frozenset(
    {"log_path", "wandb_name", "base_url", "replicas", "ray", "session", "tenant", "closed"}
)
"""Options that say where a run is, not what it does. Comparisons leave them out. The last three are
those of a server's runs.
"""


class RunCatalog(Protocol):
    """The runs that a console shows: those of directories, or those of a server."""

    roots: Sequence[Path]
    is_cut: bool
    """Whether there are more runs than those that are shown."""

    def refreshed_runs(self) -> Sequence[RunReader]:
        """Return all runs, after reading what is new of their metrics."""
        ...

    def run(self, run_id: str) -> RunReader:
        """Return one run. Raises LookupError with a message if there is none."""
        ...


class Catalog:
    """Finds runs and keeps their readers. A directory that appears later is found later."""

    def __init__(
        self, roots: Sequence[Path], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises UserError for a root that is no directory."""
        for root in roots:
            if not root.is_dir():
                raise UserError(f"DIR {root}: there is no such directory; give directories of runs")
        self.roots: Sequence[Path] = [root.resolve() for root in roots]
        self._names = _root_names(self.roots)
        self._readers: dict[str, RunReader] = {}
        self._evaluations: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._clock = clock
        self._next_scan = -float("inf")
        self.is_cut = False
        """Whether there are more than _MAX_RUNS runs, so that some are not shown."""

    def runs(self) -> list[RunReader]:
        """Return the readers of all runs, in the order of their ids."""
        with self._lock:
            self._scan_if_due()
            return [self._readers[run_id] for run_id in sorted(self._readers)]

    def refreshed_runs(self) -> list[RunReader]:
        """Return the readers of all runs, after reading what is new of their metrics."""
        readers = self.runs()
        for reader in readers:
            reader.refresh_metrics()
        return readers

    def evaluations(self) -> dict[str, Path]:
        """Return the directories of `planish eval` by their ids."""
        with self._lock:
            self._scan_if_due()
            return self._evaluations

    def _scan_if_due(self) -> None:
        if self._clock() >= self._next_scan:
            self._scan()
            self._next_scan = self._clock() + _SCAN_SECONDS

    def run(self, run_id: str) -> RunReader:
        """Return the reader of one run. Raises LookupError with a message if there is none."""
        reader = self._readers.get(run_id)
        if reader is None:
            self.runs()
            reader = self._readers.get(run_id)
        if reader is None:
            raise LookupError(
                f"there is no run {run_id[:200]!r}; it may have been moved or removed"
            )
        return reader

    def _scan(self) -> None:
        found: dict[str, Path] = {}
        evaluations: dict[str, Path] = {}
        self.is_cut = False
        for root, name in zip(self.roots, self._names, strict=True):
            for path, is_run in _found_directories(root, _MAX_DEPTH):
                if len(found) == _MAX_RUNS or len(evaluations) == _MAX_RUNS:
                    self.is_cut = True
                    break
                relative = path.relative_to(root).as_posix()
                where = found if is_run else evaluations
                where[name if relative == "." else f"{name}/{relative}"] = path
        self._evaluations = evaluations
        self._readers = {
            run_id: self._readers.get(run_id)
            or RunReader(path, run_id, max_read_bytes=_MAX_READ_BYTES)
            for run_id, path in found.items()
        }


def _found_directories(directory: Path, depth: int) -> Iterator[tuple[Path, bool]]:
    """Yield `directory` and the directories below it that have files of a run, or of an evaluation
    without a run; each with whether it is a run.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    names = {entry.name for entry in entries}
    if names.intersection(_RUN_FILES):
        yield directory, True
    elif SAMPLES in names:
        yield directory, False
    if depth == 0:
        return
    for entry in sorted(entries, key=lambda entry: entry.name):
        hidden = entry.name.startswith((".", "iteration_")) or entry.name == "rollouts"
        if not hidden and entry.is_dir(follow_symlinks=False):
            yield from _found_directories(Path(entry.path), depth - 1)


def _root_names(roots: Sequence[Path]) -> list[str]:
    """Return a name for each root: the last parts of its path, as many as make the names differ."""
    for count in range(1, max((len(root.parts) for root in roots), default=0) + 1):
        names = ["/".join(root.parts[-count:]).strip("/") for root in roots]
        if len(set(names)) == len(roots):
            return names
    raise UserError("a DIR is given twice; give each once")


def sweeps(configs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of runs whose options are equal except for one: for each group its
    `option`, and its `runs` with their values of the option, sorted by value.
    """
    texts = {
        run_id: {
            name: config_text(value) for name, value in config.items() if name not in PLACE_OPTIONS
        }
        for run_id, config in configs.items()
        if config
    }
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for run_id, config in texts.items():
        # The sum of hashes identifies the other options, and one term is subtracted in no time.
        total = sum(map(hash, config.items()))
        for item in config.items():
            groups.setdefault((item[0], total - hash(item)), {})[run_id] = configs[run_id][item[0]]
    found = []
    for (option, _), values in groups.items():
        if len({config_text(value) for value in values.values()}) > 1:
            runs = sorted(values.items(), key=lambda pair: _sort_key(pair[1]))
            found.append(
                {
                    "option": option,
                    "runs": [{"id": run_id, "value": value} for run_id, value in runs],
                }
            )
    return sorted(found, key=lambda group: (-len(group["runs"]), group["option"]))


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return (0, float(value), "")
    return (1, 0.0, config_text(value))
