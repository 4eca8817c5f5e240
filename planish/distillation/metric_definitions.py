"""Every metric of distillation, each defined once; those of the loops are planish/rl and
planish/supervised.

python -m planish.distillation.metric_definitions          rewrite the table in docs/distillation.md
"""

from pathlib import Path

from planish.metric_definition import MetricDefinition, Section, definition_in, rewrite
from planish.rl import metric_definitions as rl
from planish.supervised import metric_definitions as supervised

PAGE = Path(__file__).parents[2] / "docs" / "distillation.md"
BEGIN = "<!-- the table begins; python -m planish.distillation.metric_definitions writes it -->"
END = "<!-- the table ends -->"

_M = MetricDefinition

TEACHER = Section(
    "Teacher",
    (
        _M(
            "teacher_kl",
            "nats/token",
            "on-policy: mean of log p_student - log p_teacher over the sampled tokens that are trained on, an estimate of the reverse "
            "KL that may be negative in a sample. Off-policy: cross entropy (`train_mean_nll`) less `teacher_entropy`, the "
            "forward KL from the teacher's `topk` tokens, weighted as the loss is",
            "falls towards 0",
            "rises for many steps: the rate is too high. Falls while a test of the task gets worse: the teacher is wrong, or the "
            "student avoids what the teacher would judge",
        ),
        _M(
            "teacher_kl/<dataset>",
            "nats/token",
            "the same of each data set's own sequences, where there are several teachers",
        ),
        _M(
            "teacher_entropy",
            "nats/token",
            "off-policy: entropy of the teacher's distribution over its `topk` tokens: what `train_mean_nll` cannot fall below",
        ),
        _M(
            "teacher_topk_mass",
            "fraction",
            "off-policy: what the `topk` tokens have of the teacher's whole distribution",
            "above 0.95",
            "well below: much of the teacher is cut off and not learned; raise `topk`",
        ),
        _M(
            "<evaluator>/teacher_kl",
            "nats/token",
            "off-policy: as `teacher_kl`, on held-out conversations",
            "falls",
        ),
        _M(
            "<evaluator>/teacher_entropy",
            "nats/token",
            "as `teacher_entropy`, on held-out conversations",
        ),
        _M(
            "<evaluator>/teacher_topk_mass",
            "fraction",
            "as `teacher_topk_mass`, on held-out conversations",
        ),
        _M(
            "time/teacher_logprobs",
            "s",
            "on-policy: waiting for what the teachers find likely of what was sampled",
        ),
    ),
)


def definition_of(key: str) -> MetricDefinition | None:
    """The definition of a metric as logged, of any kind of distillation; None if it has none."""
    return definition_in((TEACHER, *rl.SECTIONS, *supervised.SECTIONS), key)


if __name__ == "__main__":
    rewrite(PAGE, (TEACHER,), BEGIN, END)
