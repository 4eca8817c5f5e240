"""Training data for a judge of generated sums: conversations of the judge's prompt and the right
verdict.

    python -m planish.recipes.rubric_judge path=judge.jsonl
        write the conversations
    python -m planish.recipes.chat_sl dataset=judge.jsonl log_path=runs/judge
        train the judge
    python -m planish.recipes.rubric judge_checkpoint=runs/judge shown_verdicts=0
        train a policy with that judge

A base model of the embedded model's size cannot apply rubrics, but it can be trained to apply one
narrow rubric.
"""

import json
import random
import sys
from pathlib import Path

import chz

from planish.files import write_atomically
from planish.recipes import training_run
from planish.recipes.sum_tasks import rubric_of, verdict
from planish.recipes.sums import Sum
from planish.renderers import Message
from planish.rubric.grading import judge_prompt
from planish.training.option_rules import at_least, check_fields

FORMS = (
    "{left} + {right} = {result}",
    "{left} + {right} = {result}",
    "{result}",
    "The sum is {result}.",
)
MAX_RESULT_ERROR = 10


@chz.chz
class Options:
    """Options of the data."""

    path: str = chz.field(default="judge.jsonl", doc="output file")
    examples: int = chz.field(
        default=4000,
        doc="number of conversations; half of the verdicts are Yes",
        metadata=at_least(2, "at least {}"),
    )
    largest: int = chz.field(default=20, doc="largest operand", metadata=at_least(1))
    seed: int = 0


def main(options: Options) -> Path:
    """Write the file and return its path."""
    check_fields(options)
    rng = random.Random(f"judge:{options.seed}")
    rows = [_example(options.largest, number % 2 == 0, rng) for number in range(options.examples)]
    path = Path(options.path).expanduser()
    write_atomically(path, "".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    print(f"{path}: {len(rows)} conversations")
    return path


def _example(largest: int, is_right: bool, rng: random.Random) -> list[Message]:
    """Return one conversation. Wrong results are close to the right one, so that a judge that reads
    only the first digit gets a high loss.
    """
    problem = Sum(rng.randint(0, largest), rng.randint(0, largest))
    wrong_results = [
        result
        for result in range(
            max(0, problem.answer - MAX_RESULT_ERROR), problem.answer + MAX_RESULT_ERROR + 1
        )
        if result != problem.answer
    ]
    result = problem.answer if is_right else rng.choice(wrong_results)
    answer = rng.choice(FORMS).format(left=problem.left, right=problem.right, result=result)
    row = rubric_of(problem, shown_verdicts=0)
    [criterion] = row.criteria
    assert criterion.is_met(answer) == is_right
    return [
        *judge_prompt(row.messages, answer, criterion),
        {"role": "assistant", "content": verdict(is_right)},
    ]


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:])
