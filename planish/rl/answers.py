"""Groups of single answers, for loops that sample and grade without environments.

Legend: P problems of a batch, G answers of a group, T tokens of an answer, D datums.
"""

# pyright: reportUnnecessaryIsInstance=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planish.errors import UserError
from planish.rl.advantages import is_constant
from planish.rl.data_processing import LOSS_MASKS
from planish.runlog.statistics import pass_at_k
from planish.types import Datum, EncodedTextChunk, ModelInput

Metrics = dict[str, float]


@dataclass(frozen=True)
class Answer:
    """A sampled answer with its grade."""

    tokens_T: list[int]
    logprobs_T: list[float]
    stop_reason: str
    reward: float
    metrics: Mapping[str, float]
    """Metrics of the answer; env/all/NAME is the mean over answers."""


@dataclass(frozen=True)
class AnswerGroup:
    """All answers to one problem, whose rewards are compared with each other."""

    prompt: ModelInput
    answers_G: list[Answer]
    cached_prompt_tokens: int

    @property
    def rewards_G(self) -> list[float]:
        """The reward of each answer, [G]."""
        return [answer.reward for answer in self.answers_G]

    @property
    def mean_reward(self) -> float:
        """The mean reward of the answers."""
        return sum(self.rewards_G) / len(self.rewards_G)

    @property
    def is_constant(self) -> bool:
        """Whether all rewards are equal, so that the group has no gradient."""
        return is_constant(self.rewards_G)


def answer_datum(
    prompt: ModelInput,
    tokens_T: Sequence[int] | np.ndarray,
    logprobs_T: Sequence[float] | np.ndarray,
    advantage: float,
    loss_fn: str = "importance_sampling",
) -> Datum:
    """Return the datum of a prompt and its sampled answer: position i reads token i and predicts
    token i + 1. Raises UserError if `prompt` is not a ModelInput.

    The positions of the prompt have advantage 0, so their targets and logprobs do not matter.
    """
    if not isinstance(prompt, ModelInput):
        raise UserError(f"prompt is a {type(prompt).__name__}; give ModelInput.from_ints(tokens)")
    num_prompt_targets = prompt.length - 1
    inputs = {
        "target_tokens": [*[0] * num_prompt_targets, *tokens_T],
        "logprobs": [*[0.0] * num_prompt_targets, *logprobs_T],
        "advantages": [0.0] * num_prompt_targets + [advantage] * len(tokens_T),
    }
    if loss_fn in LOSS_MASKS:
        inputs[LOSS_MASKS[loss_fn]] = [0.0] * num_prompt_targets + [1.0] * len(tokens_T)
    return Datum(prompt.append(EncodedTextChunk(tokens=list(tokens_T[:-1]))), inputs)


def sampler_trainer_kl(
    sampled_D: Sequence[Sequence[float]], trained_D: Sequence[Sequence[float]]
) -> Metrics:
    """Return optim/kl_sample_train_v1 and _v2, estimates of the KL divergence between sampler and
    trainer from their logprobs of the sampled tokens `[D][T]`.

    v1 is the mean difference, v2 half the mean squared difference; both are 0 if sampler and
    trainer agree. Only the last T entries of each row of `trained_D` are used, so the entries of
    the prompt may come first.
    """
    log_ratios = [
        sampled - trained
        for sampled_T, trained_T in zip(sampled_D, trained_D, strict=True)
        for sampled, trained in zip(
            sampled_T, trained_T[len(trained_T) - len(sampled_T) :], strict=True
        )
    ]
    return {
        "optim/kl_sample_train_v1": sum(log_ratios) / len(log_ratios),
        "optim/kl_sample_train_v2": 0.5
        * sum(ratio * ratio for ratio in log_ratios)
        / len(log_ratios),
    }


