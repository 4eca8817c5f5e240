"""One step of GRPO: sample a group of answers to each problem, compare them within the group, train
on the difference.

Legend: P problems of a batch, G rollouts of a group, T tokens of a rollout, D datums.

The advantage of a rollout is its reward minus the mean reward of its group. There is no division by
the standard deviation, which would favour problems that are nearly always or nearly never solved
(Dr. GRPO, Liu et al. 2025). A group whose rewards are all equal teaches nothing and is left out.
Sampled tokens and their logprobs go to the trainer as they are; nothing is tokenised again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planish.errors import UserError
from planish.rl.data_processing import LOSS_MASKS
from planish.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ModelInput,
    SampledSequence,
    SamplingParams,
    with_seed,
)

Metrics = dict[str, float]


@dataclass(frozen=True)
class Judgement:
    """What a grader says of one answer."""

    reward: float
    metrics: Mapping[str, float]
    """Reported as env/all/NAME, the mean over rollouts."""


@dataclass(frozen=True)
class Rollout:
    tokens_T: list[int]
    logprobs_T: list[float]
    stop_reason: str
    judgement: Judgement


@dataclass(frozen=True)
class RolloutGroup:
    """All answers to one problem."""

    prompt: ModelInput
    rollouts_G: list[Rollout]
    cached_prompt_tokens: int

    @property
    def rewards_G(self) -> list[float]:
        return [rollout.judgement.reward for rollout in self.rollouts_G]

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards_G) / len(self.rewards_G)

    @property
    def is_degenerate(self) -> bool:
        return len(set(self.rewards_G)) == 1

    @property
    def advantages_G(self) -> list[float]:
        mean = self.mean_reward
        return [reward - mean for reward in self.rewards_G]


@dataclass(frozen=True)
class TrainingExample:
    """A datum with the rollout that it was made of."""

    rollout: Rollout
    datum: Datum


def sample_groups(
    sampling_client: Any,
    prompts_P: Sequence[ModelInput],
    judge: Callable[[int, SampledSequence], Judgement],
    *,
    group_size: int,
    params: SamplingParams,
    seeds_P: Sequence[int],
    on_group: Callable[[], None] = lambda: None,
) -> list[RolloutGroup]:
    """`group_size` answers to each prompt, all requests in flight at once; `judge(p, sequence)`
    rewards those of prompt p.
    """
    futures_P = [
        sampling_client.sample(
            prompt=prompt, num_samples=group_size, sampling_params=with_seed(params, seed)
        )
        for prompt, seed in zip(prompts_P, seeds_P, strict=True)
    ]
    groups_P = []
    for index, (prompt, future) in enumerate(zip(prompts_P, futures_P, strict=True)):
        response = future.result()
        rollouts_G = [
            Rollout(
                sequence.tokens, sequence.logprobs, sequence.stop_reason, judge(index, sequence)
            )
            for sequence in response.sequences
        ]
        groups_P.append(RolloutGroup(prompt, rollouts_G, response.prompt_cache_hit_tokens))
        on_group()
    return groups_P


def training_examples(groups_P: Sequence[RolloutGroup], loss_fn: str) -> list[TrainingExample]:
    """One example for each rollout of the groups that teach something."""
    return [
        TrainingExample(
            rollout,
            answer_datum(group.prompt, rollout.tokens_T, rollout.logprobs_T, advantage, loss_fn),
        )
        for group in groups_P
        if not group.is_degenerate
        for rollout, advantage in zip(group.rollouts_G, group.advantages_G, strict=True)
    ]


def answer_datum(
    prompt: ModelInput,
    tokens_T: Sequence[int] | np.ndarray,
    logprobs_T: Sequence[float] | np.ndarray,
    advantage: float,
    loss_fn: str = "importance_sampling",
) -> Datum:
    """Prompt and sampled answer as one sequence, shifted: position i reads token i and is scored on
    token i + 1.

    The prompt's own positions have advantage 0, so their targets and logprobs do not matter.
    """
    if not isinstance(prompt, ModelInput):
        raise UserError(f"prompt is a {type(prompt).__name__}; give ModelInput.from_ints(tokens)")
    before = prompt.length - 1
    inputs = {
        "target_tokens": [*[0] * before, *tokens_T],
        "logprobs": [*[0.0] * before, *logprobs_T],
        "advantages": [0.0] * before + [advantage] * len(tokens_T),
    }
    if loss_fn in LOSS_MASKS:
        inputs[LOSS_MASKS[loss_fn]] = [0.0] * before + [1.0] * len(tokens_T)
    return Datum(prompt.append(EncodedTextChunk(tokens=list(tokens_T[:-1]))), inputs)


def train_step(
    training_client: Any,
    examples_D: Sequence[TrainingExample],
    *,
    loss_fn: str,
    loss_fn_config: Mapping[str, float] | None,
    adam: AdamParams,
) -> Metrics:
    """One gradient step, both operations submitted before either is waited for. {} if there is
    nothing to learn from.
    """
    if not examples_D:
        return {}
    data = [example.datum for example in examples_D]
    backward = training_client.forward_backward(data, loss_fn, loss_fn_config=loss_fn_config)
    update = training_client.optim_step(adam)
    output = backward.result()
    trained_D = [tensors["logprobs"].tolist() for tensors in output.loss_fn_outputs]
    metrics = {
        f"optim/{name}": value for name, value in (output.metrics | update.result().metrics).items()
    }
    return metrics | policy_gap([example.rollout.logprobs_T for example in examples_D], trained_D)


def policy_gap(
    sampled_D: Sequence[Sequence[float]], trained_D: Sequence[Sequence[float]]
) -> Metrics:
    """How far the trainer's logprobs of the sampled tokens are from the sampler's: estimators of
    the KL divergence.

    v1 is the mean difference, v2 half the mean squared difference; both are 0 when sampler and
    trainer agree.
    """
    gaps = [
        sampled - trained
        for sampled_T, trained_T in zip(sampled_D, trained_D, strict=True)
        for sampled, trained in zip(
            sampled_T, trained_T[len(trained_T) - len(sampled_T) :], strict=True
        )
    ]
    return {
        "optim/kl_sample_train_v1": sum(gaps) / len(gaps),
        "optim/kl_sample_train_v2": 0.5 * sum(gap * gap for gap in gaps) / len(gaps),
    }


def rollout_metrics(groups_P: Sequence[RolloutGroup], prefix: str = "env/all") -> Metrics:
    """What happened in the environment: rewards, lengths, how answers ended, how many groups teach
    something.
    """
    rollouts = [rollout for group in groups_P for rollout in group.rollouts_G]
    answer_tokens = sum(len(rollout.tokens_T) for rollout in rollouts)
    prompt_tokens = sum(group.prompt.length * len(group.rollouts_G) for group in groups_P)
    names = sorted({name for rollout in rollouts for name in rollout.judgement.metrics})
    constant = [group for group in groups_P if group.is_degenerate]
    good = sum(group.mean_reward >= 0.5 for group in constant)
    metrics = {
        "reward/total": _mean([reward for group in groups_P for reward in group.rewards_G]),
        **{
            name: _mean(
                [r.judgement.metrics[name] for r in rollouts if name in r.judgement.metrics]
            )
            for name in names
        },
        "stop/completed": _mean([rollout.stop_reason == "stop" for rollout in rollouts]),
        "stop/max_tokens": _mean([rollout.stop_reason == "length" for rollout in rollouts]),
        "ac_tokens_per_turn": answer_tokens / len(rollouts),
        "ob_tokens_per_turn": prompt_tokens / len(rollouts),
        "turns_per_episode": 1.0,
        "total_episodes": len(rollouts),
        "total_turns": len(rollouts),
        "total_ac_tokens": answer_tokens,
        "total_ob_tokens": prompt_tokens,
        "total_cached_ob_tokens": sum(group.cached_prompt_tokens for group in groups_P),
        "by_group/frac_mixed": 1 - len(constant) / len(groups_P),
        "by_group/frac_degenerate": len(constant) / len(groups_P),
        "by_group/frac_all_good": good / len(groups_P),
        "by_group/frac_all_bad": (len(constant) - good) / len(groups_P),
    }
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def sampling_entropy(groups_P: Sequence[RolloutGroup]) -> float:
    """Mean of -logprob over all sampled tokens: an estimate of the policy's entropy for a token, in
    nats.
    """
    return -_mean(
        [
            logprob
            for group in groups_P
            for rollout in group.rollouts_G
            for logprob in rollout.logprobs_T
        ]
    )


@dataclass
class Stopwatch:
    """Seconds of the named parts of a step."""

    seconds: dict[str, float]
    started: float

    @classmethod
    def start(cls) -> "Stopwatch":
        return cls({}, time.perf_counter())

    def lap(self, name: str) -> float:
        """Give the time since the last lap to `name`; returns it."""
        now = time.perf_counter()
        elapsed = now - self.started
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        self.started = now
        return elapsed

    def metrics(self) -> Metrics:
        total = {"time/total": sum(self.seconds.values())}
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()} | total


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
