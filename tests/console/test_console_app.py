"""The console over HTTP: data of every view, damaged runs, and requests of other web pages."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from http_thread import serving_app
from rollout_samples import NASTY, group, single
from sample_runs import questions_of_step, rl_metrics, write_run

from planish.console.answers import Answers
from planish.console.app import create_app
from planish.console.catalog import Catalog
from planish.console.web import CSP, STATIC
from planish.errors import UserError
from planish.files import RowFile, write_atomically
from planish.reports.rollout_index import INDEX


class Console:
    """A console on a socket, with a client."""

    def __init__(self, url: str) -> None:
        self.http = httpx2.Client(base_url=url, timeout=120)

    def get(self, path: str, **params) -> dict:
        response = self.http.get(f"/api/{path}", params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, path: str, **params) -> tuple[int, str]:
        response = self.http.get(f"/api/{path}", params=params)
        return response.status_code, response.json()["error"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer) -> Path:
    """Two runs that differ in one option; the first has rollouts and evaluations."""
    root = tmp_path_factory.mktemp("served") / "runs"
    write_run(root / "first", tokenizer, steps=5, eval_every=2)
    write_run(root / "second", steps=3, num_steps=6, is_final=False, learning_rate=3e-4)
    return root


@pytest.fixture(scope="module")
def console(runs) -> Iterator[Console]:
    with serving_app(create_app(Answers(Catalog([runs])))) as url:
        found = Console(url)
        yield found
        found.http.close()


@pytest.fixture
def own_console(tmp_path) -> Iterator[Console]:
    """A console of the test's own directory."""
    with serving_app(create_app(Answers(Catalog([tmp_path])))) as url:
        found = Console(url)
        yield found
        found.http.close()


def test_the_list_of_runs(console):
    answer = console.get("runs")
    by_id = {run["id"]: run for run in answer["runs"]}
    first, second = by_id["runs/first"], by_id["runs/second"]
    assert first["state"] == "finished"
    assert first["step"] == 4
    assert first["num_steps"] == 5
    assert first["reward_name"] == "env/all/reward/total"
    assert first["reward"] == pytest.approx(rl_metrics(4, 5)["env/all/reward/total"])
    assert len(first["sparkline"]) == 5
    assert first["seconds"] == 10
    assert first["model"] == "some/tiny-model"
    assert first["recipe"] == "rl_basic"
    assert second["state"] == "stopped"
    assert second["num_steps"] == 6
    assert answer["sweeps"] == [
        {
            "option": "learning_rate",
            "runs": [{"id": "runs/first", "value": 1e-4}, {"id": "runs/second", "value": 3e-4}],
        }
    ]


def test_series_of_several_runs_and_metrics(console):
    answer = console.get(
        "curves", run=["runs/first", "runs/second"], metric=["env/all/correct", "no such metric"]
    )
    found = {(one["run"], one["metric"]): one for one in answer["series"]}
    assert len(found) == 4
    assert found["runs/first", "env/all/correct"]["x"] == [0, 1, 2, 3, 4]
    assert found["runs/second", "env/all/correct"]["steps"] == [0, 1, 2]
    assert found["runs/first", "no such metric"]["y"] == []
    timed = console.get("curves", run="runs/first", metric="env/all/correct", axis="time")
    assert timed["series"][0]["x"] == [2, 4, 6, 8, 10]


def test_rollouts_are_filtered_by_reward_text_and_kind(console):
    everything = console.get("rollouts", run="runs/first", limit=1000)
    assert everything["total"] == everything["matched"] == 8 * (5 + 3)
    assert dict(everything["choices"]["split"]) == {"train": 40, "eval/test": 24}
    wrong = console.get("rollouts", run="runs/first", reward_to=0.1, split="train", limit=1000)
    assert wrong["rows"]
    assert {row["reward"] for row in wrong["rows"]} == {0}
    assert {bar["low"] for bar in wrong["histogram"]} == {0, 1}, "the bars ignore their own filter"
    found = console.get("rollouts", run="runs/first", text="IT IS 9", limit=1000)
    assert found["matched"] == sum("It is 9." in row["answer"] for row in everything["rows"]) > 0
    assert all("It is 9." in row["answer"] for row in found["rows"])
    assert {row["question"] for row in found["rows"]} == {"What is 0 + 2?"}