def group_metrics(
    rewards_P_G: Sequence[Sequence[float]],
    *,
    num_turns: int,
    action_tokens: int,
    observation_tokens: int,
    cached_tokens: int,
) -> Metrics:
    """Return metrics of groups of episodes, computed from the total rewards `[P][G]` and the
    numbers of turns and tokens. `cached_tokens` is the number of tokens in cached prefixes, which count as
    observation tokens too.
    """
    rewards = [reward for rewards_G in rewards_P_G for reward in rewards_G]
    constant_groups = [rewards_G for rewards_G in rewards_P_G if is_constant(rewards_G)]
    num_good = sum(rewards_G[0] >= 0.5 for rewards_G in constant_groups)
    return {
        "reward/total": mean(rewards),
        "ac_tokens_per_turn": action_tokens / num_turns,
        "ob_tokens_per_turn": observation_tokens / num_turns,
        "turns_per_episode": num_turns / len(rewards),
        "total_episodes": len(rewards),
        "total_turns": num_turns,
        "total_ac_tokens": action_tokens,
        "total_ob_tokens": observation_tokens,
        "total_cached_ob_tokens": cached_tokens,
        "by_group/frac_mixed": 1 - len(constant_groups) / len(rewards_P_G),
        "by_group/frac_degenerate": len(constant_groups) / len(rewards_P_G),
        "by_group/frac_all_good": num_good / len(rewards_P_G),
        "by_group/frac_all_bad": (len(constant_groups) - num_good) / len(rewards_P_G),
    }


def answer_metrics(groups_P: Sequence[AnswerGroup], prefix: str = "env/all") -> Metrics:
    """Return rewards, lengths, stop reasons and fractions of constant groups as PREFIX/NAME."""
    answers = [answer for group in groups_P for answer in group.answers_G]
    names = sorted({name for answer in answers for name in answer.metrics})
    metrics = {
        **{
            name: mean([answer.metrics[name] for answer in answers if name in answer.metrics])
            for name in names
        },
        "stop/completed": mean([answer.stop_reason == "stop" for answer in answers]),
        "stop/max_tokens": mean([answer.stop_reason == "length" for answer in answers]),
        **group_metrics(
            [group.rewards_G for group in groups_P],
            num_turns=len(answers),
            action_tokens=sum(len(answer.tokens_T) for answer in answers),
            observation_tokens=sum(
                group.prompt.length * len(group.answers_G) for group in groups_P
            ),
            cached_tokens=sum(group.cached_prompt_tokens for group in groups_P),
        ),
    }
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def pass_metrics(verdicts_P_G: Sequence[Sequence[bool | None]]) -> Metrics:
    """Return avg@n and pass@k of problems with up to n answers each, from the verdicts on the
    answers; {} without verdicts. An answer without a verdict is not right.

    avg@n is the mean over problems of the fraction of right answers. pass@k is the mean of the
    estimates of planish/runlog/statistics.py, for the powers of 2 from 2 to n, and for n. Problems
    with fewer than k answers are left out of pass@k.
    """
    if all(verdict is None for verdicts_G in verdicts_P_G for verdict in verdicts_G):
        return {}
    counts_P = [(len(verdicts_G), verdicts_G.count(True)) for verdicts_G in verdicts_P_G]
    num_samples = max(num_answers for num_answers, _ in counts_P)
    ks = {2**power for power in range(1, num_samples.bit_length())} | {num_samples}
    metrics = {f"avg@{num_samples}": mean([correct / count for count, correct in counts_P])}
    for k in sorted(ks):
        metrics[f"pass@{k}"] = mean(
            [pass_at_k(count, correct, k) for count, correct in counts_P if count >= k]
        )
    return metrics


def sampling_entropy(groups_P: Sequence[AnswerGroup]) -> float:
    """Return the mean of -logprob over all sampled tokens, an estimate of the policy's entropy per
    token in nats.
    """
    return -mean(
        [
            logprob
            for group in groups_P
            for answer in group.answers_G
            for logprob in answer.logprobs_T
        ]
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 without values."""
    return sum(values) / len(values) if values else 0.0
