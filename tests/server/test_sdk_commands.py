"""The command `tinker` of the official SDK, as users type it, against a server process on a real
socket.

All commands run one after another in one process, which needs the SDK alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from server_process import BASE_MODEL, running_server

from planish.testing import tiny_model

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import click
import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli

base_model, directory = sys.argv[1:]
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model, rank=4, user_metadata={"why": "commands"}).result()
names = {
    "state": client.save_state("state", ttl_seconds=3600).result().path,
    "sampler": client.save_weights_for_sampler("sampler").result().path,
    "external": client.save_weights_external("external").result().path,
    "run": client.model_id,
    "session": client.model_id.split(":")[0],
    "directory": directory,
}
outcomes = {}
for line in sys.stdin.read().splitlines():
    done = CliRunner().invoke(main_cli, line.format(**names).split())
    error = done.exception
    said = "" if error is None else f"{getattr(error, 'message', error)} {getattr(error, 'details', '')}"
    outcomes[line] = done.exit_code, done.output, said

def known(command, path):
    if not isinstance(command, click.Group):
        return [path]
    context = click.Context(command)
    return [each for name in command.list_commands(context) for each in known(command.get_command(context, name), f"{path} {name}")]

print(json.dumps([outcomes, names, known(main_cli, "")]))
"""
# What a line does is seen by those behind it.
LINES = """\
version
auth status
auth whoami
model list
model list TINY
run list --limit 0 -c id,model,owner,lora,updated,status,checkpoint,checkpoint_time
-f json run list
run info {run}
run info nobody:train:0
checkpoint list
-f json checkpoint list --run-id {run}
-f json checkpoint info {state}
checkpoint info {state}x
checkpoint publish {sampler}
checkpoint set-ttl {state} --remove
checkpoint set-ttl {sampler} --ttl 7200
checkpoint set-ttl {sampler} --ttl 0
-f json checkpoint list --limit 0
checkpoint unpublish {sampler}
-f json checkpoint info {sampler}
checkpoint download {state} -o {directory}
-f json checkpoint download {external} -o {directory}
session export-trace {session} -o {directory}/session.pftrace
billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z
billing checkpoint-storage
checkpoint delete -y {sampler} {sampler}x
checkpoint delete -y --run-id {run} --type external_weights --after 2020-01-01
-f json checkpoint list --run-id {run} --limit 0
-f json checkpoint delete -y --run-id {run}
checkpoint list --limit 0"""


class Outcome(NamedTuple):
    status: int
    output: str
    error: str


