"""The options of planish/recipes/rlhf.py, with one class per stage, and the configs of the stages.

Each stage has its own batch size, learning rate and data. Model, seed and loggers apply to the
whole run. A preference model of kind bradley_terry returns the same preference for both orders of
two answers, so each pair is compared once; for kind chat, it is compared in both orders.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import chz

from planish import ServiceClient
from planish.datasets.split_names import SplitNames
from planish.errors import UserError
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.preference import model_training
from planish.preference.comparison_evaluator import ComparisonEvaluatorBuilder
from planish.preference.datasets import ComparisonBuilder, ComparisonBuilderFromRows
from planish.preference.forms import Kind
from planish.preference.judging import require_judge_fits
from planish.preference.matchups import TournamentPattern
from planish.preference.model_files import TrainedPreferenceModelBuilder
from planish.preference.preference_envs import (
    PairwisePreferenceRLDatasetBuilder,
    TournamentOptions,
)
from planish.preference.preference_models import PreferenceModelBuilder
from planish.preference.prompts import (
    PromptBuilder,
    PromptsFromRows,
    PromptsOfComparisons,
    fitting_prompts,
)
from planish.recipes import preference_model, training_run
from planish.recipes.rl_options import RLOptions, train_config
from planish.recipes.sl_options import SLOptions, chat_builder, sl_config
from planish.recipes.wordy_sums import (
    RuleBuilder,
    WordySumChats,
    WordySumComparisons,
    WordySumPrompts,
    WordySums,
)
from planish.renderers import Renderer
from planish.supervised.types import SupervisedDatasetBuilder
from planish.training import rl_config as rl, supervised_config as supervised
from planish.training.option_rules import GROUP_SIZE, at_least, check_fields, rule
from planish.training.run_options import EngineOptions, LoraOptions, ScheduleOptions
from planish.types import TTL_REMEDY, is_ttl

T = TypeVar("T")

RECIPE = "rlhf"
SFT, PREFERENCE_MODEL, RL, EVALUATION = "sft", "preference_model", "rl", "evaluation"
"""Directories of the stages."""


@chz.chz
class SFTStage(SplitNames, ScheduleOptions):
    """Options of the supervised training."""

    dataset: str | None = chz.field(
        default=None, doc="conversations: hub name, directory or file; none = generated sums"
    )
    test_size: int | None = chz.field(
        default=64, doc="number of test conversations in dataset; none = the whole test split"
    )
    batch_size: int = chz.field(default=16, doc="conversations per step")
    max_length: int = chz.field(
        default=1024, doc="maximum tokens in a conversation; longer ones are truncated and counted"
    )
    learning_rate: float = 5e-4
    eval_every: int = chz.field(default=10, doc="steps between evaluations; 0 = never")
    save_every: int = chz.field(default=20, doc="steps between checkpoints; 0 = only a last one")


@chz.chz
class PreferenceStage(SplitNames, preference_model.PreferenceModelOptions, ScheduleOptions):
    """Options of the training of the preference model."""

    kind: Kind = "bradley_terry"
    dataset: str | None = chz.field(
        default=None, doc="comparisons: hub name, directory or file; none = generated sums"
    )
    test_size: int | None = chz.field(
        default=64, doc="number of test pairs in dataset; none = the whole test split"
    )
    learning_rate: float = 1e-3
    eval_every: int = chz.field(default=20, doc="steps between evaluations; 0 = never")
    save_every: int = chz.field(default=20, doc="steps between checkpoints; 0 = only a last one")


@chz.chz
class PromptOptions(SplitNames, TournamentOptions):
    """The prompts of the RL stage, and how answers to a prompt are compared."""

    dataset: str | None = chz.field(
        default=None,
        doc="prompts: hub name, directory or file; none = those of the comparisons",
    )
    test_size: int | None = chz.field(
        default=64, doc="number of test prompts in dataset; none = the whole test split"
    )
    batch_size: int = chz.field(default=8, doc="prompts per step", metadata=at_least(1))
    group_size: int = chz.field(default=4, doc="answers per prompt", metadata=GROUP_SIZE)
    tournament_pattern: TournamentPattern | None = chz.field(
        default=None,
        doc="pairs that are compared; none = all_pairs_both_ways for kind=chat, "
        "all_pairs_one_way for bradley_terry",
    )


@chz.chz
class RLStage(PromptOptions, ScheduleOptions):
    """Options of the RL stage."""

    learning_rate: float = 2e-4
    lr_schedule: str = "constant"
    max_tokens: int = chz.field(default=64, doc="maximum tokens in an answer, also in evaluations")
    temperature: float = chz.field(default=1.0, doc="sampling temperature, also in evaluations")
    advantage: str = "mean"
    loss_fn: str = "importance_sampling"
    kl_penalty_coef: float = chz.field(
        default=0.0, doc="coefficient of the KL penalty against the SFT policy; 0 = none"
    )
    kl_discount_factor: float = 0.0
    max_steps_off_policy: int = chz.field(
        default=0,
        doc="maximum number of steps that sampling runs ahead of training; 0 = synchronous",
    )
    rollout_error_tolerance: bool = chz.field(
        default=False, doc="retry rollouts that fail instead of ending the run"
    )
    num_epochs: int = chz.field(
        default=10, doc="number of passes through the prompts, limited by max_steps"
    )
    max_steps: int | None = 20
    eval_every: int = chz.field(
        default=10, doc="steps between evaluations against the SFT policy; 0 = never"
    )
    save_every: int = chz.field(default=10, doc="steps between checkpoints; 0 = only a last one")


@chz.chz
class Options(LoraOptions, EngineOptions):
    """Options of the whole run."""

    model_name: str = chz.field(
        default=DEFAULT_MODEL, doc="base model of policy and preference model"
    )
    log_path: str = chz.field(
        default="/tmp/planish-examples/rlhf",
        doc="directory of the run, with one subdirectory per stage",
    )
    renderer_name: str | None = chz.field(default=None, doc="chat format; none = the model's own")
    seed: int = chz.field(default=0, doc="seed of initial weights, data and sampling")
    deterministic: bool | None = chz.field(
        default=None, doc="batch-invariant sampling; none = the default of ServiceClient"
    )
    sums: WordySums = WordySums()
    sft: SFTStage = SFTStage()
    preference: PreferenceStage = PreferenceStage()
    rl: RLStage = RLStage()
    test_prompts: int | None = chz.field(
        default=None,
        doc="number of held-out prompts on which policies are compared; none = all",
        metadata=at_least(1, "at least {}, or none for all"),
    )
    ttl_seconds: int | None = chz.field(
        default=604800,
        doc="seconds until a checkpoint expires, except the last of each stage; none = never",
        metadata=rule(is_ttl, TTL_REMEDY),
    )
    loggers: tuple[str, ...] = chz.field(
        default=(), doc="loggers in addition to files and console: wandb, trackio, tensorboard"
    )
    wandb_project: str | None = chz.field(default=None, doc="project in W&B or Trackio")
    wandb_name: str | None = chz.field(
        default=None, doc="name in W&B or Trackio; each stage appends its own name"
    )

    @property
    def generates_sums(self) -> bool:
        """Whether the data are those of planish/recipes/wordy_sums.py, whose rule is known."""
        return self.preference.dataset is None

    def stage_path(self, stage: str) -> Path:
        """Return the directory of a stage."""
        return Path(self.log_path).expanduser() / stage


@dataclass(frozen=True)
class TrainedModels:
    """The results of the first two stages."""

    sft_path: str
    """Checkpoint of the SFT policy. RL starts from it, and evaluations compare the policy with
    it.
    """
    judge: PreferenceModelBuilder


def check(options: Options) -> None:
    """Raise UserError for an invalid option of any stage, before the first stage begins."""
    own = {options.sft.dataset is not None, options.preference.dataset is not None}
    if len(own) > 1 or (options.rl.dataset is not None and options.generates_sums):
        raise UserError(
            "your own data need chats and comparisons: give both sft.dataset and "
            "preference.dataset (and rl.dataset, if the prompts are not those of the "
            "comparisons), or none of them for generated sums"
        )
    stages = {"sft": options.sft, "preference": options.preference, "rl": options.rl}
    for name, stage in stages.items():
        if stage.dataset is None:
            training_run.reject_unused(
                stage,
                ("train_split", "test_split"),
                f"names a split of {name}.dataset, which is not given; leave it out",
            )
    if options.generates_sums and options.sums.test_size == 0:
        raise UserError("sums.test_size=0: give at least 1; policies are compared on held-out sums")
    check_fields(options)
    with_stage("sft", lambda: supervised.check(sft_config(options)))
    with_stage("preference", lambda: model_training.check(preference_config(options)))
    with_stage("rl", lambda: check_rl(options))


def check_rl(options: Options) -> None:
    """Raise UserError for an invalid option of the RL stage."""
    check_fields(options.rl)
    rl.check(rl_config(options, TrainedModels("the checkpoint to come", RuleBuilder()), None))


def check_data(options: Options, renderer: Renderer, service_client: ServiceClient) -> None:
    """Raise UserError if the data of a stage cannot be used. The data of all stages are read at the
    start, so that a later stage does not fail because of them.
    """
    untrained_judge = TrainedPreferenceModelBuilder(
        kind=options.preference.kind, model_name=options.model_name, renderer_name=renderer.name
    )(service_client)
    with_stage("sft", sft_config(options).dataset_builder)
    with_stage("preference", preference_config(options).dataset_builder)
    rl_prompts = with_stage("rl", prompts(options))
    for split, split_prompts in (("train", rl_prompts.train), ("test", rl_prompts.test)):
        if not split_prompts:
            raise UserError(f"rl: there are no {split} prompts; give at least one")
        select = partial(
            fitting_prompts, split_prompts, renderer, split, options.rl.max_prompt_tokens
        )
        used = with_stage("rl", select).problems
        if split == "test":
            used = used[: options.test_prompts]
        with_stage("rl", partial(require_judge_fits, untrained_judge, used, options.rl.max_tokens))


def with_stage(name: str, work: Callable[[], T]) -> T:
    """Return the result of `work`. The message of a UserError gets the name of the stage."""
    try:
        return work()
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def sft_config(options: Options) -> supervised.Config:
    """Return the config of the supervised training."""
    stage = options.sft
    config_options = shared_options(options, stage, SFT, SLOptions)
    sl = SLOptions(**{**config_options, "dataset": stage.dataset or "generated sums"})
    chats = chat_builder(sl, sl.dataset)
    builder: SupervisedDatasetBuilder = chats
    if stage.dataset is None:
        builder = WordySumChats(common_config=chats.common_config, sums=options.sums)
    return sl_config(sl, builder, recipe_name=RECIPE)


def preference_config(options: Options) -> model_training.Config:
    """Return the config of the training of the preference model."""
    config_options = shared_options(
        options, options.preference, PREFERENCE_MODEL, preference_model.Options
    )
    config = preference_model.model_config(preference_model.Options(**config_options))
    builder = chz.replace(config.dataset_builder, comparison_builder=comparisons(options))
    return chz.replace(config, dataset_builder=builder, recipe_name=RECIPE)


def rl_config(
    options: Options, trained: TrainedModels, service_client: ServiceClient | None
) -> rl.Config:
    """Return the config of the RL stage."""
    stage = options.rl
    config_options = shared_options(options, stage, RL, RLOptions)
    config_options["load_checkpoint_path"] = trained.sft_path
    if stage.kl_penalty_coef:
        config_options["kl_reference_checkpoint"] = trained.sft_path
    rl_options = RLOptions(**config_options)
    builder = training_run.build(
        PairwisePreferenceRLDatasetBuilder,
        stage,
        prompt_builder=prompts(options),
        preference_model_builder=trained.judge,
        policy_model_name=options.model_name,
        policy_renderer_name=options.renderer_name,
        tournament_pattern=tournament_pattern_of(options),
        seed=options.seed,
        service_client=service_client,
    )
    tests = [comparison_evaluator_builder(options, trained, service_client, options.seed)]
    return train_config(rl_options, builder, recipe_name=RECIPE, evaluator_builders=tests)


def comparison_evaluator_builder(
    options: Options, trained: TrainedModels, service_client: ServiceClient | None, seed: int
) -> ComparisonEvaluatorBuilder:
    """Return the evaluator that compares a policy with the SFT policy. The judges are the
    preference model and, for generated sums, the rule.
    """
    known: dict[str, PreferenceModelBuilder] = (
        {"rule": RuleBuilder()} if options.generates_sums else {}
    )
    return training_run.build(
        ComparisonEvaluatorBuilder,
        options.rl,
        prompt_builder=prompts(options),
        judge_builders={"preference_model": trained.judge, **known},
        policy_model_name=options.model_name,
        policy_renderer_name=options.renderer_name,
        reference_checkpoint_path=trained.sft_path,
        max_prompts=options.test_prompts,
        seed=seed,
        service_client=service_client,
    )


def shared_options(options: Options, stage: Any, directory: str, target: type) -> dict[str, Any]:
    """Return a value for each field of `target` that is an option of the stage or of the run. An
    option of the stage takes precedence.
    """
    names = chz.chz_fields(target).keys()
    stage_options = {
        name: getattr(stage, name) for name in chz.chz_fields(type(stage)) if name in names
    }
    run_options = {
        name: getattr(options, name) for name in chz.chz_fields(Options) if name in names
    }
    wandb_name = f"{options.wandb_name}-{directory}" if options.wandb_name else None
    return (
        run_options
        | stage_options
        | {"log_path": str(options.stage_path(directory)), "wandb_name": wandb_name}
    )


def comparisons(options: Options) -> ComparisonBuilder:
    """Return the builder of the comparisons."""
    if options.generates_sums:
        return WordySumComparisons(sums=options.sums)
    return training_run.build(
        ComparisonBuilderFromRows, options.preference, shuffle_seed=options.seed
    )


def prompts(options: Options) -> PromptBuilder:
    """Return the builder of the prompts for RL and evaluation."""
    if options.rl.dataset is not None:
        return training_run.build(PromptsFromRows, options.rl, shuffle_seed=options.seed)
    if options.generates_sums:
        return WordySumPrompts(sums=options.sums)
    return PromptsOfComparisons(comparison_builder=comparisons(options))


def tournament_pattern_of(options: Options) -> TournamentPattern:
    """Return which answers of a group are compared."""
    if options.rl.tournament_pattern is not None:
        return options.rl.tournament_pattern
    if options.preference.kind == "chat":
        return TournamentPattern.ALL_PAIRS_BOTH_WAYS
    return TournamentPattern.ALL_PAIRS_ONE_WAY
