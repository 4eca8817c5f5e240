"""`planish` lists and downloads models, converts traces, and reports errors without a traceback."""

import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from planish.commands.cli import main
from planish.runlog.spans import Spans, TraceFile
from planish.testing import tiny_model


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    directory = tiny_model(tmp_path / "tiny")
    monkeypatch.setenv("PLANISH_MODELS", f"mine={directory}")
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "home"))
    return directory


def test_models_lists_names_and_sources(mapped, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "mine" in printed
    assert "PLANISH_MODELS" in printed
    assert str(mapped) in printed
    assert "SmolLM2-135M-Instruct" in printed


def test_fetch_prints_the_directory(mapped, capsys):
    assert main(["models", "--fetch", "mine"]) == 0
    assert str(mapped) in capsys.readouterr().out


def test_an_unknown_model_error_lists_the_sources(mapped, capsys):
    assert main(["models", "--fetch", "no-such-model"]) == 1
    assert "tried" in capsys.readouterr().err


def test_planish_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "planish", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "models" in done.stdout


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"planish {version('planish')}, torch {version('torch')}, Python 3."
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", "--limit", "-1"], "--limit -1: .* 0 lists all"),
        (["checkpoints", "list", "--limit", "-1"], "--limit -1: .* 0 lists all"),
        (["runs", "--base-url", "http://[::1"], "--base-url: .*IPv6"),
        (["eval", "gsm8k", "--model", "mine", "--base-url", "http://[::1"], "--base-url: .*IPv6"),
        (["chat", "--base-url", "http://[::1"], "--base-url: .*IPv6"),
        (["chat", "--model", "tinker://foo"], "planish: checkpoint path 'tinker://foo': expected"),
        (
            ["eval", "gsm8k", "--model", "tinker://foo"],
            "planish: checkpoint path 'tinker://foo': expected",
        ),
        (
            ["eval", "gsm8k", "--model", "mine", "--temperature", "nan"],
            "planish: --temperature nan: give",
        ),
        (
            ["eval", "gsm8k", "--model", "mine", "--temperature", "inf"],
            "planish: --temperature inf: give",
        ),
        (["eval", "gsm8k", "--model", "mine", "--limit", "0"], "planish: --limit 0: give"),
        (
            ["eval", "gsm8k", "--model", "mine", "--max-tokens", "0"],
            "planish: --max-tokens 0: give",
        ),
        (
            ["eval", "gsm8k", "--model", "mine", "--samples", "2"],
            "planish: --samples 2 at --temperature 0 would be",
        ),
        (
            ["eval", "gsm8k", "--model", "mine", "--k", "1,4"],
            r"planish: --k \[1, 4\] with --samples 1: give",
        ),
        (
            ["eval", "gsm8k", "--model", "mine", "--concurrency", "0"],
            "planish: --concurrency 0: give",
        ),
        (
            ["eval", "gsm8k", "--model", "mine", "--base-url", "ftp://x"],
            "planish: --base-url 'ftp://x': give a URL",
        ),
        (["eval", "math500", "--model", "mine", "--limit", "1"], '"problem"'),
        (["chat", "--model", "mine", "--max-tokens", "0"], "planish: --max-tokens 0: give"),
        (["chat", "--model", "mine", "--temperature", "-1"], "planish: --temperature -1.0: give"),
        (["plot", ".", "--smooth", "0"], "planish: --smooth 0: give"),
    ],
)
def test_a_usage_error_is_one_line(mapped, tmp_path, capsys, monkeypatch, words, message):
    (tmp_path / "test.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    more = ["--data", "test.jsonl"] if words[0] == "eval" else []
    assert main([*words, *more]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_missing_data_are_named_as_typed(mapped, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data, problem in (
        ("missing.jsonl", ": no such file"),
        ("./max_tokens=3", ": no such file"),
        (".", " has no test.jsonl"),
    ):
        assert main(["eval", "gsm8k", "--model", "mine", "--data", data]) == 1
        assert capsys.readouterr().err.startswith(f"planish: the dataset {data}{problem}")
    assert main(["eval", "multiple_choice", "--model", "mine"]) == 1
    assert "it has no data of its own; give --data ..." in capsys.readouterr().err


def test_control_c_ends_a_command_without_a_traceback(capsys, monkeypatch):
    def interrupted(arguments) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planish.commands.models.run", interrupted)
    assert main(["models"]) == 130
    assert "stopped" in capsys.readouterr().err


SAY = """
import sys, types
from planish.commands import cli
sys.modules["say"] = say = types.ModuleType("say")
say.add_arguments, say.run = lambda parser: None, lambda arguments: print("something")
cli.COMMANDS, cli.OTHER_MODULES = {"say": "says something"}, {"say": "say"}
sys.stdin.read()
sys.exit(cli.main(["say"]))
"""


def test_a_closed_output_pipe_is_not_an_error():
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SAY], stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_trace_writes_a_file_for_a_viewer(tmp_path, capsys):
    with TraceFile(tmp_path, 0) as trace:
        spans = Spans(trace)
        with spans.measure("sampling"):
            pass
        trace.write(0, spans)
    assert main(["trace", str(tmp_path)]) == 0
    assert str(tmp_path / "trace.json") in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "trace.json").read_text())["traceEvents"][-1]["name"] == "sampling"
    )
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "other.json")]) == 0
    assert (tmp_path / "other.json").is_file()


def test_a_run_without_a_trace_is_rejected(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 1
    assert "enable_trace=True" in capsys.readouterr().err
