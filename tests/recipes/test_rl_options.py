"""Each flat option reaches its place in the config, and invalid options are rejected before
anything is loaded.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import chz
import pytest

from planish.commands.recipe_modules import options_type
from planish.errors import UserError
from planish.integrations.verifiers.datasets import VerifiersDatasetBuilder
from planish.recipes.code_datasets import CodeDatasetBuilder
from planish.recipes.rl_options import RLOptions, run, train_config
from planish.rl.types import RLDatasetBuilder
from planish.training import run_loop
from planish.training.rl_config import AsyncConfig, Config, KLReferenceConfig, StreamMinibatchConfig


@chz.chz
class NoData(RLDatasetBuilder):
    async def __call__(self):
        raise AssertionError("nothing is to be loaded")


def config(**options) -> Config:
    return train_config(RLOptions(**options), NoData(), recipe_name="mine")


def test_every_option_is_one_of_the_config_or_turned_into_one():
    turned = {
        "kl_reference_model",
        "kl_reference_checkpoint",
        "max_steps_off_policy",
        "num_minibatches",
    }
    of_builders = {"max_prompt_tokens"}
    assert chz.chz_fields(RLOptions).keys() - chz.chz_fields(Config).keys() == turned | of_builders


def test_options_keep_their_values():
    changed = {
        "model_name": "m",
        "log_path": "/somewhere",
        "learning_rate": 1e-3,
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_high_threshold": 1.3},
        "eval_temperature": None,
        "ttl_seconds": None,
        "loggers": ("wandb",),
    }
    made = config(**changed)
    assert {name: getattr(made, name) for name in changed} == changed
    assert made.recipe_name == "mine"


def test_by_default_a_run_is_synchronous_and_has_no_reference():
    made = config()
    assert (
        made.lag,
        made.async_config,
        made.stream_minibatch_config,
        made.kl_reference_config,
    ) == (
        0,
        None,
        None,
        None,
    )


def test_lag_and_minibatches():
    assert config(max_steps_off_policy=2).async_config == AsyncConfig(max_steps_off_policy=2)
    assert config(num_minibatches=4).stream_minibatch_config == StreamMinibatchConfig(
        num_minibatches=4
    )


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, ("m", None)),
        ({"load_checkpoint_path": "/runs/sl"}, ("m", "/runs/sl")),
        (
            {"kl_reference_checkpoint": "/runs/other", "load_checkpoint_path": "/runs/sl"},
            ("m", "/runs/other"),
        ),
        ({"kl_reference_model": "other"}, ("other", None)),
    ],
)
def test_the_reference_of_the_penalty_is_where_the_run_begins_unless_named(options, reference):
    made = config(model_name="m", kl_penalty_coef=0.1, **options).kl_reference_config
    assert made == KLReferenceConfig(base_model=reference[0], load_checkpoint_path=reference[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_reference_model": "m"}, "kl_reference_model=m is given, but kl_penalty_coef is 0"),
        ({"kl_reference_checkpoint": "c"}, "kl_reference_checkpoint=c is given"),
        ({"max_steps_off_policy": -1}, "max_steps_off_policy"),
        ({"num_minibatches": 0}, "num_minibatches=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"loss_fn": "cross_entropy"}, "loss_fn=cross_entropy"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"lr_schedule": "up"}, "lr_schedule=up"),
        ({"loss_fn_config": {"skip_unweighted": 1}}, "skip_unweighted.*leave it out"),
    ],
)
def test_invalid_options_are_rejected_before_loading(monkeypatch, tmp_path, options, message):
    monkeypatch.setattr(run_loop, "ServiceClient", NoData.__call__)
    log_path = tmp_path / "run"
    with pytest.raises(UserError, match=message):
        run(RLOptions(log_path=str(log_path), **options), NoData(), recipe_name="mine")
    assert not log_path.exists()


def test_a_limit_on_prompts_that_the_builder_ignores_is_rejected():
    with pytest.raises(UserError, match="max_prompt_tokens=9 is not used by NoData; leave it out"):
        config(max_prompt_tokens=9)


NO_RL = {
    "chat_sl", "dpo", "off_policy_distillation", "preference_model", "prompt_distillation", "rubric_judge",
    "shape_rows", "sl_basic", "sl_loop",
}  # fmt: skip
"""The recipes that train on given answers, or train nothing."""
SHORT_PROMPTS = {"demo": "all its prompts are generated sums"}
BUILDERS_WITHOUT_A_LIMIT = {
    "TicTacToeDatasetBuilder": "a prompt is a board of nine squares",
    "InterleavedRLDatasetBuilder": "each source has its own limit",
    "DistillationDatasetBuilder": "each part has its own limit",
    **dict.fromkeys(
        [
            "PairwisePreferenceRLDatasetBuilder",
            "_CollectionBuilder",
            "Gsm8kDatasetBuilder",
            "MathDatasetBuilder",
            "PolarisDatasetBuilder",
            "DeepMathDatasetBuilder",
        ],
        "planish.cookbook has the arguments of the public cookbook",
    ),
}
OPTIONAL = {"inspect_ai", "verifiers"}
"""Libraries that the environment of the tests may lack."""


def modules_of(*packages: str) -> list[ModuleType]:
    """Return all modules below packages of planish."""
    found = [importlib.import_module(f"planish.{package}") for package in packages]
    for package in tuple(found):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                found.append(importlib.import_module(module.name))
            except ModuleNotFoundError as error:
                if error.name not in OPTIONAL:
                    raise
    return found


def subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


@pytest.mark.slow
def test_every_rl_recipe_has_a_limit_on_prompts():
    recipes = {
        module.__name__.rpartition(".")[2]: options_type(module)
        for module in modules_of("recipes")
        if hasattr(module, "main") and options_type(module) is not None
    }
    without = {
        name
        for name, options in recipes.items()
        if "max_prompt_tokens"
        not in chz.chz_fields(type(options().rl) if name == "rlhf" else options)
    }
    assert without == NO_RL | SHORT_PROMPTS.keys()
    assert len(recipes) > 20


@pytest.mark.slow
def test_every_builder_of_prompts_has_a_limit_on_them():
    modules_of("rl", "recipes", "distillation", "preference", "rubric", "integrations", "cookbook")
    builders = {
        cls for cls in subclasses(RLDatasetBuilder) if cls.__module__.startswith("planish.")
    }
    without = {cls for cls in builders if "max_prompt_tokens" not in chz.chz_fields(cls)}
    assert {cls.__name__ for cls in without} == BUILDERS_WITHOUT_A_LIMIT.keys()
    assert {CodeDatasetBuilder, VerifiersDatasetBuilder} <= builders - without
