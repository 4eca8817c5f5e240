"""Each recipe from its options to its files, with a tiny random model."""

import json

import chz
import pytest

from planish.files import read_rows
from planish.recipes import calculator, guess_number, tic_tac_toe, twenty_questions
from planish.recipes.training_run import read_options

SMALL = {
    "guess_number": ["largest=3", "max_guesses=2", "batch_size=2", "group_size=2"],
    "twenty_questions": ["max_questions=2", "batch_size=2", "group_size=2"],
    "calculator": ["digits=2", "batch_size=2", "group_size=2", "test_problems=2"],
    "tic_tac_toe": ["batch_size=2", "test_games=2"],
}
RECIPES = {
    "guess_number": guess_number,
    "twenty_questions": twenty_questions,
    "calculator": calculator,
    "tic_tac_toe": tic_tac_toe,
}


@pytest.fixture
def options(request, small_model, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))

    def read(name, *arguments):
        recipe = RECIPES[name]
        given = [
            f"model_name={small_model}",
            f"log_path={tmp_path / name}",
            "lora_rank=4",
            "max_steps=2",
            "eval_every=1",
        ]
        return recipe, read_options(
            recipe.Options, recipe.PRESETS, [*given, "max_tokens=6", *SMALL[name], *arguments]
        )

    return read


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_continues(options, name, tmp_path):
    recipe, config = options(name)
    path = recipe.main(config)
    assert path == tmp_path / name
    recipe.main(chz.replace(config, max_steps=3))
    rows = read_rows(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("test/env/all/reward/total" in row for row in rows)
    assert all("env/all/reward/total" in row for row in rows[:3])
    written = json.loads((path / "config.json").read_text())
    assert written["recipe_name"] == name
    assert written["dataset_builder"]["batch_size"] == 2
    for step in range(3):
        for ending in (".html", "_logtree.json", "_rollout_summaries.jsonl"):
            assert (path / f"train_iteration_{step:06d}{ending}").exists()


@pytest.mark.slow
def test_what_a_game_is_about_is_in_the_rows(options):
    recipe, config = options("tic_tac_toe", "max_steps=1")
    [row, last] = read_rows(recipe.main(config) / "metrics.jsonl")
    for opponent in ("vs_random", "vs_optimal"):
        assert last[f"test/env/{opponent}/total_episodes"] == 2
        assert 0 <= last[f"test/env/{opponent}/win"] + last[f"test/env/{opponent}/draw"] <= 1
    assert row["env/all/total_episodes"] == 4
    assert row["env/all/reward/total"] == 0
    recipe, config = options("twenty_questions", "max_steps=1")
    run = recipe.main(config)
    assert "found" in str(read_rows(run / "metrics.jsonl")[0])
    assert (
        json.loads((run / "config.json").read_text())["dataset_builder"]["answerer_model"]
        == config.model_name
    )


@pytest.mark.parametrize("name", RECIPES)
def test_presets_are_options(name):
    recipe = RECIPES[name]
    for preset in recipe.PRESETS:
        config = read_options(recipe.Options, recipe.PRESETS, [f"preset={preset}", "seed=3"])
        assert config.seed == 3
        assert {key: getattr(config, key) for key in recipe.PRESETS[preset]} == recipe.PRESETS[
            preset
        ]