class Commands(NamedTuple):
    outcomes: dict[str, Outcome]
    names: dict[str, str]
    known: list[str]
    """All commands that the SDK has."""
    directory: Path

    def works(self, line: str) -> str:
        """What the command wrote."""
        outcome = self.outcomes[line]
        assert outcome.status == 0, outcome
        return outcome.output

    def refused(self, line: str) -> str:
        """What the command said was wrong."""
        outcome = self.outcomes[line]
        assert outcome.status == 1, outcome
        return outcome.error


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    place = tmp_path_factory.mktemp("commands")
    downloads = place / "downloads"
    with running_server(place / "data", tiny_model(place / "model")) as server:
        user = {
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": "tml-anything",
            "HOME": str(place),
            "COLUMNS": "300",
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, BASE_MODEL, str(downloads)],
            input=LINES,
            env={**os.environ, **user, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes, names, known = json.loads(done.stdout.splitlines()[-1])
    return Commands(
        {line: Outcome(*outcome) for line, outcome in outcomes.items()}, names, known, downloads
    )


def test_the_server_and_its_models_are_shown(commands: Commands):
    assert commands.works("version").startswith("tinker ")
    assert "Tinker accessible: yes" in commands.works("auth status")
    assert BASE_MODEL in commands.works("model list")
    assert BASE_MODEL in commands.works("model list TINY")


def test_runs_are_listed_and_described(commands: Commands):
    run = commands.names["run"]
    table = commands.works(
        "run list --limit 0 -c id,model,owner,lora,updated,status,checkpoint,checkpoint_time"
    )
    for cell in ("1 training run", run, BASE_MODEL, "everybody", "Rank 4", "OK", "weights/state"):
        assert cell in table
    (row,) = json.loads(commands.works("-f json run list"))["runs"]
    assert row["last_checkpoint"]["tinker_path"] == commands.names["state"]
    assert row["last_sampler_checkpoint"]["tinker_path"] == commands.names["sampler"]
    assert "commands" in commands.works("run info {run}")
    assert "there is no such model" in commands.refused("run info nobody:train:0")


def test_checkpoints_are_listed_and_described(commands: Commands):
    paths = [commands.names[kind] for kind in ("external", "sampler", "state")]
    table = commands.works("checkpoint list")
    assert all(path in table for path in ("3 checkpoints", *paths))
    listed = json.loads(commands.works("-f json checkpoint list --run-id {run}"))["checkpoints"]
    assert {item["tinker_path"] for item in listed} == set(paths)
    info = json.loads(commands.works("-f json checkpoint info {state}"))
    assert (info["checkpoint_type"], info["lora_rank"], info["user_metadata"]) == (
        "training",
        4,
        {"why": "commands"},
    )
    assert info["expires_at"] is not None
    assert "not found" in commands.refused("checkpoint info {state}x")


def test_checkpoints_can_be_published_and_given_a_ttl(commands: Commands):
    for line in (
        "checkpoint publish {sampler}",
        "checkpoint unpublish {sampler}",
        "checkpoint set-ttl {state} --remove",
        "checkpoint set-ttl {sampler} --ttl 7200",
    ):
        assert commands.works(line) == ""
    assert "ttl_seconds=0" in commands.refused("checkpoint set-ttl {sampler} --ttl 0")
    listed = json.loads(commands.works("-f json checkpoint list --limit 0"))["checkpoints"]
    found = {item["checkpoint_type"]: item for item in listed}
    assert found["sampler"]["public"]
    assert found["sampler"]["expires_at"] is not None
    assert found["training"]["expires_at"] is None
    assert not json.loads(commands.works("-f json checkpoint info {sampler}"))["public"]


def test_checkpoints_can_be_downloaded(commands: Commands):
    """A training checkpoint is exported through a run of its own, whose export is deleted."""
    assert "adapter_model.safetensors" in commands.works(
        "checkpoint download {state} -o {directory}"
    )
    commands.works("-f json checkpoint download {external} -o {directory}")
    state, external = (
        commands.directory / commands.names[kind].removeprefix("tinker://").replace("/", "_")
        for kind in ("state", "external")
    )
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (state / name).read_bytes() == (external / name).read_bytes()


def test_checkpoints_can_be_deleted(commands: Commands):
    one_of_two = commands.works("checkpoint delete -y {sampler} {sampler}x")
    assert "Deleted 1 checkpoint(s)" in one_of_two
    assert "there is no checkpoint" in one_of_two
    assert "Deleted 1" in commands.works(
        "checkpoint delete -y --run-id {run} --type external_weights --after 2020-01-01"
    )
    (left,) = json.loads(commands.works("-f json checkpoint list --run-id {run} --limit 0"))[
        "checkpoints"
    ]
    assert left["tinker_path"] == commands.names["state"]
    assert json.loads(commands.works("-f json checkpoint delete -y --run-id {run}")) == {
        "deleted_count": 1,
        "failed": [],
    }
    assert "No checkpoints found" in commands.works("checkpoint list --limit 0")


def test_the_timeline_of_a_session_is_exported(commands: Commands):
    commands.works("session export-trace {session} -o {directory}/session.pftrace")
    trace = (commands.directory / "session.pftrace").read_bytes()
    for text in (f"session {commands.names['session']}", commands.names["run"], "save_weights"):
        assert text.encode() in trace


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("auth whoami", "whoami"),
        ("billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z", "bills nothing"),
        ("billing checkpoint-storage", "bills nothing"),
    ],
)
def test_unsupported_sdk_commands_are_rejected(commands: Commands, line: str, sentence: str):
    assert sentence in commands.refused(line)


# They need a person, an account elsewhere, or only forget a key that was kept.
ELSEWHERE = {"auth login", "auth logout", "checkpoint push-hf"}


def test_every_sdk_command_has_a_test(commands: Commands):
    tried = [line.removeprefix("-f json ") for line in LINES.splitlines()]
    known = {name.strip() for name in commands.known}
    assert {
        name for name in known if not any(f"{line} ".startswith(f"{name} ") for line in tried)
    } == ELSEWHERE
