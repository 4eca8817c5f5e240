"""The actions of the console: who may act, replay, stop and resume."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from digit_env import DigitsBuilder
from http_thread import serving_app
from sample_runs import write_run

from planish import ServiceClient
from planish.commands.cli import main as planish
from planish.console.actions import Actions
from planish.console.answers import Answers
from planish.console.app import create_app
from planish.console.catalog import Catalog
from planish.console.recorded_command import command_text
from planish.files import read_rows, write_atomically
from planish.processes.interruption import Stopped
from planish.runlog.run_directory import COMMAND, STOP_REQUEST, RunDirectory, request_stop
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main

KEY = "secret key"
OWN = {"X-Planish-Console": "1"}


@pytest.fixture
def http(tmp_path) -> Iterator[httpx2.Client]:
    """A client of a console that may act on the runs of the test's directory."""
    catalog = Catalog([tmp_path])
    actions = Actions(catalog)
    with (
        serving_app(create_app(Answers(catalog), actions, KEY)) as url,
        httpx2.Client(base_url=url, timeout=150) as client,
    ):
        yield client
    actions.close()


def with_key(http: httpx2.Client) -> httpx2.Client:
    response = http.get("/", params={"key": KEY})
    assert response.status_code == 303
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    return http


def act(http: httpx2.Client, action: str, headers=OWN, **request) -> tuple[int, dict]:
    response = http.post(f"/api/{action}", json=request, headers=headers)
    return response.status_code, response.json() if response.content[:1] == b"{" else {}


def test_actions_need_the_key_of_the_address(http, tmp_path):
    write_run(tmp_path / "a", steps=1)
    run = f"{tmp_path.name}/a"
    assert not http.get("/api/actions").json()["allowed"]
    assert http.get("/", params={"key": "wrong"}).status_code == 200
    for action in ("stop", "resume", "replay", "alternatives", "continue", "chat"):
        status, answer = act(http, action, run=run)
        assert status == 403
        assert "by the address that it printed" in answer["error"]
    with_key(http)
    assert http.get("/api/actions").json()["allowed"]
    assert act(http, "stop", {}, run=run)[0] == 403
    origin = {**OWN, "Origin": "http://evil.example"}
    assert act(http, "stop", origin, run=run)[0] == 403
    assert act(http, "stop", run=run)[0] == 400


def test_a_console_without_actions_has_no_such_address(tmp_path):
    app = create_app(Answers(Catalog([tmp_path])))
    with serving_app(app) as url, httpx2.Client(base_url=url, timeout=60) as client:
        assert client.get("/", params={"key": ""}).status_code == 200
        assert not client.get("/api/actions").json()["allowed"]
        assert act(client, "stop", run="a")[0] == 404


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null"])
def test_a_wrong_body_is_rejected(http, body):
    with_key(http)
    response = http.post("/api/stop", content=body, headers=OWN)
    assert response.status_code == 400


def test_only_a_running_run_is_asked_to_stop(http, tmp_path):
    with_key(http)
    run = f"{tmp_path.name}/a"
    path = write_run(tmp_path / "a", steps=1, num_steps=3, checkpoint_at=0)
    status, answer = act(http, "stop", run=run)
    assert status == 400
    assert "nothing to stop" in answer["error"]
    assert act(http, "stop", run="nobody")[0] == 404
    config = json.loads((path / "config.json").read_text())
    with RunDirectory(path, config) as directory:
        assert http.get("/api/runs").json()["runs"][0]["state"] == "running"
        assert act(http, "stop", run=run)[0] == 200
        assert act(http, "resume", run=run)[0] == 400
        assert directory.take_stop_request()
        assert not directory.take_stop_request()


def test_a_run_is_resumed_by_its_recorded_command(http, tmp_path):
    with_key(http)
    run = f"{tmp_path.name}/a"
    path = write_run(tmp_path / "a", steps=2, num_steps=3, is_final=False)
    assert "no command.json" in act(http, "resume", run=run)[1]["error"]
    script = "import sys; open('resumed.txt', 'w').write(sys.argv[1]); print('hello')"
    command = {"command": [sys.executable, "-c", script, "a b"], "directory": str(path)}
    write_atomically(path / COMMAND, json.dumps(command))
    shown = http.get("/api/checkpoints", params={"run": run}).json()["command"]
    assert shown == command_text(path)
    assert shown.endswith("'a b'")
    assert act(http, "resume", run=run)[0] == 200
    end = time.monotonic() + 60
    while not (path / "resumed.log").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert (path / "resumed.txt").read_text() == "a b"


@pytest.mark.parametrize("content", ["[]", "{}", '{"command": "ls", "directory": "/"}', "{"])
def test_a_damaged_command_is_not_started(http, tmp_path, content):
    with_key(http)
    path = write_run(tmp_path / "a", steps=2, num_steps=3, is_final=False)
    (path / COMMAND).write_text(content)
    assert act(http, "resume", run=f"{tmp_path.name}/a")[0] == 400


