"""Every metric of preference models, each defined once; those of the loop are
planish/supervised/metric_definitions.py.

python -m planish.preference.model_metric_definitions          rewrite the table in
    docs/recipes/preference_model.md
"""

from pathlib import Path

from planish.metric_definition import MetricDefinition, Section, definition_in, rewrite
from planish.supervised import metric_definitions as supervised

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "preference_model.md"
BEGIN = "<!-- the table begins; python -m planish.preference.model_metric_definitions writes it -->"
END = "<!-- the table ends -->"

_M = MetricDefinition

LEARNED = Section(
    "Training",
    (
        _M(
            "num_pairs",
            "",
            "comparisons of the batch; num_sequences is that (chat) or twice that (bradley_terry)",
        ),
        _M(
            "train_mean_nll",
            "nats",
            "chat: mean of -log p(label), among all that the model could say",
            "falls fast below ln 2 = 0.693, as soon as the model says labels only",
            "stays at 0.693: which answer is better is not learned",
        ),
        _M(
            "bradley_terry_loss",
            "nats",
            "bradley_terry: mean of -log sigmoid(score of the chosen answer - score of the rejected one)",
            "falls below ln 2 = 0.693",
            "jumps above 1: the rate is too high",
        ),
        _M(
            "accuracy",
            "fraction",
            "of the batch before its update. chat: the label is the likeliest of A, B and Tie; bradley_terry: the chosen answer has "
            "the larger score",
            "rises with `test/accuracy`",
            "rises alone: overfitting",
        ),
        _M(
            "score_margin",
            "nats",
            "bradley_terry: mean of the chosen answer's score - the rejected one's",
            "grows",
        ),
        _M(
            "optim/loss:sum",
            "nats",
            "chat: sum of -log p(label); bradley_terry: as `bradley_terry_loss`",
        ),
        _M(
            "optim/surrogate_loss:sum",
            "",
            "bradley_terry: the linear loss by which the trainer applies the gradient; its value says nothing",
        ),
    ),
)
HELD_OUT = Section(
    "Held-out pairs",
    (
        _M(
            "<evaluator>/accuracy",
            "fraction",
            "judgments that give the preferred answer P > 1/2; P = 1/2 counts half. chat: both orders of each pair are judged",
            "rises from about 0.5",
        ),
        _M("<evaluator>/accuracy_stderr", "fraction", "standard error of that over pairs"),
        _M(
            "<evaluator>/log_loss",
            "nats",
            "mean of -log P of the preferred answer (P at least 1e-6), of the model without a temperature",
            "falls below ln 2 = 0.693",
            "rises while accuracy stays: the model becomes too sure, which calibration mends",
        ),
        _M("<evaluator>/brier", "", "mean of (1 - P)^2", "falls below 0.25"),
        _M(
            "<evaluator>/ece",
            "",
            "expected calibration error: |mean of max(P, 1 - P) - accuracy| in ten bins of max(P, 1 - P), weighted by size. Of N "
            "judgments it is about 1 / sqrt(N) even if all is right",
        ),
        _M(
            "<evaluator>/position_bias",
            "",
            "chat: mean of (preference + preference of the swap) / 2, from -1 to 1; above 0 the second place is favoured",
            "goes to 0",
            "far from 0: the order of the answers decides",
        ),
        _M(
            "<evaluator>/order_agreement",
            "fraction",
            "chat: pairs whose two orders name the same answer",
            "rises to 1",
        ),
        _M("<evaluator>/num_pairs", "", "pairs that were judged; ties are not"),
        _M(
            "<evaluator>/num_left_out",
            "",
            "pairs that were not judged, since they are longer than `max_length`",
            "0",
        ),
    ),
)
SECTIONS = (LEARNED, HELD_OUT)


def definition_of(key: str) -> MetricDefinition | None:
    """The definition of a metric as logged; None if it has none."""
    return definition_in((*SECTIONS, *supervised.SECTIONS), key)


if __name__ == "__main__":
    rewrite(PAGE, SECTIONS, BEGIN, END)
