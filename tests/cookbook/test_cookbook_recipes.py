"""Recipes of the official cookbook: with planish.cookbook in the place of the cookbook, and
unmodified, in process and on a server.

They need tinker-cookbook 0.6 in the environment (`make test-extras`), and are skipped without.
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from local_data import write_data
from server_process import ServerProcess, running_server

from planish.cookbook.table import MODULES
from planish.testing import tiny_model

COOKBOOK = importlib.util.find_spec("tinker_cookbook")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COOKBOOK is None, reason="needs tinker-cookbook; make test-extras runs it"),
]
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name in the cookbook's table."""
SMALL = "batch_size=4 group_size=2 max_tokens=8"
PORTED = {
    "rl_loop": f"model_name={MODEL} {SMALL} max_steps=1",
    "sl_loop": f"model_name={MODEL} batch_size=8 max_steps=1",
    "rl_basic": f"model_name={MODEL} max_tokens=4 max_steps=1",
    "sl_basic": f"model_name={MODEL} max_steps=1",
    "math_rl.train": f"model_name={MODEL} env=gsm8k groups_per_batch=4 group_size=2 max_tokens=8 "
    "max_steps=1 eval_every=0",
    "multiplayer_rl.guess_number.train": f"model_name={MODEL} renderer_name=qwen3_instruct "
    f"{SMALL} max_steps=1 eval_every=0",
    "preference.dpo.train": f"model_name={MODEL} renderer_name=qwen3_instruct batch_size=8 "
    "max_steps=1",
    "preference.shorter.train": f"model_name={MODEL} renderer_name=qwen3_instruct batch_size=2 "
    "group_size=4 max_tokens=8 max_steps=1 eval_every=0",
    "chat_sl.train": f"model_name={MODEL} dataset=conversations.jsonl batch_size=8 max_steps=1",
}


@pytest.fixture(scope="module", name="place")
def _place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("cookbook")
    write_data(place)
    tiny_model(place / "model", family="qwen3", tied=False, max_context=8192)
    return place


def ported(place: Path) -> None:
    """Write the recipes with the one replacement as a package `mine`, without the parts that
    planish has.
    """
    assert COOKBOOK is not None
    assert COOKBOOK.origin is not None
    source = Path(COOKBOOK.origin).parent / "recipes"
    shutil.copytree(source, place / "mine", dirs_exist_ok=True)
    has = [name for name in MODULES if name.startswith("recipes.")]
    for path in (place / "mine").rglob("*.py"):
        text = path.read_text()
        package = path.relative_to(place / "mine").parts[0]
        for sibling in set(re.findall(r"tinker_cookbook\.(recipes(?:\.\w+)*)", text)):
            # Copied along, unless planish has it.
            is_near = sibling.startswith(f"recipes.{package}.") or sibling == f"recipes.{package}"
            if is_near or sibling not in has:
                text = re.sub(
                    rf"tinker_cookbook\.{re.escape(sibling)}(?![\w.])",
                    sibling.replace("recipes", "mine", 1),
                    text,
                )
        path.write_text(text.replace("tinker_cookbook", "planish.cookbook"))


def environment(place: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_HOME": str(place / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run(place: Path, words: list[str], log: Path, **more: str) -> list[dict[str, Any]]:
    """Run a program and return its rows of metrics.jsonl."""
    done = subprocess.run(
        [sys.executable, *words, f"log_path={log}"],
        cwd=place,
        env=environment(place, **more),
        input="",
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def planish_run(place: Path) -> list[str]:
    model = f"{MODEL}={place / 'model'}"
    options = ["--model", model, "--hub-tokenizers", "--data-dir", str(place / "data")]
    substitute = ["--substitute-loss", "stable_reinforce=cispo"]
    return ["-m", "planish", "run", *options, *substitute]


@pytest.fixture(scope="module", name="ported_rows")
def _ported_rows(place) -> Callable[[str], list[dict[str, Any]]]:
    """Run a ported recipe once for all tests of this file, and return its rows of metrics.jsonl."""
    ported(place)

    @functools.cache
    def rows(recipe: str) -> list[dict[str, Any]]:
        words = [*planish_run(place), "-m", f"mine.{recipe}", *PORTED[recipe].split()]
        return run(place, words, place / "ported" / recipe)

    return rows


@pytest.mark.parametrize("recipe", PORTED)
def test_a_recipe_runs_with_planishs_cookbook(ported_rows, recipe):
    rows = ported_rows(recipe)
    assert rows
    names = set().union(*rows)
    expected = ("reward", "env/all/reward/total", "train_mean_nll", "dpo_loss")
    assert any(name in names or f"{name}/total" in names for name in expected), sorted(names)


OFFICIAL = {
    "tinker_cookbook.recipes.rl_loop": PORTED["rl_loop"],
    "tinker_cookbook.recipes.rl_basic": PORTED["rl_basic"],
    "tinker_cookbook.recipes.sl_basic": PORTED["sl_basic"],
    "tinker_cookbook.recipes.multiplayer_rl.guess_number.train": PORTED[
        "multiplayer_rl.guess_number.train"
    ],
    "tinker_cookbook.recipes.preference.dpo.train": PORTED["preference.dpo.train"],
}
SEEDED = str(Path(__file__).with_name("seeded.py"))


@pytest.fixture(scope="module", name="server")
def _server(place) -> Iterator[ServerProcess]:
    options = ["--hub-tokenizers", "--model", f"{MODEL}={place / 'model'}"]
    substitute = ["--substitute-loss", "stable_reinforce=cispo"]
    hub = {"HF_HOME": str(place / "hub")}
    with running_server(
        place / "server", place / "model", *options, *substitute, environment=hub
    ) as it:
        yield it


@pytest.mark.parametrize("recipe", OFFICIAL)
def test_an_official_recipe_in_process_is_the_same_as_through_a_server(place, server, recipe):
    name = recipe.rpartition("recipes.")[2]
    words, near, far = OFFICIAL[recipe].split(), place / "near" / name, place / "far" / name
    for log in (near, far):
        log.parent.mkdir(exist_ok=True)
    tokens = {log: f"{log}.tokens" for log in (near, far)}
    in_process = run(place, [*planish_run(place), SEEDED, tokens[near], recipe, *words], near)
    keys = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any"}
    through_server = run(place, [SEEDED, tokens[far], recipe, *words], far, **keys)
    assert len(in_process) == len(through_server) > 0
    assert [measures(row) for row in in_process] == [measures(row) for row in through_server]
    assert sampled(tokens[near]) == sampled(tokens[far])
    if "rl" in name or "guess" in name:
        assert sampled(tokens[near])


def measures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that depend only on weights and tokens, not on time or caches."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float)
        and "time" not in name
        and "cache" not in name
        and not name.startswith("tokens/")
    }


def sampled(path: str) -> list[Any]:
    file = Path(path)
    return (
        sorted(json.loads(line) for line in file.read_text().splitlines()) if file.exists() else []
    )


def test_the_cookbooks_reader_finds_the_files_of_a_run(place, ported_rows):
    """The run is one of planish with the default layout."""
    storage = importlib.import_module("tinker_cookbook.stores.storage")
    stores = importlib.import_module("tinker_cookbook.stores.training_store")
    ported_rows("rl_basic")
    store = stores.TrainingRunStore(storage.LocalStorage(place / "ported" / "rl_basic"))
    [iteration] = store.list_iterations()
    assert iteration.has_train_rollouts
    assert iteration.has_train_logtree
    assert store.read_logtree(iteration.iteration)
    assert store.read_rollouts(iteration.iteration)
    assert store.read_metrics()