def test_a_finished_run_is_not_resumed(http, tmp_path):
    with_key(http)
    write_run(tmp_path / "a", steps=2)
    assert "finished" in act(http, "resume", run=f"{tmp_path.name}/a")[1]["error"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def config_of(model: Path, path: Path) -> Config:
    return Config(
        learning_rate=1e-2,
        dataset_builder=DigitsBuilder(batches=4),
        model_name=str(model),
        lora_rank=4,
        max_tokens=6,
        log_path=str(path),
        eval_every=0,
        save_every=0,
    )


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_and_resumes(model, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        RunDirectory(path, {}).close()
        request_stop(path)  # a request from before the run is dropped
        config = config_of(model, path)
        log = RunDirectory.log

        def log_and_ask(self, step, metrics):
            log(self, step, metrics)
            request_stop(path)

        monkeypatch.setattr(RunDirectory, "log", log_and_ask)
        with pytest.raises(Stopped) as stopped:
            asyncio.run(main(config, client))
        monkeypatch.undo()
        assert stopped.value.code == 0
        assert [row["step"] for row in read_rows(path / "metrics.jsonl")] == [0]
        assert [row["batch"] for row in read_rows(path / "checkpoints.jsonl")] == [1]
        assert not (path / STOP_REQUEST).exists()
        recorded = json.loads((path / COMMAND).read_text())
        assert recorded["command"] == sys.orig_argv
        asyncio.run(main(config, client))
        assert [row["step"] for row in read_rows(path / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_replay_over_http_is_bit_equal(model, http, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    with_key(http)
    with ServiceClient() as client:
        asyncio.run(main(config_of(model, tmp_path / "run"), client))
    run = f"{tmp_path.name}/run"
    status, answer = act(http, "replay", run=run, split="train", step=0, group=1)
    assert status == 200, answer
    assert [turn["is_equal"] for turn in answer["turns"]] == [True] * 4
    final = read_rows(tmp_path / "run/checkpoints.jsonl")[-1]["sampler_path"]
    status, other = act(http, "replay", run=run, step=0, group=1, checkpoint=final)
    assert status == 200
    assert any(turn["first_difference"] is not None for turn in other["turns"])
    status, answer = act(http, "replay", run=run, step=2, group=1)
    assert status == 400
    assert "were not saved" in answer["error"]
    assert act(http, "replay", run=run, step="2", group=1)[0] == 400
    place = {"run": run, "step": 0, "group": 1, "sample": 0, "turn": 1, "token": 1}
    status, answer = act(http, "alternatives", **place)
    assert status == 200
    assert sum(each["is_recorded"] for each in answer["alternatives"]) <= 1
    status, answer = act(http, "continue", **place, tokens=[65])
    assert status == 200
    assert answer["turn"]["answer_ids"][0] == 65
    for wrong in ({"token": -1}, {"token": 999}, {"turn": True}, {"tokens": ["A"]}, {"tokens": []}):
        assert act(http, "continue", **{**place, "tokens": [65], **wrong})[0] == 400, wrong


def chat(http: httpx2.Client, **request) -> list[dict]:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **request}
    response = http.post("/api/chat", json=body, headers=OWN)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.slow
def test_a_chat_streams_the_answer_of_a_checkpoint(model, http, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    with_key(http)
    with ServiceClient() as client:
        asyncio.run(main(config_of(model, tmp_path / "run"), client))
    run = f"{tmp_path.name}/run"
    final = read_rows(tmp_path / "run/checkpoints.jsonl")[-1]["sampler_path"]
    first = chat(http, run=run, model=final, seed=1)
    assert first[-1]["num_tokens"] == 8
    assert first[-1]["stop_reason"] == "length"
    assert "".join(part["text"] for part in first[:-1])
    assert chat(http, run=run, model=final, seed=1) == first
    assert chat(http, run=run, model="", seed=1)[-1]["num_tokens"] <= 8


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"messages": []}, "chat needs messages"),
        ({"messages": [{"role": "user"}]}, "chat needs messages"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"seed": "x"}, "seed='x'"),
    ],
)
def test_a_wrong_chat_is_rejected(http, tmp_path, wrong, message):
    with_key(http)
    write_run(tmp_path / "a", steps=1)
    request = {"run": f"{tmp_path.name}/a", "messages": [{"role": "user", "content": "hi"}]}
    status, answer = act(http, "chat", **{**request, **wrong})
    assert status == 400
    assert message in answer["error"]


@pytest.mark.slow
def test_the_command_prints_an_address_with_a_key(tmp_path):
    command = [sys.executable, "-m", "planish", "console", str(tmp_path), "--port", "0"]
    for options, has_key in (((), False), (("--allow-actions",), True)):
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                assert ("?key=" in line) == has_key
                assert httpx2.get(line.split()[2], timeout=60).status_code in (200, 303)
            finally:
                process.terminate()


def test_the_console_listens_on_this_machine_only(capsys):
    assert planish(["console", "--host", "0.0.0.0"]) == 1
    assert "ssh -L 6160:127.0.0.1:6160" in capsys.readouterr().err
