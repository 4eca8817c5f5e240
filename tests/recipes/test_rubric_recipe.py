"""The rubric recipe from its options to its files, with a tiny model as policy and as judge, and
its generated rows.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from metric_tables import definition_of

from planish import ServiceClient
from planish.datasets.layouts import conversation_of
from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import rubric, rubric_judge, sum_tasks
from planish.recipes.training_run import read_options
from planish.rubric.rubrics import read_rubric_row
from planish.testing import tiny_model


@pytest.fixture
def options(small_model, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))

    def read(*arguments):
        given = [
            f"model_name={small_model}",
            f"log_path={tmp_path / 'run'}",
            "lora_rank=4",
            "max_steps=2",
            "eval_every=1",
        ]
        sizes = ["batch_size=2", "group_size=2", "max_tokens=6", "judge_max_tokens=6"]
        return read_options(rubric.Options, {}, [*given, *sizes, *arguments])

    return read


@pytest.fixture
def rows(tmp_path):
    """Return a file of 8 rows whose judge may write anything: the beginning of its reply is the
    score.
    """
    item = {
        "rubric_str": "Is it a greeting?",
        "extraction_regex": r"\A(?:[\s\S]?)()",
        "grader_output_format_instruction": "Say anything.",
        "word_scores": {"": 1, "No": 0},
    }
    path = tmp_path / "rows.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}."}], "rubric_items": [item]}
        for n in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_a_run_with_the_base_model_as_judge(options, rows, tmp_path):
    given = [f"dataset={rows}", "test_size=2", "unfinished_reward=-0.5"]
    path = rubric.main(options(*given))
    rubric.main(options(*given, "max_steps=3"))
    metrics = read_rows(path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert metrics[-1]["test/env/all/total_episodes"] == 2
    assert all(-0.5 <= row["test/env/all/reward/total"] <= 1 for row in metrics)
    assert [
        key for row in metrics for key in row if key != "step" and definition_of(key) is None
    ] == []
    config = json.loads((path / "config.json").read_text())
    assert config["recipe_name"] == "rubric"
    assert config["dataset_builder"]["judge_name"].endswith("greedy, at most 6 tokens")
    assert str(rows) in json.dumps(config["dataset_builder"]["rows"])
    with pytest.raises(UserError, match="judge_name"):
        rubric.main(options(*given, "max_steps=4", "judge_max_tokens=7"))


def test_a_trained_judge(options, small_model, rows, tmp_path):
    with ServiceClient() as client:
        path = (
            client.create_lora_training_client(base_model=small_model, rank=2)
            .save_state("judge")
            .result()
            .path
        )
    run = rubric.main(
        options(f"dataset={rows}", "test_size=0", f"judge_checkpoint={path}", "max_steps=1")
    )
    assert path in json.loads((run / "config.json").read_text())["dataset_builder"]["judge_name"]


def test_a_trained_judge_is_read_with_its_own_base_model_and_format(
    options, small_model, tmp_path_factory
):
    """A judge reads text, so its tokenizer and chat format need not be the policy's."""
    other = str(tiny_model(tmp_path_factory.mktemp("other"), seed=1))
    with ServiceClient() as client:
        training_client = client.create_lora_training_client(
            base_model=other, rank=2, user_metadata={"renderer_name": "role_colon"}
        )
        path = training_client.save_state("judge").result().path
        judge = rubric.engine_judge(options(f"judge_checkpoint={path}"), client)
        assert judge.renderer.name == "role_colon"
        assert judge.renderer.tokenizer.name_or_path == other
        given = ["judge_renderer_name=qwen3_instruct", f"judge_model={other}"]
        judge = rubric.engine_judge(options(f"judge_checkpoint={path}", *given), client)
        assert judge.renderer.name == "qwen3_instruct"
        wrong = options(f"judge_checkpoint={path}", f"judge_model={small_model}")
        with pytest.raises(UserError, match=f"judge_model: .* on the base model {other}, not on"):
            rubric.engine_judge(wrong, client)