def test_a_group_has_its_answers_and_neighbours(console):
    answer = console.get("group", run="runs/first", split="train", step=3, group=1)
    assert [rollout["sample"] for rollout in answer["rollouts"]] == [0, 1, 2, 3]
    assert answer["previous"] == {"split": "train", "step": 3, "group": 0}
    assert answer["next"] is None
    [turn] = answer["rollouts"][0]["texts"]["turns"]
    assert turn["observation"] == "What is 1 + 2?"
    assert turn["logprobs"][0] == -0.01
    assert len(turn["answer_ids"]) == turn["answer_tokens"] == len(turn["logprobs"])


def test_evaluations_compare_each_question_before_and_after(console):
    answer = console.get("evaluations", run="runs/first")
    assert [row["step"] for row in answer["scores"]] == [0, 2, 4]
    [split] = answer["splits"]
    assert split["first_step"] == 0
    assert split["last_step"] == 4
    rewards = [
        [sum(rollout.group.get_total_rewards()) / 4 for rollout in questions_of_step(step)]
        for step in (0, 4)
    ]
    assert [(one["before"], one["after"]) for one in split["questions"]] == list(
        zip(*rewards, strict=True)
    )
    assert split["steps"][0]["mean"] == pytest.approx(sum(rewards[0]) / 2)


def test_checkpoints_have_commands_and_scores(console, monkeypatch, tmp_path):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "none"))
    answer = console.get("checkpoints", run="runs/first")
    [row] = answer["checkpoints"]
    assert row["batch"] == 5
    commands = [command for _, command in row["commands"]]
    assert "planish export tinker://abc:train:0/sampler_weights/final DIRECTORY" in commands


def test_options_are_shown_by_dotted_names(console):
    config = console.get("run", run="runs/first")["config"]
    assert config["dataset_builder.group_size"] == "4"
    assert config["model_name"] == "some/tiny-model"


def test_an_unchanged_answer_is_not_sent_again(console):
    path = "/api/curves?run=runs/first&metric=env/all/correct"
    first = console.http.get(path)
    second = console.http.get(path, headers={"If-None-Match": first.headers["ETag"]})
    assert second.status_code == 304
    assert second.content == b""


@pytest.mark.parametrize(
    ("path", "params", "status", "message"),
    [
        ("curves", {"run": "nobody"}, 404, "there is no run 'nobody'"),
        ("run", {}, 404, "there is no run ''"),
        ("run", {"run": "../../etc"}, 404, "there is no run '../../etc'"),
        ("curves", {"run": "runs/first", "points": "many"}, 400, "points='many': give a number"),
        ("curves", {"run": "runs/first", "points": "0.5"}, 400, "points=0.5: give a whole number"),
        ("curves", {"run": "runs/first", "axis": "z"}, 400, "axis='z'"),
        ("curves", {"run": "runs/first", "from": "nan"}, 400, "from='nan': give a number"),
        ("rollouts", {"run": "runs/first", "limit": "-1"}, 400, "limit=-1"),
        ("rollouts", {"run": "runs/first", "reward_from": "x"}, 400, "reward_from='x'"),
    ],
)
def test_wrong_parameters_are_named(console, path, params, status, message):
    found_status, text = console.error(path, **params)
    assert found_status == status
    assert message in text


def test_a_growing_run_is_read_on(own_console, tmp_path):
    write_run(tmp_path / "a", steps=2, num_steps=9, checkpoint_at=0)
    run = f"{tmp_path.name}/a"
    own = own_console.get("curves", run=run, metric="optim/entropy")
    assert own["series"][0]["steps"] == [0, 1]
    with open(tmp_path / "a/metrics.jsonl", "ab") as file:
        file.write(json.dumps({"step": 2, **rl_metrics(2, 9)}).encode() + b"\n")
    grown = own_console.get("curves", run=run, metric="optim/entropy")
    assert grown["series"][0]["steps"] == [0, 1, 2]


def test_a_run_that_a_resume_rewrites_shows_its_new_rows(own_console, tmp_path, tokenizer):
    write_run(tmp_path / "a", tokenizer, steps=4, num_steps=9, checkpoint_at=0)
    run = f"{tmp_path.name}/a"
    assert own_console.get("rollouts", run=run)["total"] == 32
    for name in ("metrics.jsonl", INDEX):
        file = RowFile(tmp_path / "a" / name)
        file.keep(lambda row: row["step"] < 2)
        file.close()
    assert own_console.get("rollouts", run=run)["total"] == 16
    assert own_console.get("curves", run=run, metric="time/total")["series"][0]["x"] == [0, 1]


