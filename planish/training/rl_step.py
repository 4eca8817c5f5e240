"""One training step: groups in, gradient out, weights one or several optimizer steps further.

Legend: P groups of a batch, S substeps, M minibatches of a substep, D sequences.

The batch is cut by groups: S substeps, each ended by an optimizer step, each cut into M
minibatches, each one forward_backward. Gradients add up over the minibatches of a substep. What is
cut is fixed by the order of the groups alone, never by which was done first, so the same seed gives
the same sums. Operations are submitted before their results are waited for, and the engine works
through them in order.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from planish import TrainingClient
from planish.errors import UserError
from planish.rl import kl
from planish.rl.advantages import is_constant
from planish.rl.data_processing import TrainingSequence, assemble_training_data, compute_advantages
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Metrics
from planish.runlog.spans import Spans
from planish.training.rl_config import Config
from planish.types import AdamParams, ForwardBackwardOutput

T = TypeVar("T")


def loss_config(config: Config) -> dict[str, float] | None:
    """The loss's options; rollouts at another temperature are on-policy only if the loss scales its
    logits alike.
    """
    given = dict(config.loss_fn_config or {})
    if config.temperature != 1.0:
        given.setdefault("temperature", config.temperature)
    return given or None


@dataclass
class TrainingStep:
    """A step under way."""

    config: Config
    training_client: TrainingClient
    shaping: kl.AdvantageShaping | None
    """What changes the advantages after they are computed; None if nothing does."""
    learning_rate: float
    data_D: list[TrainingSequence] = field(default_factory=list)
    _pending: list[Any] = field(default_factory=list)
    _since_update: int = 0
    _updates: list[Any] = field(default_factory=list)
    _shaping_metrics: Metrics = field(default_factory=dict)

    @property
    def has_updated(self) -> bool:
        """An optimizer step is under way: the step can no longer be left undone."""
        return bool(self._updates)

    async def forward_backward(self, data_D: Sequence[TrainingSequence]) -> None:
        """Submit the gradient of one minibatch; nothing happens without data."""
        if not data_D:
            return
        config = self.config
        data = [sequence.datum(config.loss_fn) for sequence in data_D]
        self._pending.append(
            await self.training_client.forward_backward_async(
                data, config.loss_fn, loss_fn_config=loss_config(config)
            )
        )
        self.data_D += data_D
        self._since_update += 1

    async def update(self) -> None:
        """Submit the optimizer step of a substep, if there is a gradient."""
        if self._since_update == 0:
            return
        adam = AdamParams(
            learning_rate=self.learning_rate,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            grad_clip_norm=self.config.grad_clip_norm,
        )
        self._updates.append(await self.training_client.optim_step_async(adam))
        self._since_update = 0

    @property
    def num_minibatches(self) -> int:
        """Calls of forward_backward under way."""
        return len(self._pending)

    async def finish(self, minibatch_done: Callable[[], None] = lambda: None) -> Metrics:
        """Wait for everything; what the trainer said of it."""
        outputs = []
        for pending in self._pending:
            outputs.append(await pending)
            minibatch_done()
        updates = [await pending for pending in self._updates]
        metrics: Metrics = {"optim/lr": self.learning_rate, **self._shaping_metrics}
        metrics |= {f"optim/{name}": value for name, value in summed(outputs).items()}
        if updates:
            metrics |= {f"optim/{name}": value for name, value in updates[-1].metrics.items()}
        return metrics | kl.kl_metrics("optim/kl_sample_train", self.data_D, outputs)

    async def has_moved_weights(self) -> bool:
        """Whether an optimizer step was applied, as far as is known; waits for those under way. A
        UserError says that none was.
        """
        for pending in self._updates:
            try:
                await pending
            except UserError:
                continue
            except Exception:
                return True
            return True
        return False

    async def post_update_kl(self) -> Metrics:
        """kl_pre_post_v1 and _v2: how far the step moved the policy on its own data."""
        if not self.data_D:
            return {}
        data = [sequence.datum(self.config.loss_fn) for sequence in self.data_D]
        pending = await self.training_client.forward_async(
            data, self.config.loss_fn, loss_fn_config=loss_config(self.config)
        )
        return kl.kl_metrics("kl_pre_post", self.data_D, [await pending])

    async def shaped(
        self, shaping: kl.AdvantageShaping, data_P_D: list[list[TrainingSequence]]
    ) -> list[list[TrainingSequence]]:
        """The data of each group with the advantages that `shaping` gives them."""
        shaped_D, self._shaping_metrics = await shaping(flat(data_P_D))
        remaining = iter(shaped_D)
        return [[next(remaining) for _ in group_D] for group_D in data_P_D]


def training_data(rollout: GroupRollout | None, config: Config) -> list[TrainingSequence]:
    """The sequences that a group gives; none of one that was dropped, or that is constant and to be
    removed.
    """
    if rollout is None:
        return []
    if config.remove_constant_reward_groups and is_constant(rollout.group.get_total_rewards()):
        return []
    advantages = compute_advantages([rollout.group], config.advantage)
    return assemble_training_data([rollout.group], advantages, rollout.teacher)


async def train_on(
    step: TrainingStep,
    groups_P: Sequence[Awaitable[GroupRollout | None]],
    guard: Callable[[Awaitable[GroupRollout | None]], Awaitable[GroupRollout | None]],
    spans: Spans,
) -> list[GroupRollout]:
    """Submit a whole step on groups that may still be played; returns those that were not dropped.

    `guard` waits for one group and may raise, to leave the step undone; it is asked until the first
    update only.
    """
    config = step.config
    rollouts_P: list[GroupRollout | None] = []

    async def wait_for(count: int) -> None:
        """The first `count` groups are in `rollouts_P` then."""
        while len(rollouts_P) < count:
            group = groups_P[len(rollouts_P)]
            rollouts_P.append(await (group if step.has_updated else guard(group)))

    if config.stream_minibatch_config is not None:
        with spans.measure("sampling"):
            for substep in split(range(len(groups_P)), config.num_substeps):
                for minibatch in split(substep, config.stream_minibatch_config.num_minibatches):
                    await wait_for(minibatch[-1] + 1)
                    await step.forward_backward(
                        flat(training_data(rollouts_P[i], config) for i in minibatch)
                    )
                await step.update()
    else:
        with spans.measure("sampling"):
            await wait_for(len(groups_P))
        with spans.measure("assemble_training_data"):
            data_P_D = [training_data(rollout, config) for rollout in rollouts_P]
        if step.shaping is not None:
            with spans.measure(step.shaping.span):
                data_P_D = await step.shaped(step.shaping, data_P_D)
        for substep_P_D in split(data_P_D, config.num_substeps):
            await step.forward_backward(flat(substep_P_D))
            await step.update()
    return [rollout for rollout in rollouts_P if rollout is not None]


def flat(data_P_D: Iterable[Sequence[TrainingSequence]]) -> list[TrainingSequence]:
    return [sequence for group_D in data_P_D for sequence in group_D]


def split(items: Sequence[T], parts: int) -> Iterator[Sequence[T]]:
    """`items` in at most `parts` contiguous pieces of nearly equal size, none of them empty."""
    parts = min(parts, len(items))
    for index in range(parts):
        yield items[index * len(items) // parts : (index + 1) * len(items) // parts]


def summed(outputs: Sequence[ForwardBackwardOutput]) -> Metrics:
    """The metrics of several calls as one: "name:sum" added up, "name:mean" averaged by their
    sequences, else the extreme.
    """
    by_name: dict[str, list[tuple[float, int]]] = {}
    for output in outputs:
        for name, value in output.metrics.items():
            by_name.setdefault(name, []).append((value, len(output.loss_fn_outputs)))
    return {name: _reduced(name, values) for name, values in by_name.items()}


def _reduced(name: str, values: Sequence[tuple[float, int]]) -> float:
    match name.rpartition(":")[2]:
        case "sum":
            return sum(value for value, _ in values)
        case "min":
            return min(value for value, _ in values)
        case "max":
            return max(value for value, _ in values)
        case _:
            return sum(value * count for value, count in values) / sum(count for _, count in values)
