"""`planish models` lists, fetches, and says what is wrong without a traceback."""

import subprocess
import sys

import pytest

from planish.cli import main
from planish.testing import tiny_model


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
