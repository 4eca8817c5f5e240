"""`planish runs` and `planish checkpoints`, of a server and of this machine's directory alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from safetensors import safe_open
from server_process import BASE_MODEL, running_server

import planish
from planish.commands.checkpoints import parse_duration
from planish.commands.cli import main
from planish.commands.tables import format_size, format_time_left
from planish.errors import UserError
from planish.export import weights

pytestmark = pytest.mark.slow

ALICE, BOB = "tml-alices-key", "tml-bobs-key"


@dataclass(frozen=True)
class Place:
    """Where checkpoints are, a client that makes some, and the options that name the place."""

    client: planish.ServiceClient
    options: tuple[str, ...]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Place]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice {ALICE}\nbob {BOB}\n")
    data = tmp_path_factory.mktemp("served")
    with (
        running_server(data, model_dir, "--api-key-file", str(keys)) as server,
        planish.ServiceClient(base_url=server.url, api_key=ALICE) as client,
    ):
        yield Place(client, ("--base-url", server.url, "--api-key", ALICE))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Place]:
    data = tmp_path_factory.mktemp("local")
    with planish.ServiceClient(models={BASE_MODEL: str(model_dir)}, data_dir=data) as client:
        yield Place(client, ("--data-dir", str(data)))


@pytest.fixture(params=["served", "local"])
def place(request: pytest.FixtureRequest) -> Place:
    return request.getfixturevalue(request.param)


def saved(place: Place, name: str, **metadata: str) -> str:
    client = place.client.create_lora_training_client(
        base_model=BASE_MODEL, rank=4, seed=0, user_metadata=metadata
    )
    return client.save_state(name).result().path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def run_of(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[0]


def test_lists_contain_the_saved_checkpoints(place: Place, capsys):
    path = saved(place, "listed")
    assert path in said(capsys, "checkpoints", "list", *place.options)
    assert run_of(path) in said(capsys, "runs", *place.options)
    rows = json.loads(
        said(capsys, "checkpoints", "list", "--run", run_of(path), "--json", *place.options)
    )
    assert [row["tinker_path"] for row in rows] == [path]
    runs = json.loads(said(capsys, "runs", "--json", "--limit", "1", *place.options))
    assert [run["training_run_id"] for run in runs] == [run_of(path)]
    assert runs[0]["last_checkpoint"]["tinker_path"] == path


def test_runs_show_recipe_and_log_path(place: Place, capsys):
    path = saved(place, "noted", recipe_name="math_rl", log_path="~/runs/a")
    [heading, *rows] = said(capsys, "runs", *place.options).splitlines()
    assert heading.split()[:2] == ["run", "recipe"]
    assert heading.split()[-1] == "log_path"
    [row] = [row.split() for row in rows if row.startswith(run_of(path))]
    assert (row[1], row[-1]) == ("math_rl", "~/runs/a")
    # A script of one's own need not say where it comes from.
    path = saved(place, "unnoted")
    rows = said(capsys, "runs", *place.options).splitlines()
    [row] = [row.split() for row in rows if row.startswith(run_of(path))]
    assert (row[1], row[-1]) == ("-", "-")


def test_a_run_and_a_checkpoint_can_be_described(place: Place, capsys):
    path = saved(place, "shown")
    run = json.loads(said(capsys, "runs", run_of(path), "--json", *place.options))
    shown = json.loads(said(capsys, "checkpoints", "show", path, "--json", *place.options))
    assert run["base_model"] == shown["base_model"] == BASE_MODEL
    assert run["lora_rank"] == shown["lora_rank"] == 4
    assert shown["size_bytes"] > 0
    assert not [
        key for key, value in shown.items() if isinstance(value, dict) and key != "optimizer_config"
    ]
    assert BASE_MODEL in said(capsys, "checkpoints", "show", path, *place.options)


def test_a_ttl_can_be_set_and_removed(place: Place, capsys):
    path = saved(place, "kept")

    def expires() -> str | None:
        return json.loads(said(capsys, "checkpoints", "show", path, "--json", *place.options))[
            "expires_at"
        ]

    said(capsys, "checkpoints", "ttl", path, "7d", *place.options)
    expected = datetime.now(UTC) + timedelta(days=7)
    assert abs(datetime.fromisoformat(expires() or "") - expected) < timedelta(minutes=5)
    said(capsys, "checkpoints", "ttl", path, "never", *place.options)
    assert expires() is None


def test_a_download_has_the_files(place: Place, capsys, tmp_path: Path):
    path = saved(place, "got")
    out = tmp_path / "out"
    answer = json.loads(
        said(capsys, "checkpoints", "download", path, "--out", str(out), "--json", *place.options)
    )
    assert {Path(file) for file in answer["files"]} == set(out.iterdir())
    with safe_open(out / "adapter_model.safetensors", "pt") as tensors:
        assert any("lora_A" in name for name in tensors.keys())  # noqa: SIM118  (no mapping)
    for taken in (out, out / "planish.json" / "below"):
        assert main(["checkpoints", "download", path, "--out", str(taken), *place.options]) == 1
        assert f"--out {taken}" in capsys.readouterr().err
    missing = tmp_path / "missing"
    assert main(["checkpoints", "download", path[:-1], "--out", str(missing), *place.options]) == 1
    assert not missing.exists()


def test_a_download_works_where_an_event_loop_runs(served: Place, tmp_path: Path):
    path, (_, url, _, key) = saved(served, "in-a-notebook"), served.options

    async def cell() -> str:
        return weights.download(
            tinker_path=path, output_dir=tmp_path / "out", base_url=url, api_key=key
        )

    assert Path(asyncio.run(cell()), "adapter_model.safetensors").is_file()


def test_deleting_asks_first(place: Place, capsys, monkeypatch):
    path = saved(place, "gone")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["", EOFError, "y"])

    def answer(_: str) -> str:
        given = next(answers)
        if given is EOFError:
            raise EOFError
        return str(given)

    monkeypatch.setattr("builtins.input", answer)
    for _ in range(2):
        assert "nothing" in said(capsys, "checkpoints", "delete", path, *place.options)
    said(capsys, "checkpoints", "delete", path, *place.options)
    assert main(["checkpoints", "show", path, *place.options]) == 1
    assert "planish: " in capsys.readouterr().err


def test_deleting_without_a_terminal_needs_yes(place: Place, capsys, monkeypatch):
    path = saved(place, "certainly")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["checkpoints", "delete", path, *place.options]) == 1
    assert "--yes" in capsys.readouterr().err
    said(capsys, "checkpoints", "delete", path, "--yes", *place.options)


def test_a_public_checkpoint_can_be_read_with_another_key(served: Place, capsys):
    path = saved(served, "public")
    bob = (*served.options[:-1], BOB)
    assert main(["checkpoints", "show", path, *bob]) == 1
    said(capsys, "checkpoints", "publish", path, *served.options)
    assert json.loads(said(capsys, "checkpoints", "show", path, "--json", *bob))["lora_rank"] == 4
    assert path not in said(capsys, "checkpoints", "list", *bob)
    said(capsys, "checkpoints", "unpublish", path, *served.options)
    assert main(["checkpoints", "show", path, *bob]) == 1


@pytest.mark.parametrize("words", [["runs"], ["checkpoints", "list", "--run"]])
def test_a_run_directory_given_as_an_id_is_explained(
    local: Place, capsys, tmp_path, words: list[str]
):
    path = saved(local, "mine")
    (tmp_path / "checkpoints.jsonl").write_text(
        json.dumps({"name": "final", "batch": 1, "state_path": path}) + "\n"
    )
    assert main([*words, str(tmp_path), *local.options]) == 1
    assert f"its newest checkpoint has the id {run_of(path)}" in capsys.readouterr().err


def test_publishing_is_rejected_without_a_server(local: Place, capsys):
    assert main(["checkpoints", "publish", saved(local, "mine"), *local.options]) == 1
    assert "--base-url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["runs", "--base-url", "nothing"], "planish: --base-url 'nothing': give"),
        (["runs", "--base-url", "http://127.0.0.1:9"], "no server answers"),
        (
            ["runs", "--base-url", "http://127.0.0.1:9", "--data-dir", "here"],
            "but --data-dir configures",
        ),
        (
            ["runs", "--base-url", "http://127.0.0.1:9", "--api-key", "ключ"],
            "--api-key is not a valid key",
        ),
        (["runs", "--api-key", ALICE], "--api-key is given without --base-url"),
        (
            ["checkpoints", "delete", "--yes", "weights/a", "--base-url", "http://127.0.0.1:9"],
            "tinker://",
        ),
        (["checkpoints", "delete", "--yes", "weights/a"], "tinker://"),
    ],
)
def test_impossible_commands_are_explained(
    words: list[str], named: str, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path))
    assert main(words) == 1
    assert named in capsys.readouterr().err


def test_the_environment_names_a_server(served: Place, capsys, monkeypatch):
    path = saved(served, "environment")
    monkeypatch.setenv("PLANISH_BASE_URL", served.options[1])
    monkeypatch.setenv("TINKER_API_KEY", ALICE)
    assert path in said(capsys, "checkpoints", "list", "--json")


def test_durations_are_parsed():
    assert [parse_duration(text) for text in ("90", "90s", "2m", "12h", "7d", "never")] == [
        90,
        90,
        120,
        43200,
        604800,
        None,
    ]
    for text in ("", "0", "-1", "1.5h", "soon", "1w"):
        with pytest.raises(UserError, match="TIME"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (format_size, None, "-"),
        (format_size, 999, "999 B"),
        (format_size, 1536, "1.5 KiB"),
        (format_size, 20 << 20, "20 MiB"),
        (
            lambda text: format_time_left(text, datetime(2026, 1, 1, tzinfo=UTC)),
            "2026-01-03T00:00:00+00:00",
            "2 d",
        ),
        (
            lambda text: format_time_left(text, datetime(2026, 1, 1, tzinfo=UTC)),
            "2025-12-31T00:00:00+00:00",
            "0 s",
        ),
    ],
)
def test_table_cells_are_formatted(write: Callable[..., str], value: object, text: str):
    assert write(value) == text
