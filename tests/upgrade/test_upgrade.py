"""The present code opens what every released version has left on a disk."""

import asyncio
import json
import sqlite3
import tarfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from archives import HERE, RUN_STEPS, greedy_logprobs, loss_of, server_of, train
from server_client import Client, Model

from planish.commands.cli import main
from planish.console.catalog import Catalog
from planish.errors import DamagedFileError, UserError
from planish.server.durable.schema import VERSION
from planish.service import LoadWeights

ARCHIVES = sorted(HERE.glob("*.tar.xz"))
pytestmark = pytest.mark.slow


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def directory(request, tmp_path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def change_database(directory: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(directory / "server" / "server.db")) as database, database:
        return database.execute(statement).fetchall()


def test_the_present_version_has_an_archive():
    assert f"{version('planish')}.tar.xz" in [path.name for path in ARCHIVES]


def test_a_killed_server_continues_with_its_models_and_checkpoints(directory):
    expected = json.loads((directory / "expected.json").read_text())
    [(seq,)] = change_database(directory, "SELECT MAX(COALESCE(snapshot_seq, 0)) FROM models")
    assert seq < expected["seq"] - 2, "the last step is not in the journal alone"

    async def use() -> None:
        server = server_of(directory)
        await server.start()
        try:
            client = Client(server, expected["session"], samplers=1)
            model = Model(client, expected["model"], expected["seq"])
            # Another CPU adds in another order.
            assert await loss_of(model) == pytest.approx(expected["loss"], rel=1e-3)
            found = await greedy_logprobs(client, expected["weights"])
            assert found == pytest.approx(expected["logprobs"], abs=1e-3)
            await model.run(LoadWeights(model.model_id, expected["state"], with_optimizer=True))
            first = await loss_of(model)
            assert first == pytest.approx(expected["loss of state"], rel=1e-3)
            await model.step(1)
            assert await loss_of(model) == pytest.approx(expected["loss"], rel=1e-3)
        finally:
            await server.stop(20)

    asyncio.run(use())
    assert change_database(directory, "PRAGMA user_version") == [(VERSION,)]


def test_a_run_continues_and_its_files_are_read(directory, capsys):
    expected = json.loads((directory / "expected.json").read_text())["metrics"]
    rows = train(directory, RUN_STEPS + 2)
    assert rows[:RUN_STEPS] == expected
    assert [row["step"] for row in rows] == list(range(RUN_STEPS + 2))
    capsys.readouterr()
    assert main(["rollouts", str(directory / "run"), "--step", "0"]) == 0
    assert "+" in capsys.readouterr().out  # a sum
    [run] = Catalog([directory / "run"]).runs()
    run.refresh_metrics()
    assert run.summary()["state"] == "finished"


def test_an_option_that_the_run_does_not_have_yet_must_have_its_default(directory):
    config = json.loads((directory / "run" / "config.json").read_text())
    assert config.pop("overlong_coef") == 1.0
    assert config["dataset_builder"].pop("max_success_rate") == 1.0
    (directory / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="overlong_coef was None, is 2.0"):
        train(directory, RUN_STEPS + 1, overlong_coef=2.0, truncated="penalise")
    assert len(train(directory, RUN_STEPS + 1)) == RUN_STEPS + 1


def test_what_a_newer_version_wrote_is_refused_unchanged(directory):
    change_database(directory, f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(
        UserError, match=f"has version {VERSION + 1}, and this planish reads version {VERSION}; use"
    ):
        server_of(directory)
    assert change_database(directory, "PRAGMA user_version") == [(VERSION + 1,)]
    manifests = list((directory / "run-data").glob("*/weights/*/planish.json"))
    for path in manifests:
        path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(DamagedFileError, match="format is 2, and this planish reads format 1"):
        train(directory, RUN_STEPS + 2)
    assert '"format": 2' in manifests[0].read_text()
