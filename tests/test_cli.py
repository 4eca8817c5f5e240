"""`planish` lists and fetches models, converts traces, and says what is wrong without a traceback."""

import json
import subprocess
import sys

import pytest

from planish.cli import main
from planish.testing import tiny_model
from planish.timing import Spans, TraceFile


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    directory = tiny_model(tmp_path / "tiny")
    monkeypatch.setenv("PLANISH_MODELS", f"mine={directory}")
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "home"))
    return directory


def test_models_lists_what_can_be_loaded_and_from_where(mapped, capsys, monkeypatch):
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


def test_an_unknown_model_is_an_error_with_what_was_tried(mapped, capsys):
    assert main(["models", "--fetch", "no-such-model"]) == 1
    assert "tried" in capsys.readouterr().err


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "planish", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "models" in done.stdout


def test_trace_writes_a_file_for_a_viewer(tmp_path, capsys):
    with TraceFile(tmp_path, 0) as trace:
        spans = Spans(trace)
        with spans.measure("sampling"):
            pass
        trace.write(0, spans)
    assert main(["trace", str(tmp_path)]) == 0
    assert str(tmp_path / "trace.json") in capsys.readouterr().out
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"][-1]["name"] == "sampling"
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "other.json")]) == 0
    assert (tmp_path / "other.json").is_file()


def test_a_run_that_was_not_traced_is_an_error(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 1
    assert "enable_trace=True" in capsys.readouterr().err