def test_damaged_and_missing_files_are_named_and_the_rest_works(own_console, tmp_path, tokenizer):
    run = write_run(tmp_path / "a", tokenizer, steps=3)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(lines[0] + b"{damaged\n" + lines[2] + lines[1][:20])
    (run / "config.json").write_text("[]")
    (run / "train_iteration_000001_rollouts.jsonl").write_bytes(b"other\n")
    os.remove(run / "train_iteration_000002_rollouts.jsonl")
    name = f"{tmp_path.name}/a"
    answer = own_console.get("curves", run=name, metric="optim/entropy")
    assert answer["series"][0]["steps"] == [0, 2]
    problems = answer["runs"][0]["problems"]
    assert any("metrics.jsonl, line 2 is not a JSON object" in text for text in problems)
    assert "config.json is not a JSON object" in problems
    assert own_console.get("runs")["runs"][0]["num_problems"] == 2
    by_step = [own_console.get("group", run=name, step=step, group=0) for step in range(3)]
    assert by_step[0]["rollouts"][0]["texts"]
    assert "another rollout at this place" in by_step[1]["rollouts"][0]["problem"]
    assert "cannot be read (No such file" in by_step[2]["rollouts"][0]["problem"]
    assert own_console.get("rollouts", run=name)["total"] == 24


def test_a_directory_without_a_run(own_console, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/readme.txt").write_text("nothing")
    answer = own_console.get("runs")
    assert answer["runs"] == []
    assert answer["roots"] == [str(tmp_path.resolve())]
    with pytest.raises(UserError, match="there is no such directory"):
        Catalog([tmp_path / "missing"])
    with pytest.raises(UserError, match="given twice"):
        Catalog([tmp_path, tmp_path])


def test_a_run_that_appears_later_is_found(tmp_path):
    now = 0.0
    catalog = Catalog([tmp_path], clock=lambda: now)
    assert catalog.runs() == []
    write_run(tmp_path / "deep/er/run", steps=1)
    now = 10.0
    [reader] = catalog.runs()
    assert reader.id == f"{tmp_path.name}/deep/er/run"
    shutil.rmtree(tmp_path / "deep")
    now = 20.0
    assert catalog.runs() == []
    with pytest.raises(LookupError, match="may have been moved"):
        catalog.run(reader.id)


def test_runs_of_the_public_cookbook(own_console, tmp_path, tokenizer):
    """They have the same files, but no index of rollouts and no lock."""
    run = write_run(tmp_path / "book", tokenizer, steps=2)
    shutil.rmtree(run / "rollouts")
    os.remove(run / ".lock")
    for path in run.glob("train_iteration_*"):
        path.unlink()
    answer = own_console.get("rollouts", run=f"{tmp_path.name}/book")
    assert answer["total"] == 16
    assert {row["tokens"] for row in answer["rows"]} == {9, 10}
    group_answer = own_console.get("group", run=f"{tmp_path.name}/book", step=1, group=1)
    assert "texts of this rollout were not written" in group_answer["rollouts"][0]["problem"]


@pytest.mark.parametrize(
    "file", ["../secret_rollouts.jsonl", "/etc/passwd", "config.json", "l_rollouts.jsonl"]
)
def test_an_index_cannot_name_other_files(own_console, tmp_path, tokenizer, file):
    secret = {"iteration": 0, "group_idx": 0, "traj_idx": 0, "turns": [], "secret": "text"}
    content = json.dumps(secret).encode()
    run = write_run(tmp_path / "a", tokenizer, steps=1)
    (tmp_path / "secret_rollouts.jsonl").write_bytes(content)
    (run / "l_rollouts.jsonl").symlink_to(tmp_path / "secret_rollouts.jsonl")
    row = {"step": 0, "split": "train", "group": 0, "sample": 0, "file": file, "offset": 0}
    write_atomically(run / INDEX, json.dumps({**row, "bytes": len(content)}) + "\n")
    answer = own_console.get("group", run=f"{tmp_path.name}/a", step=0, group=0)
    assert answer["rollouts"][0]["texts"] is None
    assert "no rollout file of this run" in answer["rollouts"][0]["problem"]


def test_text_of_any_kind_is_data_and_never_markup(own_console, tmp_path, tokenizer):
    rollouts = [group(0, [single(NASTY, NASTY, 1.0)], tags=[NASTY])]
    write_run(tmp_path / "a", tokenizer, steps=1, rollouts=lambda step: rollouts, recipe_name=NASTY)
    response = own_console.http.get("/api/rollouts", params={"run": f"{tmp_path.name}/a"})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["rows"][0]["tags"] == [NASTY]
    assert own_console.get("runs")["runs"][0]["recipe"] == NASTY


def test_lone_surrogates_and_huge_numbers_are_answered(own_console, tmp_path):
    run = write_run(tmp_path / "a", steps=1)
    (run / "config.json").write_text('{"model_name": "\\ud800", "seed": 1' + "0" * 400 + "}")
    assert own_console.get("runs")["runs"][0]["model"] == "\ud800"
    assert own_console.get("run", run=f"{tmp_path.name}/a")["config"]["seed"].startswith("1000")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/export?run=runs/first"])
def test_requests_of_other_web_pages_are_rejected(console, headers, path):
    response = console.http.get(path, headers=headers)
    assert response.status_code == 403
    assert "first" not in response.text


def test_a_post_needs_the_header_of_the_consoles_pages(console):
    assert console.http.post("/api/runs").status_code == 403
    own = {"X-Planish-Console": "1", "Origin": str(console.http.base_url).rstrip("/")}
    assert console.http.post("/api/runs", headers=own).status_code == 405


@pytest.mark.parametrize("path", ["/", "/rollouts", "/api/runs", "/static/app.js", "/nowhere"])
def test_every_response_has_the_security_headers(console, path):
    headers = console.http.get(path).headers
    assert headers["content-security-policy"] == CSP
    assert "unsafe" not in CSP
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd"]
)
def test_static_files_are_those_of_the_folder(console, path):
    assert console.http.get(path).status_code == 404


