"""Every metric of an evaluation, each defined once. The table in docs/evaluation.md is made from
here.

    python -m planish.evaluation.metric_definitions          rewrite the table

What patterns mean: planish/metric_definition.py. In results.json they stand without eval/<task>/.
"""

from pathlib import Path

from planish.metric_definition import MetricDefinition, Section, definition_in, rewrite

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
BEGIN = "<!-- the table begins; python -m planish.evaluation.metric_definitions writes it -->"
END = "<!-- the table ends -->"

_M = MetricDefinition

SCORES = Section(
    "Scores",
    (
        _M(
            "eval/<task>/score_length_normalized",
            "fraction",
            "multiple_choice_logprobs: problems whose right choice has the largest mean logprob a token",
            "above 1 / choices",
        ),
        _M(
            "eval/<task>/score_length_normalized_stderr",
            "fraction",
            "its standard error, over problems",
        ),
        _M(
            "eval/<task>/score",
            "fraction",
            "mean over problems of the share of right answers, the same as pass@1; for multiple_choice_logprobs, problems whose "
            "right choice has the largest summed logprob",
            "rises",
            "falls while the training reward rises: something else is being learned",
        ),
        _M("eval/<task>/score_stderr", "fraction", "its standard error, over problems"),
        _M(
            "eval/<task>/pass@<k>_stderr",
            "fraction",
            "the standard error of `pass@<k>`, over problems",
        ),
        _M(
            "eval/<task>/pass@<k>",
            "fraction",
            "mean over problems of the chance that one of k answers is right, 1 - C(n - c, k) / C(n, k) with c right of n",
            "rises",
            "falls while `score` rises: answers become alike, and what few of them found is lost",
        ),
        _M("eval/<task>/num_correct", "answers", "that are right"),
        _M("eval/<task>/num_examples", "problems", "that were asked"),
        _M("eval/<task>/num_samples", "answers", "that were drawn: problems x samples"),
        _M(
            "eval/<task>/num_errors",
            "answers",
            "that could not be judged, or not be asked for since the prompt leaves no room; they count as wrong",
            "0, or nearly",
            "many: see `error` in samples.jsonl",
        ),
    ),
)
FORM = Section(
    "Form of drawn answers",
    (
        _M("eval/<task>/ended", "fraction", "of answers: the model stopped by itself", "near 1"),
        _M(
            "eval/<task>/cut_off",
            "fraction",
            "of answers: they reached `max_tokens`",
            "near 0",
            "high: raise `max_tokens`, or the renderer is not the model's",
        ),
        _M(
            "eval/<task>/answered",
            "fraction",
            "of answers: a final answer was found in them (a box, a letter)",
            "near 1",
            "low: the score measures form, not knowledge",
        ),
        _M(
            "eval/<task>/tokens_per_answer",
            "tokens",
            "mean length of an answer, its end mark included",
        ),
    ),
)
INSPECT = Section(
    "Tasks of Inspect",
    (
        _M(
            "eval/<task>/<scorer>/<metric>",
            "",
            "as the scorer of the task defines it, such as `eval/sums/match/accuracy`",
        ),
    ),
)
SECTIONS = (SCORES, FORM, INSPECT)


def definition_of(key: str) -> MetricDefinition | None:
    """The definition of a metric as logged; None if it has none."""
    return definition_in(SECTIONS, key)


if __name__ == "__main__":
    rewrite(PAGE, SECTIONS, BEGIN, END)
