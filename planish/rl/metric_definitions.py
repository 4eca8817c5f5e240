"""Every metric that the training loop logs, each defined once. The table in docs/metrics.md is made
from here.

    python -m planish.rl.metric_definitions          rewrite the table

What patterns mean: planish/metric_definition.py.
"""

from pathlib import Path

from planish.metric_definition import (
    SPANS,
    MetricDefinition,
    Section,
    definition_in,
    rewrite,
    with_table,
)

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN = "<!-- the table begins; python -m planish.rl.metric_definitions writes it -->"
END = "<!-- the table ends -->"


_M = MetricDefinition

REWARDS = Section(
    "Rewards",
    (
        _M(
            "env/<tag>/reward/total",
            "reward",
            "mean over trajectories of the sum of a trajectory's step rewards plus its final group reward",
            "rises, with noise of about std / sqrt(groups); the test's rises with it",
            "flat from the start; falls for many steps; rises while the test's does not",
        ),
        _M(
            "env/<tag>/correct",
            "fraction",
            "mean over answers of 1 for right, 0 for wrong, as the environment's check says",
            "rises",
            "flat while `reward/total` rises: something else is being rewarded",
        ),
        _M(
            "env/<tag>/format",
            "fraction",
            "mean over answers of 1 for an answer that ended properly and has the form that was asked for",
            "rises first and fast, then stays near 1",
            "falls late in a run: answers no longer end, or the policy has left the form",
        ),
        _M(
            "env/<tag>/unjudged",
            "fraction",
            "mean over answers of 1 for an answer that the check could not judge; it counts as wrong",
            "0, or nearly",
            "rises: the policy has found texts that the checker does not understand",
        ),
        _M(
            "env/<tag>/rubric_score",
            "score",
            "mean over graded answers of the judge's scores, 0 to 1, by the weights of their criteria; unfinished answers are not graded",
            "rises",
            "rises while `judge/truth` does not: the policy has learned what the judge likes",
        ),
        _M(
            "env/<tag>/rubric/<name>",
            "score",
            "mean of the judge's scores for one criterion of the rubric",
        ),
        _M(
            "env/<tag>/judge/asked_again",
            "fraction",
            "verdicts for which the judge had to be asked twice, as its first reply had no score; a judge without one in both is an error",
            "0, or nearly",
            "near 1: the judge does not write its score as it is told",
        ),
        _M(
            "env/<tag>/judge/truth",
            "fraction",
            "verdicts whose criterion is met, as a program says; only of criteria that have a `truth_regex`",
            "rises with `rubric_score`",
        ),
        _M(
            "env/<tag>/judge/agreement",
            "fraction",
            "of the same verdicts, the mean of 1 - the distance between the judge's score and what the program says, 0 or 1",
            "near 1",
            "near the share that a judge without eyes would have",
        ),
        _M(
            "env/<tag>/judge/score_if_met",
            "score",
            "the judge's mean score where the program says that the criterion is met",
        ),
        _M(
            "env/<tag>/judge/score_if_not_met",
            "score",
            "the judge's mean score where the program says that it is not",
            "far below `judge/score_if_met`: the difference is what the policy can learn from",
            "rises: the policy has found wrong answers that the judge takes for right",
        ),
        _M(
            "env/<tag>/parse_error",
            "fraction",
            "mean over turns of 1 for a turn whose text was no well-formed message",
            "falls to 0 within the first steps",
            "stays: wrong renderer for the model, or `max_tokens` too small for the form",
        ),
        _M(
            "env/<tag>/tool_calls",
            "",
            "calls of tools that the policy wrote in a turn, mean over turns; those beyond a limit, or ill-formed, included",
            "settles at what the task needs",
            "falls to 0: the policy answers without the tool; at its limit: episodes do not end",
        ),
        _M(
            "env/<tag>/tool_calls/<tool>",
            "",
            "the same for one tool: the calls of it that were answered",
        ),
        _M(
            "env/<tag>/tool_errors",
            "",
            "calls of a turn that were answered with an error, mean over turns",
            "falls",
            "stays near `tool_calls`: the policy does not know the tool's arguments",
        ),
        _M(
            "env/<tag>/win_minus_loss",
            "",
            "mean over trajectories of (comparisons won - comparisons lost) / comparisons",
            "0 on average when a group is compared with itself",
            "",
        ),
        _M(
            "env/<tag>/stop/<reason>",
            "fraction",
            "part of the episodes that ended for this reason: completed, max_tokens, max_turns, context_overflow, ...",
            "`stop/completed` near 1",
            "`stop/max_tokens` rises: see a run whose answers grow",
        ),
        _M(
            "reward/total",
            "reward",
            "rl_loop only: mean over groups of their mean reward",
            "as `env/all/reward/total`",
        ),
    ),
)
COMPARISONS = Section(
    "Comparisons with a reference",
    (
        _M(
            "<evaluator>/win_rate/<judge>",
            "fraction",
            "mean over held-out prompts of (r(A, B) - r(B, A) + 2) / 4, r the judge from -1 to 1, A the reference's answer, B the "
            "policy's; with both_ways=False of (r(A, B) + 1) / 2",
            "0.5 within the error while the policy is the reference, then rises",
            "rises by a learned judge and falls by one that knows: the policy has found the faults of the first",
        ),
        _M(
            "<evaluator>/win_rate_stderr/<judge>",
            "",
            "standard error of that mean: sample deviation over prompts / sqrt(prompts)",
        ),
        _M("<evaluator>/format", "fraction", "answers of that test that ended properly", "near 1"),
        _M("<evaluator>/ac_tokens_per_turn", "tokens", "mean length of the answers of that test"),
    ),
)
GROUPS = Section(
    "Groups",
    (
        _M(
            "env/<tag>/by_group/frac_mixed",
            "fraction",
            "groups that hold at least two different rewards / groups. Only these have advantages other than 0",
            "above about 0.2; falls as a task is mastered",
            "near 0: nothing to learn from, whatever the loss says",
        ),
        _M(
            "env/<tag>/by_group/frac_degenerate",
            "fraction",
            "1 - frac_mixed: groups whose rewards are all equal",
        ),
        _M(
            "env/<tag>/by_group/frac_all_good",
            "fraction",
            "groups whose rewards are all equal and at least 0.5 / groups",
            "rises as the task is mastered",
            "near 1 early: the task is too easy",
        ),
        _M(
            "env/<tag>/by_group/frac_all_bad",
            "fraction",
            "groups whose rewards are all equal and below 0.5 / groups",
            "falls",
            "near 1: the task is too hard; rises late: the policy is certain of wrong answers",
        ),
    ),
)
LENGTHS = Section(
    "Lengths and counts",
    (
        _M(
            "env/<tag>/ac_tokens_per_turn",
            "tokens",
            "sampled tokens / turns",
            "settles, or grows slowly while reward rises (reasoning)",
            "runs to `max_tokens` with `stop/max_tokens`; or falls to a few tokens",
        ),
        _M(
            "env/<tag>/ob_tokens_per_turn",
            "tokens",
            "prompt tokens / turns. The whole prompt of each turn, so what was said in earlier turns counts again",
        ),
        _M(
            "env/<tag>/turns_per_episode",
            "turns",
            "turns / episodes",
            "",
            "at its limit: episodes do not end",
        ),
        _M("env/<tag>/total_episodes", "", "trajectories of the step"),
        _M("env/<tag>/total_turns", "", "turns of all trajectories"),
        _M("env/<tag>/total_ac_tokens", "tokens", "sampled tokens of all turns"),
        _M("env/<tag>/total_ob_tokens", "tokens", "prompt tokens of all turns"),
        _M(
            "env/<tag>/total_cached_ob_tokens",
            "tokens",
            "prompt tokens that the sampler had computed before: the beginning that prompts of a group, or turns of an "
            "episode, share",
            "most of `total_ob_tokens`",
        ),
        _M(
            "env/<tag>/<name>",
            "",
            "any other metric that an environment reports: its mean over the turns and trajectories that report it",
        ),
    ),
)
OPTIMIZER = Section(
    "Policy and optimizer",
    (
        _M(
            "optim/entropy",
            "nats/token",
            "-mean(q), with q the sampler's logprob of each sampled token that is trained on (rl_loop and demo: of each that was "
            "sampled): an estimate of the policy's entropy at the sampling temperature",
            "falls slowly and levels off above 0",
            "drops to nearly 0 within a few steps (collapse), or rises steadily (noise is being learned)",
        ),
        _M(
            "optim/kl_sample_train_v1",
            "nats/token",
            "mean(q - l) over the sampled tokens that are trained on; q: the sampler's logprob, l: the trainer's, from the "
            "forward pass of the update. Unbiased for KL(sampler, trainer), may be negative",
            "0 within rounding on-policy",
            "far from 0: sampler and trainer disagree",
        ),
        _M(
            "optim/kl_sample_train_v2",
            "nats/token",
            "mean((q - l)^2) / 2 over the same tokens: biased, never negative, little noise",
            "on-policy: 0 where the CPU's own kernels serve, else rounding, about 1e-13; with a lag: about `kl_pre_post_v2` "
            "of the steps between, and steady",
            "on-policy above 1e-4: sampler and trainer disagree; with a lag, rising: updates are too large for it",
        ),
        _M(
            "kl_policy_base",
            "nats/token",
            "mean(q - r) over the sampled tokens that are trained on, r: logprob under the reference policy; only with a KL "
            "penalty",
            "rises from 0, then levels off",
            "rises without end: `kl_penalty_coef` is too small to hold the policy",
        ),
        _M(
            "kl_pre_post_v1",
            "nats/token",
            "as optim/kl_sample_train_v1, with l taken after the update; only with `compute_post_kl`",
        ),
        _M(
            "kl_pre_post_v2",
            "nats/token",
            "as optim/kl_sample_train_v2, with l taken after the update: how far one step moves the policy",
            "steady; 0.001 to 0.3 in `make demo`",
            "above 1: a single step has rewritten the policy, lower the learning rate",
        ),
        _M("optim/lr", "", "learning rate of the step, after schedule and warm-up"),
        _M(
            "optim/grad_norm",
            "",
            "Euclidean norm of the gradient of all adapter weights before clipping; of the last substep. The loss is a sum, so "
            "it grows with the number of tokens",
            "of the same order from step to step; falls with `frac_mixed`",
            "single steps 10 times the usual: look at their rollouts; grows for many steps: lower the learning rate",
        ),
        _M(
            "optim/loss:sum",
            "",
            "sum of the loss over all tokens. With advantages of mean 0 it says nothing about progress",
        ),
        _M(
            "optim/ratio:min",
            "",
            "smallest importance ratio exp(l - q) of a token with an advantage",
            "1 within rounding on-policy",
            "far below 1: stale rollouts, or a sampler that disagrees",
        ),
        _M(
            "optim/ratio:max",
            "",
            "largest importance ratio exp(l - q) of a token with an advantage",
            "1 within rounding on-policy",
            "above 10: single tokens rule the gradient; use a loss that clips (ppo, cispo)",
        ),
        _M("optim/tokens:sum", "tokens", "tokens of the training sequences, prompts included"),
        _M(
            "optim/forest_tokens:sum",
            "tokens",
            "tokens that the trainer computed: beginnings that several sequences share count once",
        ),
        _M("optim/micro_batches:sum", "", "pieces that the trainer cut the batch into"),
        _M("optim/adam_step", "", "optimizer steps of the weights so far"),
    ),
)
PROGRESS = Section(
    "Progress, tokens, errors",
    (
        _M(
            "progress/batch",
            "",
            "index of the batch, from 0; the row of the last test has the number of batches",
        ),
        _M("progress/done_frac", "fraction", "(batch + 1) / batches of the run"),
        _M(
            "tokens/cumulative/<kind>",
            "tokens",
            "the sum of tokens/<kind> over the run, resumptions included",
        ),
        _M("tokens/sampled", "tokens", "tokens that the policy wrote for this step"),
        _M("tokens/prefill_cached", "tokens", "prompt tokens that the sampler had computed before"),
        _M("tokens/prefill_uncached", "tokens", "prompt tokens that it had to compute"),
        _M(
            "tokens/trained",
            "tokens",
            "positions trained on: tokens of the sequences, prompts included, less the last of each, which is only a target",
        ),
        _M(
            "tokens_per_second/sampled",
            "tokens/s",
            "rl_loop only: sampled tokens / seconds of sampling",
        ),
        _M(
            "tokens_per_second/trained",
            "tokens/s",
            "rl_loop only: trained tokens / seconds of training",
        ),
        _M(
            "rollout_errors/total",
            "",
            "trajectories that failed so far; the rollout_errors/ metrics begin with the first error",
            "0",
        ),
        _M(
            "rollout_errors/groups_skipped",
            "",
            "groups that were dropped so far, too many of their trajectories having failed",
            "0",
        ),
        _M(
            "<evaluator>/rollout_errors/groups_skipped",
            "",
            "groups of this test that were dropped, and so are missing from its metrics; only if there are any",
            "0",
            "the test's score is that of the groups which were left",
        ),
        _M(
            "rollout_errors/<type>",
            "",
            "trajectories that failed with this exception so far",
            "",
            "grows by the step: an environment or tool is down",
        ),
    ),
)
LAG = Section(
    "Asynchronous runs",
    (
        _M(
            "async/staleness_max",
            "steps",
            "largest age of the weights that played a group: the step minus the steps behind its sampler",
            "at most `max_steps_off_policy`",
        ),
        _M("async/staleness_min", "steps", "smallest age"),
        _M("async/staleness_mean", "steps", "mean age over groups"),
        _M(
            "training_client/step",
            "",
            "training steps behind the weights that the step begins with: progress/batch",
        ),
        _M(
            "sampling_client/step_max",
            "",
            "training steps behind the newest weights that played a group of this step",
        ),
        _M("sampling_client/step_min", "", "the same of the oldest weights"),
        _M("sampling_client/step_mean", "", "the same, mean over groups"),
    ),
)
TIME = Section(
    "Time",
    (
        _M(
            "time/total",
            "s",
            "the whole step, from saving what was done before it to writing its row",
        ),
        _M(
            "time/sampling_time_mean",
            "s",
            "how long a group of the step was played, mean over groups",
        ),
        _M(
            "time/sampling_time_max",
            "s",
            "the group that took longest",
            "",
            "far above the mean: one straggler keeps the step waiting",
        ),
        _M("time/sampling_time_min", "s", "the group that took shortest"),
        *SPANS,
        _M(
            "time/<span>",
            "s",
            "a part of the step that ran once: save_checkpoint (of the steps before), publish, run_evals, sampling, "
            "assemble_training_data, kl_vs_base, train, compute_post_kl, rollout_files",
        ),
    ),
)
SECTIONS = (REWARDS, GROUPS, LENGTHS, COMPARISONS, OPTIMIZER, LAG, PROGRESS, TIME)


def definition_of(key: str) -> MetricDefinition | None:
    """The definition of a metric as logged, such as test/env/all/correct; None if it has none."""
    return definition_in(SECTIONS, key)


def page_with_table(page: str) -> str:
    """The text of docs/metrics.md with the table as it is now."""
    return with_table(page, SECTIONS, BEGIN, END)


def main() -> None:
    rewrite(PAGE, SECTIONS, BEGIN, END)


if __name__ == "__main__":
    main()
