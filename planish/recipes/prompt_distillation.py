"""Prompt distillation: a student learns to answer without a long prompt as a teacher answers with
it.

    python -m planish.recipes.prompt_distillation                                        sums,
        without the worked examples
    python -m planish.recipes.prompt_distillation dataset=questions.jsonl prompt=instructions.txt
    python -m planish.recipes.prompt_distillation dataset=questions.jsonl prompt=examples.json

First the teacher, by default the same model, answers every prompt of `dataset` behind the long one;
the conversations are kept without it in the run's directory. Then the student is trained on them,
by planish/supervised. `prompt` is a text, which becomes the system message, or a JSON list of
messages, such as worked examples.
"""

import json
import sys
from pathlib import Path

import chz

from planish import ServiceClient
from planish.errors import UserError
from planish.recipes import teacher_answers, training_run
from planish.recipes.sl_options import shared_settings
from planish.recipes.sums import shown_exchanges
from planish.recipes.teacher_answers import SUMS, TeacherOptions
from planish.recipes.training_run import run_main
from planish.supervised.conversations import Conversation
from planish.training import train_supervised
from planish.training.supervised_config import Config
from planish.training.supervised_config import check as check_config


@chz.chz
class Options(TeacherOptions):
    log_path: str = chz.field(
        default="/tmp/planish-examples/prompt_distillation", doc="directory of the run's files"
    )
    prompt: str | None = chz.field(
        default=None,
        doc="file of the long prompt: .json is a list of messages, else a text; none = of sums, two examples",
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train; returns the run directory."""
    teacher_answers.check(options)
    prefix = long_prompt(options)
    config = Config(
        **shared_settings(options),
        dataset_builder=teacher_answers.answers_builder(options),
        evaluator_builders=teacher_answers.evaluators(options, shows_examples=False),
        recipe_name="prompt_distillation",
    )
    check_config(config)

    async def answered(config: Config, service_client: ServiceClient) -> Path:
        await teacher_answers.write_answers(options, service_client, prefix, shows_examples=False)
        return await train_supervised.main(config, service_client)

    return run_main(answered, config, service_client, [options.teacher_model])


def long_prompt(options: Options) -> Conversation:
    """What the teacher is shown and the student is not."""
    if options.prompt is None:
        if options.dataset != SUMS:
            raise UserError("prompt is missing: the file of what the student is to answer without")
        return [dict(message) for message in shown_exchanges()]
    path = Path(options.prompt).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        messages = (
            json.loads(text)
            if path.suffix == ".json"
            else [{"role": "system", "content": text.strip()}]
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"prompt={options.prompt} cannot be read ({error}); give a text, or a JSON list of messages"
        ) from error
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(one, dict) for one in messages)
    ):
        raise UserError(f"prompt={options.prompt}: give a list of messages with at least one in it")
    if not all(one.get("content") for one in messages):
        raise UserError(
            f"prompt={options.prompt}: a message of it is empty; give what the student is to do without"
        )
    return messages


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:])
