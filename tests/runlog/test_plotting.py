"""Plots are valid image files, and HTML pages work offline and show the logged values."""

import json
import re
import sys
from pathlib import Path

import pytest

from planish.commands.cli import main
from planish.errors import UserError
from planish.runlog.plotting import draw_curve, plot_runs


def write_run(directory: Path, steps: int, offset: float = 0.0) -> Path:
    directory.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "env/all/reward/total": step / 10 + offset,
            "optim/kl_sample_train_v2": 10.0 ** -(step % 6),
            "env/all/correct": step / 10,
            "env/all/format": 1.0,
            **({"test/env/all/correct": offset} if step % 5 == 0 else {}),
        }
        for step in range(steps)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def traces(page: Path) -> list[dict]:
    """Return the curves that the page passes to plotly."""
    [call] = re.findall(
        r'Plotly\.newPlot\(\s*"curves",\s*(\[.*?\]),\s*\{"', page.read_text(), re.DOTALL
    )
    return json.loads(call)


@pytest.mark.slow
def test_a_run_becomes_a_picture_and_a_page_in_its_directory(tmp_path):
    run = write_run(tmp_path / "run", 8)
    png, page = plot_runs([run])
    assert (png, page) == (run / "curves.png", run / "curves.html")
    assert png.read_bytes().startswith(b"\x89PNG")
    names = [re.findall(r"<br>(\S+)<br>step", trace["hovertemplate"]) for trace in traces(page)]
    assert names == [
        ["env/all/reward/total"],
        ["test/env/all/correct"],
        ["env/all/correct"],
        ["env/all/format"],
        ["optim/kl_sample_train_v2"],
    ]


def test_the_page_holds_the_values_and_loads_nothing(tmp_path):
    png, page = plot_runs(
        [write_run(tmp_path / "run", 3)], tmp_path / "out", metrics=["env/all/correct"]
    )
    assert png.parent == tmp_path / "out"
    [trace] = traces(page)
    assert (trace["x"], trace["y"]) == ([0, 1, 2], [0.0, 0.1, 0.2])
    outside_scripts = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert not re.search(r"(src|href)=", outside_scripts)
    assert not re.search(r"<script[^>]*\ssrc=", page.read_text())


def test_runs_of_different_lengths_are_compared(tmp_path):
    runs = [
        write_run(tmp_path / name, steps, offset)
        for name, steps, offset in (("a", 3, 0.1), ("b", 9, 0.2))
    ]
    _, page = plot_runs(runs, tmp_path, metrics=["env/all/reward/total"])
    assert [(trace["name"], len(trace["y"]), trace["showlegend"]) for trace in traces(page)] == [
        ("a", 3, True),
        ("b", 9, True),
    ]
    colors = [trace["line"]["color"] for trace in traces(page)]
    assert len(set(colors)) == 2


@pytest.mark.slow
def test_a_run_is_in_the_legend_once(tmp_path):
    _, page = plot_runs(
        [write_run(tmp_path / "a", 4), write_run(tmp_path / "b", 4)], tmp_path, smooth=2
    )
    listed = [trace["name"] for trace in traces(page) if trace["showlegend"]]
    assert listed == ["a", "b"]
    smoothed = traces(page)[:2]
    assert smoothed[0]["y"] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert smoothed[1]["y"] == pytest.approx([0.0, 0.05, 0.15, 0.25])


@pytest.mark.slow
def test_names_are_shown_as_they_are(tmp_path):
    """A name is neither HTML in a page nor a formula or hidden label in a picture. Warnings of the
    libraries are errors here.
    """
    runs = [write_run(tmp_path / name, 2) for name in ("_<b>bold</b>", "$x$ & $", "100%")]
    png, page = plot_runs(runs, tmp_path)
    assert png.stat().st_size > 0
    assert "<b>bold" not in page.read_text()
    assert "_&lt;b&gt;bold" in page.read_text()


def test_more_runs_than_named_colors_have_colors_of_their_own(tmp_path):
    runs = [write_run(tmp_path / f"run{index}", 2) for index in range(12)]
    _, page = plot_runs(runs, tmp_path, metrics=["env/all/correct"])
    assert len({trace["line"]["color"] for trace in traces(page)}) == 12


@pytest.mark.slow
def test_several_runs_are_drawn_here_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plot_runs([write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 2)])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "curves.png", "curves.html"}


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"out=.*file.*give a directory"):
        plot_runs([write_run(tmp_path / "run", 2)], tmp_path / "file")


def test_the_command_plots_and_says_where(tmp_path, capsys):
    run = write_run(tmp_path / "run", 4)
    arguments = [
        "plot",
        str(run),
        "--out",
        str(tmp_path),
        "--metrics",
        "test/*,env/all/correct",
        "--smooth",
        "3",
    ]
    assert main(arguments) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "curves.png"),
        str(tmp_path / "curves.html"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "nowhere: there is no such run"), (["run", "--smooth", "0"], "--smooth 0:")],
)
def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 2)
    assert main(["plot", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run/curves.png").exists()


def test_the_curve_is_a_picture_and_leaves_no_global_state(tmp_path):
    rows = [{"step": step, "reward/total": step / 4} for step in range(5)] + [
        {"step": 5, "test/correct": 0.5}
    ]
    before = "matplotlib.pyplot" in sys.modules
    assert draw_curve(tmp_path / "curve.png", rows, title="GRPO")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not draw_curve(tmp_path / "none.png", rows, ["no/such"], title="GRPO")
    assert not (tmp_path / "none.png").exists()
    assert ("matplotlib.pyplot" in sys.modules) == before
