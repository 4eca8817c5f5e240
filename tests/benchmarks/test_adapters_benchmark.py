"""The benchmark of many adapters runs, and sends both sides the same requests."""

import json

import pytest
from adapters import Options, main

from planish.testing import tiny_model


@pytest.mark.slow
def test_it_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("adapters.measure_read_bandwidth", lambda: 1e9)
    model = tiny_model(tmp_path / "model")
    options = Options(
        model=str(model),
        rank=4,
        prompt_tokens=8,
        new_tokens=3,
        rounds=2,
        small=True,
        directory=tmp_path,
    )
    main(options)
    report = json.loads((tmp_path / "adapters.json").read_text())
    assert [(point["adapters"], point["samples"]) for point in report["points"]] == [(1, 4), (2, 4)]
    for point in report["points"]:
        assert len(point["seconds"]) == len(point["alone_seconds"]) == 2
        assert point["tokens"] == 12
    one, two = report["points"]
    assert two["read_seconds_a_step"] == 2 * one["read_seconds_a_step"] > 0
    assert len(report["first_tokens"]["new"]) == len(report["first_tokens"]["used"]) == 2
    assert "| 4 = 2 x 2 |" in capsys.readouterr().out
