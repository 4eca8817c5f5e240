"""The options of an RL run, and the checks that reject wrong ones.

Options that the public cookbooks have too keep the cookbooks' names and defaults.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

import chz

from planish.errors import UnsupportedError, UserError, suggest_arguments
from planish.processes.ray_cluster import import_ray, join_cluster
from planish.rl.advantages import ADVANTAGES, AdvantageEstimator
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.own_functions import (
    check_own_advantage,
    check_own_loss,
    import_path,
    is_import_path,
)
from planish.rl.returns import DEFAULT_BUFFER_FRACTION, TrainingRewards, Truncated
from planish.rl.rollout.strategy import RolloutStrategy, strategy_from
from planish.rl.types import RLDatasetBuilder
from planish.service import complete_config
from planish.training.option_rules import (
    NOT_NEGATIVE,
    POSITIVE,
    SAMPLING_TEMPERATURE,
    USUAL_NAMES,
    Metadata,
    at_least,
    check_fields,
    require,
    rule,
    zero_for,
)
from planish.training.run_options import RunOptions, check_run
from planish.training.scoring_models import KLReferenceConfig

if TYPE_CHECKING:
    from planish.client.custom_loss import CustomLoss

RL_LOSSES = ("importance_sampling", "ppo", "cispo", "gspo", "dro")


@chz.chz
class AsyncConfig:
    """Options of asynchronous runs, in which sampling runs ahead of training."""

    max_steps_off_policy: int = chz.field(
        doc="maximum number of steps between the weights that sample a group and the step that "
        "trains on it",
        metadata=zero_for("synchronous"),
    )
    groups_per_batch: int | None = chz.field(
        default=None,
        doc="groups per step; none = the dataset's own batches",
        metadata=at_least(1),
    )


@chz.chz
class StreamMinibatchConfig:
    """Options of streaming. Gradients of finished groups are computed while the other groups of the
    batch are still being rolled out.
    """

    num_minibatches: int = chz.field(
        doc="minibatches per substep; each is one forward_backward", metadata=at_least(1)
    )
    groups_per_batch: int | None = chz.field(
        default=None,
        doc="groups per step; none = the dataset's own batches",
        metadata=at_least(1),
    )


def advantage_name(value: "str | AdvantageEstimator", *, chzself: object = None) -> str:
    """Return the name or the import path of an advantage."""
    return import_path("advantage", value)


def _loss_name(value: "str | CustomLoss", *, chzself: object = None) -> str:
    return import_path("loss_fn", value)


def _name_or_function(names: Collection[str]) -> Metadata:
    """Return the rule for a name, or the import path of a function of the user's own."""
    return rule(
        lambda value: value in names or is_import_path(value),
        f"one of {', '.join(names)}, or a function as module:name",
    )


ADVANTAGE_RULE = _name_or_function(ADVANTAGES)
"""The rule for `advantage`."""


