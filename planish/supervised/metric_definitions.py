"""Every metric of supervised training, each defined once. The table in docs/supervised.md is made
from here.

    python -m planish.supervised.metric_definitions          rewrite the table

What patterns mean: planish/metric_definition.py.
"""

from pathlib import Path

from planish.metric_definition import SPANS, MetricDefinition, Section, definition_in, rewrite

PAGE = Path(__file__).parents[2] / "docs" / "supervised.md"
BEGIN = "<!-- the table begins; python -m planish.supervised.metric_definitions writes it -->"
END = "<!-- the table ends -->"

_M = MetricDefinition

LOSS = Section(
    "Loss",
    (
        _M(
            "train_mean_nll",
            "nats/token",
            "-sum(weight * logprob) / sum(weight) over the learned tokens of the batch, before its update. With reduction=mean "
            "the mean over datums of their nats a token, with none the mean over tokens",
            "falls fast, then slowly, with the noise of the batches",
            "rises for many steps, or jumps: the learning rate is too high",
        ),
        _M(
            "train_mean_bpb",
            "bits/byte",
            "nats of the learned tokens that are text / (ln 2 * UTF-8 bytes of that text); no weights, no special tokens, so models "
            "with other tokenizers can be compared",
            "as `train_mean_nll`",
        ),
        _M(
            "<evaluator>/nll",
            "nats/token",
            "as `train_mean_nll`, on held-out data, with the weights before the step",
            "falls with `train_mean_nll`",
            "rises while `train_mean_nll` falls: overfitting; stop there, or take fewer epochs",
        ),
        _M(
            "<evaluator>/bpb",
            "bits/byte",
            "as `train_mean_bpb`, on held-out data",
            "as `<evaluator>/nll`",
        ),
    ),
)
DATA = Section(
    "Data and progress",
    (
        _M("epoch", "", "times that all data were seen before, from 0"),
        _M("progress", "fraction", "(step + 1) / steps of the run"),
        _M(
            "num_sequences",
            "",
            "datums of the batch: a conversation gives one, or several where its history is rewritten",
        ),
        _M("num_tokens", "tokens", "tokens of the batch, those that are not learned included"),
        _M(
            "num_loss_tokens",
            "",
            "sum of the weights: tokens with reduction=none, datums with reduction=mean",
        ),
        _M(
            "num_truncated",
            "",
            "datums whose end was cut off at `max_length`",
            "0, or few",
            "many: the ends of messages are rarely learned, and the model will not stop; raise `max_length`",
        ),
        _M(
            "num_left_out",
            "",
            "datums that would have had nothing to learn within `max_length`, and were left out",
            "0, or few",
        ),
    ),
)
OPTIMIZER = Section(
    "Optimizer",
    (
        _M("learning_rate", "", "of the step, after schedule and warm-up"),
        _M(
            "optim/grad_norm",
            "",
            "Euclidean norm of the gradient of all adapter weights before clipping. The loss is a sum, so it grows with "
            "`num_loss_tokens`",
            "of the same order from step to step",
            "grows for many steps: lower the learning rate",
        ),
        _M("optim/loss:sum", "nats", "-sum(weight * logprob) of the batch"),
        _M("optim/tokens:sum", "tokens", "as `num_tokens`, as the trainer counted"),
        _M(
            "optim/forest_tokens:sum",
            "tokens",
            "tokens that the trainer computed: beginnings that several datums share count once",
        ),
        _M("optim/micro_batches:sum", "", "pieces that the trainer cut the batch into"),
        _M("optim/adam_step", "", "optimizer steps of the weights so far"),
    ),
)
TIME = Section(
    "Time",
    (
        _M(
            "time/total",
            "s",
            "from the row before to this one; the sum over rows is the run's time",
        ),
        _M("tokens_per_second/trained", "tokens/s", "num_tokens / time/total"),
        *SPANS,
        _M(
            "time/<span>",
            "s",
            "a part of the step that ran once: render (the batch is made), wait (for its results; with `submit_ahead` part of "
            "the step is done by then), run_evals",
        ),
    ),
)
SECTIONS = (LOSS, DATA, OPTIMIZER, TIME)


def definition_of(key: str) -> MetricDefinition | None:
    """The definition of a metric as logged; None if it has none."""
    return definition_in(SECTIONS, key)


if __name__ == "__main__":
    rewrite(PAGE, SECTIONS, BEGIN, END)
