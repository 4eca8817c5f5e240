"""Read the rows of Arrow tables: parquet files, and tables of the library `datasets`.

A table changes nested values in two ways. This module restores the values that were stored.

* The Json feature of `datasets` stores any value as JSON text. The schema names such columns, at
  every depth, and their texts are parsed.
* Every struct of a column has the keys of all structs in it, and null for the keys that it lacked.
  In columns that hold messages or tools, such keys are removed at every depth. Otherwise a tool
  call would be trained with the arguments of other tools. Null inside of JSON text stays, because
  somebody wrote it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.errors import UserError

MESSAGE_COLUMNS = frozenset(
    {
        "messages",
        "conversations",
        "convo",
        "prompt",
        "completion",
        "chosen",
        "rejected",
        "tools",
        "comparison",
        "input",
        "preferred_output",
        "non_preferred_output",
    }
)
"""The columns that hold messages or tools in some layout (planish/datasets/layouts.py)."""
BATCH_SIZE = 1000
Convert = Callable[[Any], Any]


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a parquet file. Raise UserError for a damaged file."""
    from pyarrow import ArrowException  # imported here, because this takes most of a second
    from pyarrow.parquet import read_table

    try:
        table = read_table(path)
        return _rows_of(table, _converters(table.schema, _stored_features(table.schema)))
    except (ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as parquet ({error}); download the file again"
        ) from error


class ArrowRows(Sequence[dict[str, Any]]):
    """The rows of a `datasets.Dataset`, read from disk on access."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")
        self._converters = _converters(dataset.features.arrow_schema, dataset.features.to_dict())

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[index] for index in range(len(self))[position]]
        [row] = _rows_of(self._dataset[[range(len(self))[position]]], self._converters)
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), BATCH_SIZE):
            yield from _rows_of(self._dataset[start : start + BATCH_SIZE], self._converters)


def _rows_of(table: Any, converters: Mapping[str, Convert]) -> list[dict[str, Any]]:
    rows = table.to_pylist()
    for row in rows:
        for name, convert in converters.items():
            row[name] = convert(row[name])
    return rows


def _stored_features(schema: Any) -> Mapping[str, Any]:
    """Return the features that `datasets` has stored in a schema; {} if there are none."""
    stored = (schema.metadata or {}).get(b"huggingface")
    return json.loads(stored).get("info", {}).get("features") or {} if stored else {}


def _converters(schema: Any, features: Mapping[str, Any]) -> dict[str, Convert]:
    """Return the function for each column whose values must be converted."""
    found = {
        field.name: _converter(field.type, features.get(field.name), field.name in MESSAGE_COLUMNS)
        for field in schema
    }
    return {name: convert for name, convert in found.items() if convert is not None}


def _converter(type_: Any, feature: Any, removes_nulls: bool) -> Convert | None:
    """Return the function that converts a value of an Arrow type; None if it stays as it is."""
    import pyarrow

    if _is_json(type_, feature):
        return _parse_json
    if pyarrow.types.is_struct(type_):
        names = [type_.field(index).name for index in range(type_.num_fields)]
        features = feature if isinstance(feature, Mapping) else {}
        found = {
            name: _converter(type_.field(name).type, features.get(name), removes_nulls)
            for name in names
        }
        converters = {name: convert for name, convert in found.items() if convert is not None}
        if not removes_nulls and not converters:
            return None
        return lambda value: _convert_struct(value, converters, removes_nulls)
    if hasattr(type_, "value_type") and hasattr(type_, "value_field"):
        convert = _converter(type_.value_type, _element_feature(feature), removes_nulls)
        if convert is None:
            return None
        return lambda value: None if value is None else [convert(element) for element in value]
    return None


def _element_feature(feature: Any) -> Any:
    """Return the feature of a list's elements. Earlier releases of `datasets` stored [feature]."""
    if isinstance(feature, list) and feature:
        return feature[0]
    return feature.get("feature") if isinstance(feature, Mapping) else None


def _is_json(type_: Any, feature: Any) -> bool:
    """Return whether a column is JSON text: by the features, or by Arrow's own type for it."""
    is_feature = isinstance(feature, Mapping) and feature.get("_type") == "Json"
    return is_feature or getattr(type_, "extension_name", "") == "arrow.json"


def _parse_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value


def _convert_struct(
    value: Mapping[str, Any] | None, converters: Mapping[str, Convert], removes_nulls: bool
) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        name: converters[name](field) if name in converters else field
        for name, field in value.items()
        if field is not None or not removes_nulls
    }