def test_a_judge_with_too_short_a_context_is_named_with_the_row(
    options, rows, tmp_path, tmp_path_factory
):
    lines = rows.read_text().splitlines()
    long = json.loads(lines[5])
    long["messages"][0]["content"] *= 100
    rows.write_text("\n".join([*lines[:5], json.dumps(long), *lines[6:]]) + "\n")
    judge = tiny_model(tmp_path_factory.mktemp("judge"), max_context=800)
    given = [f"dataset={rows}", "test_size=0", f"judge_model={judge}", "max_steps=1"]
    message = rf"the judge \({judge}.* has a context window of 800 .* For .*rows.jsonl, line 6 and"
    with pytest.raises(UserError, match=message):
        rubric.main(options(*given))
    assert not (tmp_path / "run").exists()
    rows.write_text("\n".join([*lines[:5], *lines[6:]]) + "\n")
    rubric.main(options(*given))


class Judge(BaseHTTPRequestHandler):
    """An endpoint whose model has a context window of 400 tokens, one per character. It counts
    tokens if `counts`.
    """

    counts = True

    def do_GET(self):
        self.answer({"data": [{"id": "judge", "max_model_len": 400}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and self.counts:
            self.answer({"count": sum(len(message["content"]) for message in body["messages"])})
        elif self.path == "/tokenize":
            self.answer({}, 404)
        else:
            self.answer({"choices": [{"message": {"role": "assistant", "content": "Yes"}}]})

    def answer(self, fields, status=200):
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args): ...


@pytest.fixture(params=[True, False], ids=["counts", "does not count"])
def judge_url(request):
    handler = type("Handler", (Judge,), {"counts": request.param})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", request.param
        server.shutdown()


def test_a_judge_behind_an_endpoint_with_too_short_a_context_is_named_with_the_row(
    options, rows, tmp_path, judge_url, capsys
):
    url, counts = judge_url
    lines = rows.read_text().splitlines()
    long = json.loads(lines[5])
    long["messages"][0]["content"] *= 100
    rows.write_text("\n".join([*lines[:5], json.dumps(long), *lines[6:]]) + "\n")
    given = [f"dataset={rows}", "test_size=0", f"judge_url={url}", "judge_model=judge"]
    if counts:
        message = r"the judge \(judge, of .* context window of 400 .* For .*rows.jsonl, line 6 and"
        with pytest.raises(UserError, match=message):
            rubric.main(options(*given, "max_steps=1"))
        assert not (tmp_path / "run").exists()
    else:
        rubric.main(options(*given, "max_steps=1"))
        assert re.search(
            r"the judge \(judge, of .* does not tell how long", capsys.readouterr().out
        )


def test_an_invalid_row_is_rejected_with_its_number_before_loading(options, rows, tmp_path):
    lines = rows.read_text().splitlines()
    broken = json.loads(lines[5])
    broken["rubric_items"][0]["wieght"] = 2
    rows.write_text("\n".join([*lines[:5], json.dumps(broken), *lines[6:]]) + "\n")
    with pytest.raises(UserError, match=r"line 6, rubric item 1 has unknown fields wieght"):
        rubric.main(options(f"dataset={rows}", "test_size=3"))
    rows.write_text("\n".join([*lines[:5], "{", *lines[6:]]))
    with pytest.raises(UserError, match="line 6 is not JSON"):
        rubric.main(options(f"dataset={rows}", "test_size=3"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch_size=0"], "batch_size=0"),
        (["group_size=1"], "group_size=1"),
        (["largest=0"], "largest=0"),
        (["test_size=-1"], "test_size=-1"),
        (["test_size=500"], "test_size=500: there are 231 sums"),
        (["judge_max_tokens=0"], "judge_max_tokens=0"),
        (["judge_key_env=HOME"], "judge_key_env=HOME is for a judge behind judge_url"),
        (["judge_retries=2"], "judge_retries=2 is for a judge behind judge_url"),
        (["judge_extra.top_p=0.5"], "judge_extra=.* is for a judge behind judge_url"),
        (["rollout_processes=2"], "rollout_processes=2"),
        (
            ["judge_url=http://127.0.0.1:1/v1", "judge_checkpoint=a"],
            "judge_checkpoint=a is for a judge on the engine",
        ),
        (["judge_url=127.0.0.1", "judge_model=a"], "base_url='127.0.0.1'"),
        (["judge_url=http://127.0.0.1:1/v1", "judge_key_env=NOT_THERE"], "NOT_THERE"),
        (["dataset=a.jsonl", "largest=3"], "largest=3 is for generated sums"),
        (["dataset=a.jsonl", "shown_verdicts=0"], "shown_verdicts=0 is for generated sums"),
        (["shown_verdicts=6"], "shown_verdicts=6: give 0 to 5"),
        (["dataset=not-there.jsonl"], "not-there.jsonl: no such file"),
    ],
)
def test_an_invalid_option_is_rejected(options, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        rubric.main(options(*arguments))
    assert not (tmp_path / "run").exists()


def test_generated_rubrics_hold_out_their_sums_in_either_order():
    rows = sum_tasks.generated_rubrics(5, 6, seed=0)
    assert (len(rows.train), len(rows.test)) == (
        36 - 6 - sum(len(set(sum_of(row))) > 1 for row in rows.test),
        6,
    )
    held_out = {frozenset(sum_of(row)) for row in rows.test}
    assert held_out.isdisjoint(frozenset(sum_of(row)) for row in rows.train)
    assert (
        rows
        == sum_tasks.generated_rubrics(5, 6, seed=0)
        != sum_tasks.generated_rubrics(5, 6, seed=1)
    )
    for row in rows.train:
        left, right = sum_of(row)
        [criterion] = row.criteria
        assert criterion.is_met(f"{left} + {right} = {left + right}")
        assert not criterion.is_met(f"{left} + {right} = {left + right + 10}")
        as_file = {
            "rubric_str": criterion.rubric_str,
            "name": "result",
            "word_scores": {"Yes": 1, "No": 0},
        }
        read_rubric_row({"messages": list(row.messages), "rubric_items": [as_file]}, "a row")


def sum_of(row):
    left, right = re.findall(r"\d+", row.messages[-1]["content"])
    return int(left), int(right)


def test_a_judge_is_shown_as_many_verdicts_as_are_asked_for():
    [row, *_] = sum_tasks.generated_rubrics(5, 6, seed=0, shown_verdicts=3).train
    [criterion] = row.criteria
    assert len(criterion.examples) == 3
    assert {criterion.read_score(example.reply) for example in criterion.examples} == {0.0, 1.0}
    for example in criterion.examples:
        assert criterion.read_score(example.reply) == criterion.is_met(example.answer)


def test_conversations_to_train_a_judge_on(tmp_path):
    path = rubric_judge.main(rubric_judge.Options(path=str(tmp_path / "judge.jsonl"), examples=200))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 200
    conversations: Any = [conversation_of(row, "a row") for row in rows]
    verdicts = [messages[-1]["content"] for messages in conversations]
    assert sorted(set(verdicts)) == ["<score>No</score>", "<score>Yes</score>"]
    assert verdicts.count("<score>Yes</score>") == 100
    for row in rows:
        shown, verdict = row["messages"]
        [wanted] = re.findall(r"the result is (\d+)\?", shown["content"])
        answer = shown["content"].split("answer:\n> ")[1].split("\n")[0]
        assert (re.findall(r"\d+", answer)[-1] == wanted) == ("Yes" in verdict["content"])
    with pytest.raises(UserError, match="examples=1"):
        rubric_judge.main(rubric_judge.Options(path=str(tmp_path / "more.jsonl"), examples=1))