def test_no_module_turns_text_into_markup():
    """The pages show what a model wrote, so they only make text nodes."""
    markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(")
    for path in STATIC.glob("*.js"):
        assert not markup.search(path.read_text()), path
        assert len(path.read_text().splitlines()) <= 300


def test_the_exported_page_has_its_data_and_a_policy(console):
    response = console.http.get("/export", params={"run": ["runs/first", "runs/second"]})
    assert "attachment" in response.headers["content-disposition"]
    page = response.text
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    data = re.search(r'<script type="application/json" id="export-data">(.*?)</script>', page)
    assert data is not None
    answers = json.loads(data[1])["answers"]
    assert "run?run=runs%2Ffirst" in answers
    assert any(key.startswith("curves?axis=time") for key in answers)
    assert console.http.get("/export", params={"run": "nobody"}).status_code == 404


def test_an_exported_text_cannot_end_its_element(own_console, tmp_path):
    write_run(tmp_path / "a", steps=1, recipe_name="</script><script>alert(1)</script><!--")
    page = own_console.http.get("/export", params={"run": f"{tmp_path.name}/a"}).text
    assert "alert(1)</script>" not in page
    assert "\\u003c/script>" in page


def test_reading_leaves_the_files_of_a_run_alone(own_console, tmp_path, tokenizer):
    run = write_run(tmp_path / "a", tokenizer, steps=2)
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    name = f"{tmp_path.name}/a"
    for path in ("runs", "run", "rollouts", "evaluations", "findings", "checkpoints"):
        own_console.get(path, run=name)
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before


def test_the_vendored_chart_library_is_unchanged():
    for line in (STATIC / "uplot/SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((STATIC / "uplot" / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (STATIC / "uplot/LICENSE").read_text()


def test_findings_of_a_run(own_console, tmp_path):
    def cut_off(step, num_steps):
        return rl_metrics(step, num_steps, **{"env/all/stop/max_tokens": 0.9})

    write_run(tmp_path / "a", steps=12, metrics=cut_off)
    found = own_console.get("findings", run=f"{tmp_path.name}/a")["findings"]
    assert [finding["rule"] for finding in found] == ["cut-off"]
    assert "90% of the last answers reached max_tokens=64" in found[0]["reason"]
