"""The rollout files of a run: for each iteration an HTML page, and three files for programs.

    flat       train_iteration_000010.html, train_iteration_000010_logtree.json,
               train_iteration_000010_rollout_summaries.jsonl,
               train_iteration_000010_rollouts.jsonl, eval_NAME_iteration_000010.html, ...
    folders    iteration_000010/train.html, iteration_000010/train_logtree.json,
               iteration_000010/eval_NAME.html, ...

Programs written for the public cookbook look for the tree and the summaries in folders. So the flat
layout also has hard links to these two files, with the names of the folder layout. The summaries
and the texts (rollouts.jsonl) have a row for every trajectory. The page shows groups in full until
it has MAX_PAGE_TOKENS tokens, and links to the texts of the remaining groups. The tree has the
first `num_groups_to_log` groups, for which the logs of the environments are kept. Files are written
atomically. If an iteration is repeated, its files are replaced. The index of the whole run is
rollouts/index.jsonl (planish/reports/rollout_index.py).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from planish.errors import StorageError, UserError
from planish.files import write_atomically
from planish.logtree.nodes import Node
from planish.reports.rollout_index import (
    append_to_index,
    index_rows,
    remove_from_index,
    text_places,
)
from planish.reports.rollout_page import rollout_page
from planish.reports.rollout_records import TrainedTokens
from planish.reports.rollout_rows import rollout_rows, summary_rows
from planish.reports.rollout_tokens import DisplayDetokenizer
from planish.reports.rollout_tree import iteration_trace
from planish.rl.rollout.rollouts import GroupRollout
from planish.tokenizer import ModelTokenizer

PAGE, TREE, SUMMARIES = ".html", "_logtree.json", "_rollout_summaries.jsonl"
ROLLOUT_TEXTS = "_rollouts.jsonl"
MAX_PAGE_TOKENS = 50_000
"""Maximum number of tokens of prompts and answers on a page. A page with more tokens is larger than
a megabyte, and browsers scroll it badly.
"""
_SPLIT_PATTERN = r"(?:train|eval_[A-Za-z0-9_.-]+)"
_SUFFIX_PATTERN = r"(?:\.html|_logtree\.json|_rollout_summaries\.jsonl|_rollouts\.jsonl)"
_FLAT_NAME = re.compile(rf"{_SPLIT_PATTERN}_iteration_(\d{{6,}}){_SUFFIX_PATTERN}")
_FOLDER_NAME = re.compile(r"iteration_(\d{6,})")
_NAME_IN_FOLDER = re.compile(_SPLIT_PATTERN + _SUFFIX_PATTERN)


def split_label(split: str) -> str:
    """Return the name of a split in file names: "train", or "eval_NAME" for "eval/NAME". In NAME,
    characters other than letters, digits and "_.-" become "_". Raises UserError for another split.
    """
    kind, _, name = split.partition("/")
    if split == "train":
        return split
    if kind != "eval" or not name:
        raise UserError(f'split={split!r}: give "train" or "eval/NAME"')
    return "eval_" + re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def find_rollout_texts(directory: Path) -> dict[tuple[str, int], Path]:
    """Return the paths of the text files of a run in either layout, by (split label, iteration)."""
    found = {}
    for path in sorted(directory.glob(f"*{ROLLOUT_TEXTS}")):
        name, _, iteration = path.name.removesuffix(ROLLOUT_TEXTS).rpartition("_iteration_")
        if _FLAT_NAME.fullmatch(path.name):
            found[name, int(iteration)] = path
    for path in sorted(directory.glob(f"iteration_*/*{ROLLOUT_TEXTS}")):
        folder = _FOLDER_NAME.fullmatch(path.parent.name)
        if folder is not None and _NAME_IN_FOLDER.fullmatch(path.name):
            found[path.name.removesuffix(ROLLOUT_TEXTS), int(folder[1])] = path
    return found


@dataclass(frozen=True)
class RolloutFiles:
    """The rollout files in one directory."""

    directory: Path
    layout: Literal["flat", "folders"]
    num_groups_to_log: int
    json_export: bool
    """Whether the tree, the summaries and the texts are written as well as the page."""
    tokenizer: ModelTokenizer = field(repr=False)
    _detokenizer: DisplayDetokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layout not in ("flat", "folders"):
            raise UserError(f'rollout_layout={self.layout!r}: give "flat" or "folders"')
        if self.num_groups_to_log < 0:
            raise UserError(f"num_groups_to_log={self.num_groups_to_log}: give 0 or more")
        object.__setattr__(self, "directory", Path(self.directory))
        object.__setattr__(self, "_detokenizer", DisplayDetokenizer(self.tokenizer))

    def write(
        self,
        split: str,
        iteration: int,
        groups: Sequence[GroupRollout],
        advantages_P_G: Sequence[Sequence[float | None]] | None = None,
        *,
        title: str | None = None,
        sections: Sequence[Node] = (),
        trained: Mapping[tuple[int, int], TrainedTokens] | None = None,
    ) -> Path:
        """Write the files of one iteration and return the path of the page.

        `split` is "train" or "eval/NAME". `advantages_P_G` has a row for each of `groups`; None if
        the groups are not trained on. `sections` are captured log trees, shown after the groups.
        `trained` has the trained tokens by (group, trajectory). `title` is the heading of the page;
        by default it names the split and the iteration.
        """
        page_path = self.path(split, iteration, PAGE)
        title = title or f"{split} · iteration {iteration}"
        logged_groups = groups[: self.num_groups_to_log]
        trace = iteration_trace(title, page_path, logged_groups, self._detokenizer, sections)
        json_suffixes = (TREE, SUMMARIES, ROLLOUT_TEXTS) if self.json_export else ()
        json_paths = [self.path(split, iteration, suffix) for suffix in json_suffixes]
        page = rollout_page(
            title,
            iteration,
            groups,
            _num_groups_to_show(groups, len(logged_groups)),
            advantages_P_G,
            self._detokenizer,
            sections=sections,
            files=[path.name for path in json_paths],
            rollouts_file=json_paths[-1].name if json_paths else None,
        )
        self._make_parent(page_path)
        places = []
        if self.json_export:
            summaries = _lines(summary_rows(split, iteration, groups))
            write_atomically(self.path(split, iteration, SUMMARIES), b"".join(summaries))
            texts_path = self.path(split, iteration, ROLLOUT_TEXTS)
            texts = _lines(
                rollout_rows(
                    split, iteration, groups, advantages_P_G, self._detokenizer, trained or {}
                )
            )
            write_atomically(texts_path, b"".join(texts))
            places = text_places(texts_path.relative_to(self.directory).as_posix(), texts)
            write_atomically(self.path(split, iteration, TREE), json.dumps(trace.to_json()) + "\n")
        write_atomically(page_path, page.encode(errors="backslashreplace"))
        rows = index_rows(split, iteration, groups, advantages_P_G, places, trained or {})
        append_to_index(self.directory, list(rows))
        if self.layout == "flat":
            self._link_into_folder(split, iteration)
        return page_path

    def logged_rows(
        self,
        split: str,
        iteration: int,
        groups: Sequence[GroupRollout],
        advantages_P_G: Sequence[Sequence[float | None]] | None,
    ) -> list[dict[str, Any]]:
        """Return the texts of the first `num_groups_to_log` groups of an iteration, as rows of
        *_rollouts.jsonl.
        """
        logged = groups[: self.num_groups_to_log]
        return list(rollout_rows(split, iteration, logged, advantages_P_G, self._detokenizer, {}))

    def path(self, split: str, iteration: int, suffix: str = PAGE) -> Path:
        """Return the path of a file of an iteration; `suffix` is PAGE, TREE, SUMMARIES or
        ROLLOUT_TEXTS.
        """
        name = split_label(split)
        if self.layout == "folders":
            return self.directory / f"iteration_{iteration:06d}" / f"{name}{suffix}"
        return self.directory / f"{name}_iteration_{iteration:06d}{suffix}"

    def _link_into_folder(self, split: str, iteration: int) -> None:
        """Make hard links to the tree and the summaries, with the names of the folder layout, which
        programs written for the public cookbook expect. If the file system does not support hard
        links, there are none.
        """
        folder = self.directory / f"iteration_{iteration:06d}"
        for suffix in (TREE, SUMMARIES) if self.json_export else ():
            link_path = folder / f"{split_label(split)}{suffix}"
            self._make_parent(link_path)
            with suppress(OSError):
                link_path.unlink(missing_ok=True)
                os.link(self.path(split, iteration, suffix), link_path)

    def remove_from(self, iteration: int) -> None:
        """Remove the files of `iteration` and all later iterations, and their rows of the index,
        before they are repeated.
        """
        remove_from_index(self.directory, iteration)
        for path in list(self._files_from(iteration)):
            path.unlink(missing_ok=True)
        for folder in list(self._folders_from(iteration)):
            if not any(folder.iterdir()):
                folder.rmdir()

    def _files_from(self, iteration: int) -> Iterator[Path]:
        for folder in self._folders_from(iteration):
            yield from (path for path in folder.iterdir() if _NAME_IN_FOLDER.fullmatch(path.name))
        if self.layout == "folders":
            return
        for path in self.directory.glob("*_iteration_*"):
            found = _FLAT_NAME.fullmatch(path.name)
            if found is not None and int(found[1]) >= iteration:
                yield path

    def _folders_from(self, iteration: int) -> Iterator[Path]:
        for path in self.directory.glob("iteration_*"):
            found = _FOLDER_NAME.fullmatch(path.name)
            if found is not None and int(found[1]) >= iteration and path.is_dir():
                yield path

    def _make_parent(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make {path.parent} ({error}); free disk space or allow writing there"
            ) from error


def _lines(rows: Iterable[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def _num_groups_to_show(groups: Sequence[GroupRollout], min_groups: int) -> int:
    """Return how many groups a page shows: at least `min_groups`, and more up to MAX_PAGE_TOKENS
    tokens. If `min_groups` is 0, the page shows none.
    """
    tokens = 0
    for count, rollout in enumerate(groups):
        for trajectory in rollout.group.trajectories_G:
            turns = trajectory.transitions
            tokens += turns[0].ob.length if turns else 0
            tokens += sum(len(turn.ac.tokens) for turn in turns)
        if count >= min_groups and (min_groups == 0 or tokens > MAX_PAGE_TOKENS):
            return count
    return len(groups)
