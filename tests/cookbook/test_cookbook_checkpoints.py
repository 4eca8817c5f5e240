"""Checkpoint rows of loops that use the cookbook's names."""

from types import SimpleNamespace

import pytest

from planish.cookbook.adapters.checkpoints import load_checkpoints_file, save_checkpoint
from planish.errors import UnsupportedError


class Client:
    """A client that saves nothing and returns a path."""

    def save_state(self, name: str, ttl_seconds: int | None):
        async def saved():
            return SimpleNamespace(path=f"tinker://run/weights/{name}")

        return saved()


def test_a_row_follows_a_line_that_a_crash_cut_off(tmp_path):
    (tmp_path / "checkpoints.jsonl").write_bytes(b'{"name": "a", "batch": 1}\n{"name": "b", "ba')
    save_checkpoint(Client(), "c", str(tmp_path), {"batch": 3})
    rows = [(record.name, record.batch) for record in load_checkpoints_file(str(tmp_path))]
    assert rows == [("a", 1), ("c", 3)]


def test_a_store_is_rejected_before_anything_is_saved(tmp_path):
    with pytest.raises(UnsupportedError, match="store"):
        save_checkpoint(Client(), "c", str(tmp_path), {"batch": 3}, store=object())
    assert not list(tmp_path.iterdir())
