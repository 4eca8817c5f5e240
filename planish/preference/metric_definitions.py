"""Every metric of preference training, each defined once; those of the loop are
planish/supervised/metric_definitions.py.

python -m planish.preference.metric_definitions          rewrite the table in docs/recipes/dpo.md
"""

from pathlib import Path

from planish.metric_definition import MetricDefinition, Section, definition_in, rewrite
from planish.supervised import metric_definitions as supervised

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "dpo.md"
BEGIN = "<!-- the table begins; python -m planish.preference.metric_definitions writes it -->"
END = "<!-- the table ends -->"

_M = MetricDefinition

PAIRS = Section(
    "Pairs",
    (
        _M(
            "dpo_loss",
            "nats",
            "mean over pairs of -log sigmoid(reward of the chosen answer - reward of the rejected one)",
            "ln 2 = 0.693 in the first step, then falls",
            "rises above 0.693: the rate is too high, or labels are at odds",
        ),
        _M(
            "ipo_loss",
            "",
            "loss=ipo: mean over pairs of ((margin - 1/2) / beta)^2",
            "1 / (4 beta^2), which is 25 with beta 0.1, in the first step, then falls towards 0",
            "rises: margins leave 1/2 on either side; lower the rate",
        ),
        _M(
            "simpo_loss",
            "nats",
            "loss=simpo: mean over pairs of -log sigmoid(margin - gamma)",
            "falls; where it begins depends on how the model likes the answers as it is",
        ),
        _M(
            "accuracy",
            "fraction",
            "pairs whose chosen answer has the larger reward; a matter of rounding while policy and reference are the same. SimPO asks no reference, so there it says from the first step how well the model's own likelihood ranks",
        ),
        _M(
            "margin",
            "",
            "mean of chosen_reward - rejected_reward",
            "grows",
            "grows while `test/margin` does not: overfitting",
        ),
        _M(
            "chosen_reward",
            "",
            "mean of beta * (log p - log p of the reference) of chosen answers; with loss=simpo, of beta * log p / tokens",
            "stays where it began or grows",
            "falls far below 0 with `rejected_reward`: both answers are being unlearned; lower the rate, or raise `dpo_beta`",
        ),
        _M("rejected_reward", "", "the same of rejected answers", "falls"),
        _M("optim/loss:sum", "", "the loss, as `dpo_loss`, `ipo_loss` or `simpo_loss`"),
        _M(
            "optim/surrogate_loss:sum",
            "",
            "the linear loss by which the trainer applies the gradient of the loss; its value says nothing",
        ),
        _M("num_pairs", "", "pairs of the batch; num_sequences is twice that"),
        _M("<evaluator>/dpo_loss", "nats", "as `dpo_loss`, on held-out pairs"),
        _M("<evaluator>/ipo_loss", "", "as `ipo_loss`, on held-out pairs"),
        _M("<evaluator>/simpo_loss", "nats", "as `simpo_loss`, on held-out pairs"),
        _M("<evaluator>/accuracy", "fraction", "as `accuracy`, on held-out pairs", "rises"),
        _M("<evaluator>/margin", "", "as `margin`, on held-out pairs", "grows"),
        _M("<evaluator>/chosen_reward", "", "as `chosen_reward`, on held-out pairs"),
        _M("<evaluator>/rejected_reward", "", "as `rejected_reward`, on held-out pairs"),
        _M(
            "<evaluator>/nll",
            "nats/token",
            "-log p of the chosen answers / their tokens, on held-out pairs",
        ),
    ),
)


def definition_of(key: str) -> MetricDefinition | None:
    """The definition of a metric as logged; None if it has none."""
    return definition_in((PAIRS, *supervised.SECTIONS), key)


if __name__ == "__main__":
    rewrite(PAGE, (PAIRS,), BEGIN, END)
