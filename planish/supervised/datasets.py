"""Datasets of rows, and the builders that open them.

An epoch goes through the rows in an order that depends only on (shuffle_seed, epoch). In training,
rows that do not fill the last batch are dropped, and each epoch drops different rows. With
shuffle_seed 0, epoch e has the order of `datasets.Dataset.shuffle(0).shuffle(e)`, as in published
runs. Rows are rendered when their batch is requested, so memory holds only the unrendered rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Self, TypeVar, overload

import chz
import numpy as np

from planish.datasets.layouts import CONVERSATIONS, Layout, conversation_of
from planish.datasets.messages import PlainText
from planish.datasets.row_files import Row
from planish.datasets.rows import (
    check_shuffle_seed,
    has_split,
    open_rows,
    warn_of_partial_batch,
)
from planish.datasets.split_names import SplitNames
from planish.datasets.unused_columns import UnusedColumns
from planish.errors import UserError
from planish.renderers import Renderer, TrainOnWhat
from planish.renderers.spelled_tokens import SpelledTokens
from planish.supervised.answer_counts import AnswerCounts
from planish.supervised.rendering import check_conversation, conversation_converter
from planish.supervised.types import Batch, ChatDatasetBuilder, SupervisedDataset

T = TypeVar("T")
ReadRow = Callable[[Row, str], Sequence[Mapping[str, Any]] | PlainText]
"""Converts a row to the messages of a conversation. The text names the row in errors."""


@dataclass(eq=False)
class RowDataset(SupervisedDataset):
    """Batches of `batch_size` rows. `to_batch` converts each row to datums."""

    rows: Sequence[Any]
    batch_size: int
    to_batch: Callable[[Any], Batch]
    _: KW_ONLY
    shuffle_seed: int | None = None
    """Seed of the order of the rows; None = every epoch has the rows' own order."""
    drop_last: bool = True
    """Whether rows that do not fill a batch are dropped. Raise UserError if no batch is left
    then.
    """

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size}: give a whole number of at least 1")
        if self.drop_last and len(self.rows) < self.batch_size:
            raise UserError(
                f"batch_size={self.batch_size}: there are {len(self.rows)} rows to train on; give "
                "at most that number"
            )
        check_shuffle_seed(self.shuffle_seed)
        self.set_epoch(0)

    @classmethod
    def from_splits(
        cls,
        train: Sequence[Any],
        test: Sequence[Any],
        batch_size: int,
        to_batch: Callable[[Any], Batch],
        shuffle_seed: int | None,
    ) -> tuple[Self, Self | None]:
        """Return (training set, test set). The test set has all its rows in their own order; it is
        None without rows. `shuffle_seed` is that of the order of the training rows; None keeps
        their order.
        """
        train_set = cls(train, batch_size, to_batch, shuffle_seed=shuffle_seed)
        warn_of_partial_batch(len(train), batch_size)
        return train_set, cls(test, batch_size, to_batch, drop_last=False) if test else None

    def get_batch(self, index: int) -> Batch:
        """Return the datums of batch `index` of the epoch. The last batch is smaller if
        `drop_last` is False and rows are left.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is not in 0..{len(self) - 1}")
        row_indices = self._order[index * self.batch_size :][: self.batch_size]
        return Batch.concatenate(self.to_batch(self.rows[int(row)]) for row in row_indices)

    def __len__(self) -> int:
        return (
            len(self.rows) // self.batch_size
            if self.drop_last
            else -(-len(self.rows) // self.batch_size)
        )

    def data_size(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def set_epoch(self, seed: int = 0) -> None:
        """Put the rows into the order of an epoch, which depends on `shuffle_seed` and `seed`
        alone.
        """
        num_rows = len(self.rows)
        if self.shuffle_seed is None:
            self._order = np.arange(num_rows)
        else:
            self._order = _permutation(self.shuffle_seed, num_rows)[_permutation(seed, num_rows)]


@dataclass(frozen=True)
class SelectedRows(Sequence[Row]):
    """The rows of a table at `indices`, without a copy of the data."""

    table: Sequence[Row]
    indices: Sequence[int]

    @overload
    def __getitem__(self, position: int) -> Row: ...
    @overload
    def __getitem__(self, position: slice) -> "SelectedRows": ...
    def __getitem__(self, position: int | slice) -> "Row | SelectedRows":
        if isinstance(position, slice):
            return SelectedRows(self.table, self.indices[position])
        return self.table[int(self.indices[position])]

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class RowSplits:
    """Rows to train on, and rows to evaluate on."""

    train: Sequence[Row]
    test: Sequence[Row]


def row_splits(
    dataset: str,
    test_size: int | None,
    shuffle_seed: int | None,
    train_split: str | None = None,
    test_split: str | None = None,
) -> RowSplits:
    """Return rows to train on, and the first `test_size` rows of the test split (None = all).

    `planish.datasets.split_names` describes the names of the splits. If there is no test split,
    `test_size` rows, chosen at random by `shuffle_seed`, are held out of training. With None,
    nothing is held out then. Raises UserError if no training row would be left.
    """
    if test_size is not None and test_size < 0:
        raise UserError(f"test_size={test_size}: give a whole number, 0 for no evaluation")
    check_shuffle_seed(shuffle_seed)
    train = open_rows(dataset, train_split or "train")
    if test_size == 0:
        return RowSplits(train, [])
    if test_split is not None or has_split(dataset, "test"):
        test = open_rows(dataset, test_split or "test")
        return RowSplits(train, SelectedRows(test, range(len(test))[:test_size]))
    if test_size is None:
        return RowSplits(train, [])
    if test_size >= len(train):
        raise UserError(
            f"test_size={test_size}: dataset={dataset} has no test split, and of its {len(train)} "
            "rows at least one must be left to train on; give fewer"
        )
    order = _permutation(shuffle_seed or 0, len(train))
    return RowSplits(
        SelectedRows(train, np.sort(order[test_size:]).tolist()),
        SelectedRows(train, np.sort(order[:test_size]).tolist()),
    )


def read_splits(
    dataset: str,
    splits: RowSplits,
    read_row: Callable[[Row, str], T],
    layouts: Mapping[Layout, Any],
) -> tuple[list[T], list[T]]:
    """Return the rows of `splits`, converted by `read_row`: (training, test).

    `read_row` gets each row and its location for error messages. A warning names the columns that
    are not used by the row's layout, one of `layouts`.
    """
    unused = UnusedColumns(dataset)
    converted: list[list[T]] = []
    for rows in (splits.train, splits.test):
        converted.append([read_row(row, row.location) for row in rows])
        for row in rows:
            unused.add_layout(row, layouts, row.location)
    unused.warn()
    train, test = converted
    return train, test


def check_rows(
    rows: Sequence[Row],
    read_row: ReadRow,
    renderer: Renderer,
    train_on_what: TrainOnWhat,
    unused: UnusedColumns,
) -> None:
    """Raise UserError for the first row that cannot be trained on. This does not tokenise the rows,
    so it is fast enough to run before training.

    The columns that the layouts of conversations do not use are added to `unused`. A `read_row` of
    the user's own decides itself what it uses. Warnings count the rows whose texts spell special
    tokens, and those whose answers are missing or empty.
    """
    spelled = SpelledTokens()
    answers = AnswerCounts()
    for row in rows:
        conversation = read_row(row, row.location)
        if read_row is conversation_of:
            unused.add_layout(row, CONVERSATIONS, row.location)
        check_conversation(conversation, renderer, train_on_what, row.location)
        answers.add(conversation, train_on_what, row.location)
        if not isinstance(conversation, PlainText):
            render = partial(renderer.build_supervised_examples, conversation, train_on_what)
            spelled.add_rendered(conversation, renderer, render, row.location)
    conversations = f"of {len(rows)} conversations of {unused.dataset}"
    spelled.warn(conversations)
    answers.warn(conversations)


@chz.chz
class FromRowsBuilder(SplitNames, ChatDatasetBuilder):
    """Conversations from a hub name, a local directory or one file; docs/reference/data.md has the
    layouts.
    """

    dataset: str = chz.field(doc="hub name, local directory or file")
    test_size: int | None = chz.field(
        default=None,
        doc="number of test conversations; none = the whole test split, 0 = no evaluation",
    )
    shuffle_seed: int | None = chz.field(
        default=0, doc="seed of the order and of the held-out rows; none = the order of the rows"
    )
    read_row: ReadRow = chz.field(
        default=conversation_of, doc="function that converts a row to a conversation"
    )

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        splits = row_splits(
            self.dataset, self.test_size, self.shuffle_seed, self.train_split, self.test_split
        )
        config, renderer = self.common_config, self.renderer
        unused = UnusedColumns(self.dataset)
        for rows in (splits.train, splits.test):
            check_rows(rows, self.read_row, renderer, config.train_on_what, unused)
        unused.warn()
        render = conversation_converter(config, renderer)

        def to_batch(row: Row) -> Batch:
            return render(self.read_row(row, row.location))

        return RowDataset.from_splits(
            splits.train, splits.test, config.batch_size, to_batch, self.shuffle_seed
        )


@chz.chz
class FromConversationFileBuilder(ChatDatasetBuilder):
    """Conversations from one file; see `FromRowsBuilder`."""

    file_path: str
    test_size: int = chz.field(default=0, doc="number of conversations held out of training")
    shuffle_seed: int | None = 0

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return FromRowsBuilder(
            common_config=self.common_config,
            dataset=self.file_path,
            test_size=self.test_size,
            shuffle_seed=self.shuffle_seed,
        )()


def _permutation(seed: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(num_rows)
