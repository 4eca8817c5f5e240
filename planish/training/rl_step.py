"""One training step: train on a batch of groups with one or several optimizer steps.

A batch is split into `num_substeps` substeps, and each substep ends with an optimizer step. With
`stream_minibatch_config`, a substep is split into minibatches of groups. The forward_backward call
of a minibatch is submitted as soon as its groups have been rolled out, and the gradients of a
substep's minibatches add up. Without this option, a substep is a single forward_backward call,
which is submitted after the whole batch has been rolled out.

Data whose advantages are all 0 have no gradient. Adam would still move the weights by its momentum,
so a minibatch of such data is not submitted, and a substep of such minibatches has no optimizer
step. For the loss dro this means that the pull towards the sampler's policy, which does not depend
on advantages, is left out as well. So are such terms of a loss of the user's own.

The split depends only on the order of the groups, not on which rollout finishes first. So the same
seed gives the same minibatches. A step submits all its operations before it awaits their results,
and the engine executes them in order.

With `max_refills` (dynamic sampling, DAPO, Yu et al. 2025), a step rolls out further batches until
`min_mixed_groups` of its groups have advantages, or `max_refills` batches were added. A step that
was refilled is trained on the first `min_mixed_groups` groups with advantages.

Suffixes of variable names: `_P` has one entry per group of the batch, `_D` one per training
sequence, and `_P_D` one list of training sequences per group.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from planish import TrainingClient
from planish.errors import UserError
from planish.reports.rollout_records import TrainedTokens
from planish.rl import kl
from planish.rl.data_processing import TrainingSequence, assemble_training_data
from planish.rl.own_functions import is_import_path, own_loss
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Metrics
from planish.runlog.spans import Spans
from planish.training.rl_config import Config
from planish.types import AdamParams, ForwardBackwardOutput

T = TypeVar("T")


def loss_options(config: Config) -> dict[str, float] | None:
    """Return the options of the loss. A sampling temperature other than 1 is added: rollouts are
    on-policy only if the loss divides its logits by the same temperature.
    """
    options = dict(config.loss_fn_config or {})
    if config.temperature != 1.0:
        options.setdefault("temperature", config.temperature)
    return options or None


@dataclass
class TrainingStep:
    """One training step that is being submitted: its data and its unfinished operations."""

    config: Config
    training_client: TrainingClient
    shaping: kl.AdvantageShaping | None
    """A term that is added to the advantages after they are computed, or None."""
    learning_rate: float
    sampled_D: list[TrainingSequence] = field(default_factory=list[TrainingSequence])
    """The sequences of all minibatches."""
    data_D: list[TrainingSequence] = field(default_factory=list[TrainingSequence])
    """The sequences of the minibatches that were submitted."""
    _pending_outputs: list[Any] = field(default_factory=list[Any])
    _minibatches_since_update: int = 0
    _pending_updates: list[Any] = field(default_factory=list[Any])
    _shaping_metrics: Metrics = field(default_factory=Metrics)
    refill_metrics: Metrics = field(default_factory=Metrics)
    """Metrics of dynamic sampling; {} without."""
    trained_tokens: dict[tuple[int, int], TrainedTokens] = field(
        default_factory=dict[tuple[int, int], TrainedTokens]
    )
    """The trained tokens of each trajectory, by (group, trajectory). `finish` fills it."""

    @property
    def has_submitted_update(self) -> bool:
        """Whether an optimizer step was submitted. The step can then no longer be abandoned."""
        return bool(self._pending_updates)

    async def forward_backward(self, data_D: Sequence[TrainingSequence]) -> None:
        """Submit the forward_backward call of one minibatch, unless all its advantages are 0."""
        self.sampled_D += data_D
        if not has_advantages(data_D):
            return
        config, client = self.config, self.training_client
        data = [sequence.datum(config.loss_fn) for sequence in data_D]
        if is_import_path(config.loss_fn):
            loss = own_loss(config.loss_fn, config.loss_fn_config)
            pending = await client.forward_backward_custom_async(data, loss)
        else:
            pending = await client.forward_backward_async(
                data, config.loss_fn, loss_fn_config=loss_options(config)
            )
        self._pending_outputs.append(pending)
        self.data_D += data_D
        self._minibatches_since_update += 1

    async def submit_update(self) -> None:
        """Submit the optimizer step of a substep, if there is a gradient."""
        if self._minibatches_since_update == 0:
            return
        adam = AdamParams(
            learning_rate=self.learning_rate,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            grad_clip_norm=self.config.grad_clip_norm,
        )
        self._pending_updates.append(await self.training_client.optim_step_async(adam))
        self._minibatches_since_update = 0

    @property
    def num_minibatches(self) -> int:
        """The number of submitted forward_backward calls."""
        return len(self._pending_outputs)

    async def finish(self, on_minibatch_done: Callable[[], None] = lambda: None) -> Metrics:
        """Wait for all submitted operations, and return the trainer's metrics. `on_minibatch_done`
        is called after each minibatch.
        """
        outputs: list[ForwardBackwardOutput] = []
        for pending in self._pending_outputs:
            outputs.append(await pending)
            on_minibatch_done()
        self.trained_tokens = trained_tokens(self.data_D, outputs)
        update_results = [await pending for pending in self._pending_updates]
        metrics: Metrics = {
            "optim/lr": self.learning_rate,
            **self._shaping_metrics,
            **self.refill_metrics,
        }
        metrics |= {f"optim/{name}": value for name, value in combine_metrics(outputs).items()}
        if update_results:
            metrics |= {
                f"optim/{name}": value for name, value in update_results[-1].metrics.items()
            }
        return metrics | kl.kl_metrics("optim/kl_sample_train", self.data_D, outputs)

    async def has_moved_weights(self) -> bool:
        """Wait for the optimizer steps, and return whether one was applied. A UserError means that
        a step was rejected. After any other error the weights may have changed, so return True.
        """
        for pending in self._pending_updates:
            try:
                await pending
            except UserError:
                continue
            except Exception:
                return True
            return True
        return False

    async def post_update_kl(self) -> Metrics:
        """Return kl_pre_post_v1 and _v2: how far the step moved the policy on its own data."""
        if not self.data_D:
            return {}
        loss_fn, options = self.config.loss_fn, loss_options(self.config)
        if is_import_path(loss_fn):  # only the logprobs are used
            loss_fn, options = "importance_sampling", None
        data = [sequence.datum(loss_fn) for sequence in self.data_D]
        pending = await self.training_client.forward_async(data, loss_fn, loss_fn_config=options)
        return kl.kl_metrics("kl_pre_post", self.data_D, [await pending])

    async def shape_advantages(
        self, shaping: kl.AdvantageShaping, data_P_D: list[list[TrainingSequence]]
    ) -> list[list[TrainingSequence]]:
        """Return the data of each group with the advantages that `shaping` gives them."""
        shaped_D, self._shaping_metrics = await shaping(flatten(data_P_D))
        sequences = iter(shaped_D)
        return [[next(sequences) for _ in group_D] for group_D in data_P_D]


def training_data(rollout: GroupRollout | None, config: Config) -> list[TrainingSequence]:
    """Return the training sequences of a group. A dropped group has none. With
    `remove_constant_reward_groups`, a group with equal rewards has none either.
    """
    if rollout is None:
        return []
    group, rewards = rollout.group, config.training_rewards
    if config.remove_constant_reward_groups and rewards.is_constant(group):
        return []
    sequences = assemble_training_data([group], [rewards.advantages(group)], rollout.teacher)
    return [replace(sequence, group_idx=rollout.group_idx) for sequence in sequences]


async def roll_out_and_submit(
    step: TrainingStep,
    groups_P: Sequence[Awaitable[GroupRollout | None]],
    guard: Callable[[Awaitable[GroupRollout | None]], Awaitable[GroupRollout | None]],
    spans: Spans,
    refill: Callable[[], None],
) -> list[GroupRollout]:
    """Submit a whole step on groups that may still be running. Return those that were not dropped.

    For dynamic sampling, `refill` starts the rollouts of a further batch and appends them to
    `groups_P`.

    `guard` awaits one group, and may raise to abandon the step. After the first optimizer step,
    groups are awaited without `guard`, because the step can no longer be abandoned.
    """
    config = step.config
    rollouts_P: list[GroupRollout | None] = []

    async def wait_for_groups(count: int) -> None:
        """Wait until `rollouts_P` contains the first `count` groups."""
        while len(rollouts_P) < count:
            group = groups_P[len(rollouts_P)]
            rollouts_P.append(await (group if step.has_submitted_update else guard(group)))

    if config.stream_minibatch_config is not None:
        with spans.measure("sampling"):
            for substep in split_evenly(range(len(groups_P)), config.num_substeps):
                for minibatch in split_evenly(
                    substep, config.stream_minibatch_config.num_minibatches
                ):
                    await wait_for_groups(minibatch[-1] + 1)
                    await step.forward_backward(
                        flatten(training_data(rollouts_P[i], config) for i in minibatch)
                    )
                await step.submit_update()
    else:
        with spans.measure("sampling"):
            await wait_for_groups(len(groups_P))
        with spans.measure("assemble_training_data"):
            data_P_D = [training_data(rollout, config) for rollout in rollouts_P]
        if config.max_refills:
            num_enough, num_refills = config.min_mixed_groups or len(groups_P), 0
            while count_mixed(data_P_D) < num_enough and num_refills < config.max_refills:
                num_refills += 1
                with spans.measure("sampling"):
                    refill()
                    await wait_for_groups(len(groups_P))
                data_P_D += [training_data(one, config) for one in rollouts_P[len(data_P_D) :]]
            step.refill_metrics = refill_metrics(num_refills, count_mixed(data_P_D), num_enough)
            if num_refills:
                mixed_P_D = [group_D for group_D in data_P_D if has_advantages(group_D)]
                data_P_D = mixed_P_D[:num_enough]
        if step.shaping is not None:
            with spans.measure(step.shaping.timing_name):
                data_P_D = await step.shape_advantages(step.shaping, data_P_D)
        for substep_P_D in split_evenly(data_P_D, config.num_substeps):
            await step.forward_backward(flatten(substep_P_D))
            await step.submit_update()
    return [rollout for rollout in rollouts_P if rollout is not None]


def trained_tokens(
    data_D: Sequence[TrainingSequence], outputs: Sequence[ForwardBackwardOutput]
) -> dict[tuple[int, int], TrainedTokens]:
    """Return the advantages and the trainer's logprobs of all trained tokens, by (group,
    trajectory). `outputs` are the results of the sequences, in order.
    """
    parts: dict[tuple[int, int], list[TrainedTokens]] = {}
    results = (result for output in outputs for result in output.loss_fn_outputs)
    for sequence, result in zip(data_D, results, strict=True):
        if sequence.group_idx is None or sequence.trajectory is None:
            continue
        is_trained = sequence.mask_N[1:] > 0
        tokens = TrainedTokens(
            sequence.advantages_N[1:][is_trained], result["logprobs"].to_numpy()[is_trained]
        )
        parts.setdefault((sequence.group_idx, sequence.trajectory), []).append(tokens)
    return {place: TrainedTokens.joined(tokens) for place, tokens in parts.items()}


def has_advantages(group_D: Iterable[TrainingSequence]) -> bool:
    """Return whether any token of a group has an advantage other than 0."""
    return any(sequence.advantages_N.any() for sequence in group_D)


def count_mixed(data_P_D: Iterable[Sequence[TrainingSequence]]) -> int:
    """Return the number of groups with advantages."""
    return sum(has_advantages(group_D) for group_D in data_P_D)


def refill_metrics(num_refills: int, num_mixed: int, num_enough: int) -> Metrics:
    """Return the metrics of dynamic sampling."""
    return {
        "dynamic_sampling/refills": num_refills,
        "dynamic_sampling/mixed_groups": num_mixed,
        "dynamic_sampling/missing_groups": max(0, num_enough - num_mixed),
        "dynamic_sampling/unused_groups": max(0, num_mixed - num_enough) if num_refills else 0,
    }


def flatten(data_P_D: Iterable[Sequence[TrainingSequence]]) -> list[TrainingSequence]:
    """Return the sequences of all groups as one list."""
    return [sequence for group_D in data_P_D for sequence in group_D]


def split_evenly(items: Sequence[T], num_parts: int) -> Iterator[Sequence[T]]:
    """Yield `items` in at most `num_parts` contiguous, non-empty pieces of nearly equal size."""
    num_parts = min(num_parts, len(items))
    for index in range(num_parts):
        yield items[index * len(items) // num_parts : (index + 1) * len(items) // num_parts]


def combine_metrics(outputs: Sequence[ForwardBackwardOutput]) -> Metrics:
    """Combine the metrics of several calls. The suffix of a name says how: ":sum", ":min", ":max".
    All others are averaged, weighted by the number of sequences.
    """
    by_name: dict[str, list[tuple[float, int]]] = {}
    for output in outputs:
        for name, value in output.metrics.items():
            by_name.setdefault(name, []).append((value, len(output.loss_fn_outputs)))
    return {name: _reduce_metric(name, values) for name, values in by_name.items()}


def _reduce_metric(name: str, values: Sequence[tuple[float, int]]) -> float:
    match name.rpartition(":")[2]:
        case "sum":
            return sum(value for value, _ in values)
        case "min":
            return min(value for value, _ in values)
        case "max":
            return max(value for value, _ in values)
        case _:
            return sum(value * count for value, count in values) / sum(count for _, count in values)
