"""The runs of a server's database, as the console reads them again and again."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from planish.console.answers import Answers, Parameters
from planish.console.server_runs import NEWEST_REQUEST, ServerCatalog
from planish.server.durable.records import ModelRow, to_json_text
from planish.server.durable.schema import SCHEMA
from planish.types import LoraConfig


class CountedDatabase:
    """A database that counts how often it is read."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.num_reads = 0

    def read(self, query: Callable):
        self.num_reads += 1
        return query(self.db)

    def write_model(self, row: ModelRow) -> None:
        places = ", ".join("?" * len(row.values()))
        self.db.execute(
            f"INSERT OR REPLACE INTO models ({ModelRow.columns()}) VALUES ({places})", row.values()
        )

    def write_step(self, model: str, step: int) -> None:
        self.db.execute("DELETE FROM steps WHERE model = ? AND step >= ?", [model, step])
        metrics = json.dumps({"loss_per_token": 1.0 / step, "num_tokens": 7})
        self.db.execute(
            "INSERT INTO steps (model, step, metrics) VALUES (?, ?, ?)", [model, step, metrics]
        )

    def write_request(self, model: str, seq: int, accepted: float) -> None:
        self.db.execute(
            "INSERT INTO requests (id, tenant, kind, owner, seq, state, accepted) "
            "VALUES (?, 'alice', 'optim_step', ?, ?, 'done', ?)",
            [f"{model}:{seq}", model, seq, accepted],
        )


@pytest.fixture
def database() -> Iterator[CountedDatabase]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.row_factory = sqlite3.Row
        db.executescript(SCHEMA)
        yield CountedDatabase(db)


def model_row(number: int, rank: int = 4, **others) -> ModelRow:
    lora = to_json_text(LoraConfig(rank=rank))
    run_id, created = f"session{number}:train:0", 100.0 + number
    return replace(
        ModelRow(
            run_id,
            "alice",
            f"session{number}",
            "tiny",
            lora,
            "{}",
            0,
            0,
            created,
            created,
            arch="x",
        ),
        **others,
    )


def test_the_list_of_runs_reads_the_database_once(database):
    rows = [model_row(number) for number in range(5)]
    for row in rows:
        database.write_model(row)
        for step in (1, 2, 3):
            database.write_step(row.id, step)
    answers = Answers(ServerCatalog(database.read, "alice"))
    steps = [run["step"] for run in answers.runs(Parameters([]))["runs"]]
    assert (steps, database.num_reads) == ([3] * 5, 1)
    database.write_step(rows[0].id, 4)
    by_id = {run["id"]: run["step"] for run in answers.runs(Parameters([]))["runs"]}
    assert by_id == {row.id: 4 if row is rows[0] else 3 for row in rows}
    assert database.num_reads == 2


def test_only_new_rows_are_read(database):
    row = model_row(0)
    database.write_model(row)
    for step in (1, 2, 3):
        database.write_step(row.id, step)
    catalog = ServerCatalog(database.read, None)
    [run] = catalog.refreshed_runs()
    # Rows that were read are not read again, so nobody misses them.
    database.db.execute("DELETE FROM steps")
    database.write_step(row.id, 4)
    assert catalog.refreshed_runs() == [run]
    assert run.metrics.values("loss_per_token")[0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("by_list", [True, False])
def test_a_repeated_step_replaces_the_rows_after_it(database, by_list):
    row = model_row(0)
    database.write_model(row)
    for step in (1, 2, 3):
        database.write_step(row.id, step)
    catalog = ServerCatalog(database.read, None)
    [run] = catalog.refreshed_runs()
    database.write_step(row.id, 2)
    if by_list:
        catalog.refreshed_runs()
    else:
        run.refresh_metrics()
    assert run.metrics.values("loss_per_token")[0].tolist() == [1, 2]
    assert run.metrics.num_rows == 2


def test_the_options_say_why_a_run_is_closed(database):
    database.write_model(model_row(0))
    answers = Answers(ServerCatalog(database.read, None))
    run = Parameters([("run", model_row(0).id)])
    assert answers.run(run)["config"]["closed"] == "null"
    database.write_model(model_row(0, closed="the client unloaded it"))
    assert answers.run(run)["config"]["closed"] == "the client unloaded it"
    assert answers.runs(Parameters([]))["runs"][0]["state"] == "finished"


def test_the_last_request_counts_as_the_last_change(database):
    database.write_model(model_row(0))
    answers = Answers(ServerCatalog(database.read, None))
    assert answers.runs(Parameters([]))["runs"][0]["updated"] == 100.0
    for seq in range(3):
        database.write_request(model_row(0).id, seq, 200.0 + seq)
    assert answers.runs(Parameters([]))["runs"][0]["updated"] == 202.0


def test_the_newest_request_is_found_without_reading_the_others(database):
    found = database.db.execute(f"EXPLAIN QUERY PLAN {NEWEST_REQUEST}", ["a"])
    [plan] = [row["detail"] for row in found]
    assert plan == "SEARCH requests USING INDEX requests_of_owner (owner=?)"


def test_runs_of_several_sessions_that_differ_in_one_option_are_a_sweep(database):
    for number, rank in enumerate((4, 8, 16)):
        database.write_model(model_row(number, rank))
    database.write_model(model_row(3, 4, closed="finished"))
    [group] = Answers(ServerCatalog(database.read, None)).runs(Parameters([]))["sweeps"]
    assert group["option"] == "lora.rank"
    assert sorted(run["value"] for run in group["runs"]) == [4, 4, 8, 16]
