"""Every recipe takes one step without evaluations and without periodic checkpoints, and trains the
requested parts of the model.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planish import ServiceClient
from planish.files import read_rows
from planish.recipes.training_run import read_options
from planish.testing_vision import tiny_vision_model

RECIPES = Path(__file__).parents[2] / "planish" / "recipes"
ONE_STEP = ("eval_every=0", "save_every=0", "max_steps=1")
FOUR = ("batch_size=2", "group_size=2", "max_tokens=6")
ANSWERS = ("batch_size=1", "test_size=0", "num_prompts=100", "max_tokens=64")
"""A random model seldom ends an answer."""
RUNS: dict[str, Sequence[str]] = {
    "calculator": (*ONE_STEP, *FOUR),
    "chat_sl": (*ONE_STEP, "dataset={chats}", "batch_size=2"),
    "code_rl": (*ONE_STEP, *FOUR),
    "count_shapes": (*ONE_STEP, *FOUR),
    "dpo": (*ONE_STEP, "batch_size=2"),
    "guess_number": (*ONE_STEP, *FOUR),
    "math_rl": (*ONE_STEP, *FOUR),
    "off_policy_distillation": (*ONE_STEP, *ANSWERS, "teacher_model={model}"),
    "on_policy_distillation": (*ONE_STEP, *FOUR, "teacher_model={model}"),
    "preference_model": (*ONE_STEP, "batch_size=2", "calibration_size=2"),
    "prompt_distillation": (*ONE_STEP, *ANSWERS, "teacher_model={model}"),
    "rl_basic": (*ONE_STEP, *FOUR, "dataset={sums}"),
    "rl_loop": (*ONE_STEP, *FOUR, "dataset={sums}"),
    "rlhf": (
        *(f"{stage}.{option}" for stage in ("sft", "preference", "rl") for option in ONE_STEP),
        *("sft.batch_size=2", "preference.batch_size=2", "rl.batch_size=1", "rl.max_tokens=6"),
        *("preference.calibration_size=2", "sums.largest=4", "sums.test_size=2"),
    ),
    "rubric": (*ONE_STEP, *FOUR, "dataset={rubrics}", "judge_max_tokens=6", "test_size=2"),
    "shorter": (*ONE_STEP, "batch_size=1", "max_tokens=6"),
    "sl_basic": (*ONE_STEP, "dataset={chats}", "batch_size=2"),
    "sl_loop": ("save_every=0", "max_steps=1", "dataset={sums}", "batch_size=2"),
    "tic_tac_toe": (*ONE_STEP, "batch_size=2", "max_tokens=6"),
    "twenty_questions": (*ONE_STEP, *FOUR),
    "verifiers_rl": (*ONE_STEP, *FOUR, "env_id=verifiers_environments"),
}
NEEDED = {"verifiers_rl": "verifiers"}
MARKS = {
    "code_rl": [pytest.mark.sandbox],
    "verifiers_rl": [pytest.mark.filterwarnings("default")],  # its dependencies warn
}
CASES = [pytest.param(name, marks=MARKS.get(name, [])) for name in RUNS]
NOT_TRAINED = {"demo", "rubric_judge", "shape_rows"}
"""Programs without these options."""


def options_class(recipe: Any) -> Any:
    return getattr(recipe, "Options", None) or recipe.Config


def test_every_recipe_has_a_run():
    programs = {
        path.stem for path in RECIPES.glob("*.py") if "run_command(main" in path.read_text()
    }
    assert programs - {"rl_options"} == RUNS.keys() | NOT_TRAINED


@pytest.fixture
def data(tmp_path, sums_dataset) -> Any:
    item = {
        "rubric_str": "Is it a greeting?",
        "extraction_regex": r"\A(?:[\s\S]?)()",
        "grader_output_format_instruction": "Say anything.",
        "word_scores": {"": 1, "No": 0},
    }
    asked = [{"role": "user", "content": "Say 5."}]
    files: dict[str, dict[str, Any]] = {
        "rubrics": {"messages": asked, "rubric_items": [item]},
        "chats": {"messages": [*asked, {"role": "assistant", "content": "5"}]},
    }
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 6)
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in files}
    return SimpleNamespace(sums=str(sums_dataset), **paths)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_step_without_evaluations_and_without_the_head(
    name, small_model, data, tmp_path, monkeypatch
):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason="make test-extras runs it")
        monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "rl"))
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "checkpoints"))
    if name == "count_shapes":
        small_model = tiny_vision_model(tmp_path / "vision")
    recipe = importlib.import_module(f"planish.recipes.{name}")
    values = {"model": small_model, **vars(data)}
    arguments = [argument.format(**values) for argument in RUNS[name]]
    presets: Any = {}
    if hasattr(recipe, "with_env_defaults"):
        presets, arguments = recipe.with_env_defaults(arguments)
    common = [f"model_name={small_model}", f"log_path={tmp_path / 'run'}", "lora_rank=4"]
    arguments = [*arguments, *common, "train_unembed=False"]
    run = recipe.main(read_options(options_class(recipe), presets, arguments))

    for path in (
        [run / stage for stage in ("sft", "preference_model", "rl")] if name == "rlhf" else [run]
    ):
        rows = read_rows(path / "metrics.jsonl")
        assert rows[0]["step"] == 0
        assert not [key for row in rows for key in row if key.startswith("test/")]
        assert [row["step"] for row in rows] == [0]
        (checkpoint,) = read_rows(path / "checkpoints.jsonl")
        with ServiceClient() as client:
            rest = client.create_rest_client()
            info = rest.get_weights_info_by_tinker_path(checkpoint["sampler_path"]).result()
        assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, True, False)