@chz.chz
class LossOptions:
    """How rewards become a loss."""

    temperature: float = chz.field(
        default=1.0,
        doc="sampling temperature, which the loss uses too",
        metadata=SAMPLING_TEMPERATURE,
    )
    loss_fn: str = chz.field(
        default="importance_sampling",
        doc=f"loss: one of {', '.join(RL_LOSSES)}, or a function as module:name",
        metadata=_name_or_function(RL_LOSSES),
        converter=_loss_name,
    )
    loss_fn_config: dict[str, float] | None = chz.field(
        default=None,
        doc="options of the loss, such as loss_fn_config.clip_high_threshold=1.3; for a function of "
        "your own, its keyword arguments",
    )
    advantage: str = chz.field(
        default="mean",
        doc=f"advantage estimator: one of {', '.join(ADVANTAGES)}, or a function as module:name",
        metadata=ADVANTAGE_RULE,
        converter=advantage_name,
    )
    advantage_config: dict[str, float] | None = chz.field(
        default=None,
        doc="keyword arguments of an advantage of your own, such as advantage_config.power=2",
    )
    remove_constant_reward_groups: bool = chz.field(
        default=False,
        doc="leave out groups whose rewards are all equal and whose advantages are 0",
    )
    turn_discount: float | None = chz.field(
        default=None,
        doc="discount of later turns' rewards: each turn is trained on its discounted rewards to "
        "go, 1 = their sum; none = every turn on the reward of the whole episode",
        metadata=rule(lambda value: 0 < value <= 1, "a number above 0 and at most 1, or None"),
    )
    truncated: Truncated = chz.field(
        default="keep",
        doc="answers that max_tokens cuts off: keep = train on their reward, mask = do not train "
        "on them, penalise = lower the reward of answers near max_tokens",
    )
    overlong_buffer: int | None = chz.field(
        default=None,
        doc="truncated=penalise: number of tokens before max_tokens in which the penalty grows "
        "from 0 to its maximum; none = a fifth of max_tokens",
    )
    overlong_coef: float = chz.field(
        default=1.0, doc="truncated=penalise: the maximum penalty", metadata=POSITIVE
    )
    max_refills: int = chz.field(
        default=0,
        doc="dynamic sampling: maximum number of further batches that a step rolls out while too "
        "few of its groups have advantages; 0 = none",
        metadata=zero_for("none"),
    )
    min_mixed_groups: int | None = chz.field(
        default=None,
        doc="max_refills: number of groups with advantages that are enough; none = as many as the "
        "step's batch has groups",
        metadata=at_least(1),
    )
    num_substeps: int = chz.field(default=1, doc="optimizer steps per batch", metadata=at_least(1))
    kl_penalty_coef: float = chz.field(
        default=0.0, doc="coefficient of the KL penalty; 0 = none", metadata=NOT_NEGATIVE
    )
    kl_discount_factor: float = chz.field(
        default=0.0,
        doc="discount of the later tokens' KL terms; 0 = each token gets only its own term",
        metadata=rule(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    )
    compute_post_kl: bool = chz.field(
        default=False, doc="log the KL between the policies before and after each step"
    )


@chz.chz
class RolloutOptions:
    """How environments are rolled out, and which rollouts are written to files."""

    max_tokens: int = chz.field(doc="maximum number of tokens in an answer", metadata=at_least(1))
    rollout_processes: int | Literal["ray"] = chz.field(
        default=0,
        doc="number of processes that run environments; 0 = only this process, ray = one for each "
        "free CPU of a Ray cluster",
        metadata=rule(
            lambda value: value == "ray" or (isinstance(value, int) and value >= 0),
            "a whole number, 0 for this process, or ray",
        ),
    )
    eval_temperature: float | None = chz.field(
        default=None,
        doc="sampling temperature in evaluations; 0 = greedy, none = temperature",
        metadata=NOT_NEGATIVE,
    )
    eval_samples: int = chz.field(
        default=1,
        doc="answers per test problem in evaluations; more than 1 adds the metrics avg@n and pass@k",
        metadata=at_least(1),
    )
    num_groups_to_log: int = chz.field(
        default=4,
        doc="number of groups per step whose environment logs are written; a page of rollouts "
        "shows at least this many groups, or none if it is 0",
        metadata=zero_for("none"),
    )
    rollout_layout: Literal["flat", "folders"] = chz.field(
        default="flat", doc="flat = all files in one directory, folders = one directory per step"
    )
    deterministic: bool | None = chz.field(
        default=None, doc="batch-invariant sampling; none = the default of ServiceClient"
    )


@suggest_arguments(**USUAL_NAMES)
@chz.chz
class Config(RolloutOptions, LossOptions, RunOptions):
    """The options of an RL run."""

    dataset_builder: RLDatasetBuilder
    lr_schedule: str = "constant"
    kl_reference_config: KLReferenceConfig | None = None
    async_config: AsyncConfig | None = None
    stream_minibatch_config: StreamMinibatchConfig | None = None
    rollout_error_tolerance: bool | RolloutStrategy | None = None
    termination: TerminationRewardPolicy | None = None
    evaluator_builders: Sequence[Callable[[], Any]] = ()
    rollout_json_export: bool = True

    @property
    def lag(self) -> int:
        """The largest number of steps between the weights that sample a group and the step that
        trains on it.
        """
        return self.async_config.max_steps_off_policy if self.async_config else 0

    @property
    def training_rewards(self) -> TrainingRewards:
        """How the rewards of a group become advantages."""
        buffer = self.overlong_buffer or math.ceil(DEFAULT_BUFFER_FRACTION * self.max_tokens)
        return TrainingRewards(
            self.advantage,
            self.turn_discount,
            self.truncated,
            self.max_tokens,
            buffer,
            self.overlong_coef,
            self.advantage_config,
        )

    def scoring_models(self) -> dict[str, str]:
        """Return the base models that score the policy's tokens, by the option that names each."""
        reference = self.kl_reference_config
        return {} if reference is None else {"kl_reference_config": reference.base_model}

    @property
    def groups_per_batch(self) -> int | None:
        """Groups per step; None for the dataset's own batches. Raise UserError if two options
        differ.
        """
        sizes = {
            options.groups_per_batch
            for options in (self.async_config, self.stream_minibatch_config)
            if options
        } - {None}
        if len(sizes) > 1:
            raise UserError(
                "groups_per_batch differs between async_config and stream_minibatch_config; give "
                "one number"
            )
        return sizes.pop() if sizes else None


def check(config: Config) -> None:
    """Raise UserError for an invalid option. It runs before anything is loaded."""
    check_all_but_reference(config)
    _check_reference(config)
    if config.advantage == "none" and config.kl_penalty_coef == 0:
        raise UserError(
            "advantage=none and kl_penalty_coef=0: the policy would learn nothing; give another "
            "advantage, or a kl_penalty_coef above 0"
        )


def check_all_but_reference(config: Config) -> None:
    """Raise UserError for an invalid option. Checks everything but `kl_reference_config` and the
    options that need it.

    Runs with another advantage shaping, such as distillation, use this check.
    """
    check_run(config)
    for ahead in (config.async_config, config.stream_minibatch_config):
        if ahead is not None:
            check_fields(ahead)
    require(
        config,
        eval_samples=(
            config.eval_samples == 1 or config.eval_temperature != 0,
            "1, or an eval_temperature above 0: greedy answers to a problem are all the same",
        ),
        overlong_buffer=(
            config.overlong_buffer is None or 1 <= config.overlong_buffer <= config.max_tokens,
            f"a whole number from 1 to max_tokens={config.max_tokens}",
        ),
    )
    _check_own_functions(config)
    if (
        config.loss_fn in RL_LOSSES
        and complete_config(config.loss_fn, config.loss_fn_config)["skip_unweighted"]
    ):
        raise UserError(
            "loss_fn_config['skip_unweighted']=1: leave it out, because the run compares the "
            "logprobs of all sampled tokens with the sampler's"
        )
    strategy_from(config.rollout_error_tolerance)
    _check_rollout_processes(config)
    _check_group_size(config)
    _check_refills(config)
    _check_unused(config)


def _check_rollout_processes(config: Config) -> None:
    """Raise UserError if environments cannot run on a Ray cluster."""
    if config.rollout_processes != "ray":
        return
    import_ray()
    if config.replicas is not None and config.ray is None:
        raise UserError(
            f"rollout_processes=ray with replicas={config.replicas}: without ray=ADDRESS, the "
            "cluster is this machine alone, and its CPUs are those of the replicas; give "
            "rollout_processes=N for N processes, or the address of a cluster as ray"
        )
    if config.ray is None:
        join_cluster("auto")


def _check_own_functions(config: Config) -> None:
    """Raise UserError for an advantage or a loss of the user's own that cannot be used."""
    if is_import_path(config.advantage):
        group_size = config.dataset_builder.smallest_group_size()
        check_own_advantage(config.advantage, config.advantage_config, group_size)
    elif config.advantage_config:
        raise UserError(
            f"advantage_config is for functions of your own, and advantage={config.advantage} "
            "takes no options; leave advantage_config out"
        )
    if not is_import_path(config.loss_fn):
        return
    if config.temperature != 1.0:
        raise UnsupportedError(
            f"temperature={config.temperature} with loss_fn={config.loss_fn}: a loss of your own "
            "gets logprobs at temperature 1; give temperature=1, or a loss of planish"
        )
    check_own_loss(config.loss_fn, config.loss_fn_config)


def _check_group_size(config: Config) -> None:
    """Raise UserError for groups of one trajectory, unless rewards are not trained on, or the
    advantage is the user's own: it may have another baseline than the group.
    """
    group_size = config.dataset_builder.smallest_group_size()
    if config.advantage == "none" or is_import_path(config.advantage):
        return
    if group_size is not None and group_size < 2:
        raise UserError(
            f"dataset_builder has group_size={group_size}: give at least 2: answers are compared "
            "within their group, so a group of one answer teaches nothing"
        )


def _check_refills(config: Config) -> None:
    """Raise UserError for options that contradict dynamic sampling."""
    if config.max_refills == 0:
        if config.min_mixed_groups is not None:
            raise UserError(
                f"min_mixed_groups={config.min_mixed_groups} has no effect with max_refills=0; "
                "give max_refills, the largest number of further batches of a step"
            )
        return
    if not config.remove_constant_reward_groups:
        raise UserError(
            f"max_refills={config.max_refills} replaces groups whose rewards are all equal; give "
            "remove_constant_reward_groups=True too"
        )
    if config.advantage == "none":
        raise UserError(
            f"max_refills={config.max_refills} with advantage=none: no group ever has an "
            "advantage; leave one of the two out"
        )
    if config.stream_minibatch_config is not None:
        raise UnsupportedError(
            "max_refills and stream_minibatch_config (num_minibatches) exclude each other: a "
            "refill begins when the batch is complete, but streaming trains before; leave out one "
            "of the two"
        )


def _check_unused(config: Config) -> None:
    """Raise UserError for options that would have no effect."""
    if config.truncated != "penalise" and (
        config.overlong_buffer is not None or config.overlong_coef != 1.0
    ):
        raise UserError(
            f"overlong_buffer and overlong_coef are given, but truncated={config.truncated}; give "
            "truncated=penalise too"
        )
    if (config.wandb_project or config.wandb_name) and not {"wandb", "trackio"} & set(
        config.loggers
    ):
        raise UserError(
            "wandb_project and wandb_name are for W&B and Trackio; give loggers=wandb or trackio "
            "too"
        )
    if config.evaluator_builders and config.eval_every == 0:
        raise UserError(
            "evaluator_builders with eval_every=0: the evaluators would never run; give "
            "eval_every, the number of steps between evaluations"
        )


def _check_reference(config: Config) -> None:
    if config.kl_penalty_coef == 0:
        if config.kl_reference_config is not None:
            raise UserError(
                "kl_reference_config is given, but kl_penalty_coef is 0; give a coefficient such "
                "as 0.01"
            )
        if config.kl_discount_factor != 0:
            raise UserError(
                "kl_discount_factor is given, but kl_penalty_coef is 0; give a coefficient such as "
                "0.01"
            )
        return
    if config.kl_reference_config is None:
        raise UserError(
            f"kl_penalty_coef={config.kl_penalty_coef} needs kl_reference_config, the policy that "
            "the penalty refers to"
        )
    if config.temperature != 1.0:
        raise UnsupportedError(
            f"kl_penalty_coef with temperature={config.temperature}: the reference's logprobs are "
            "at temperature 1; give temperature=1, or leave out kl_penalty_coef"
        )
    if config.stream_minibatch_config is not None:
        raise UnsupportedError(
            "kl_penalty_coef and stream_minibatch_config (num_minibatches) exclude each other: the "
            "penalty subtracts its mean over the whole batch, but streaming trains before the "
            "batch is complete; leave out one of the two"
        )
