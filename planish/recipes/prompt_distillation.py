"""Prompt distillation: the teacher answers with a long prompt, and a student without that prompt is
trained to give the same answers.

    python -m planish.recipes.prompt_distillation                                        sums,
        without the worked examples
    python -m planish.recipes.prompt_distillation dataset=questions.jsonl prompt=instructions.txt
    python -m planish.recipes.prompt_distillation dataset=questions.jsonl prompt=examples.json

First the teacher, by default the same model, answers every prompt of `dataset` after the long
prompt. The conversations are stored in the run's directory without the long prompt. Then the
student is trained on them (planish/supervised). `prompt` is a text file, whose text becomes the
system message, or a JSON list of messages, such as worked examples.
"""

import json
import sys
from pathlib import Path

import chz

from planish import ServiceClient
from planish.datasets.messages import Message
from planish.errors import UserError
from planish.recipes import teacher_answers, training_run
from planish.recipes.sl_options import learning_rate
from planish.recipes.sums import worked_examples
from planish.recipes.teacher_answers import SUMS, TeacherOptions
from planish.recipes.training_run import run_main
from planish.training import train_supervised
from planish.training.supervised_config import Config, check as check_config


@chz.chz
class Options(TeacherOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/prompt_distillation"
    prompt: str | None = chz.field(
        default=None,
        doc="file of the long prompt: a list of messages in .json, otherwise a text; none = two "
        "worked sums",
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    teacher_answers.check(options)
    prefix = long_prompt(options)
    config = training_run.build(
        Config,
        options,
        learning_rate=learning_rate(options),
        dataset_builder=teacher_answers.answers_builder(options),
        evaluator_builders=teacher_answers.evaluators(options, shows_examples=False),
        recipe_name="prompt_distillation",
    )
    check_config(config)

    async def answered(config: Config, service_client: ServiceClient) -> Path:
        await teacher_answers.write_answers(options, service_client, prefix, shows_examples=False)
        return await train_supervised.main(config, service_client)

    return run_main(answered, config, service_client, [options.teacher_model])


def long_prompt(options: Options) -> list[Message]:
    """Return the messages that only the teacher sees. Raises UserError if `prompt` is missing or
    not valid.
    """
    if options.prompt is None:
        if options.dataset != SUMS:
            raise UserError("prompt is missing: give the file of the long prompt")
        return [dict(message) for message in worked_examples()]
    path = Path(options.prompt).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            messages = json.loads(text)
        else:
            messages = [{"role": "system", "content": text.strip()}]
    except (OSError, ValueError) as error:
        raise UserError(
            f"prompt={options.prompt} cannot be read ({error}); give a text, or a JSON list of "
            "messages"
        ) from error
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(one, dict) for one in messages)
    ):
        raise UserError(f"prompt={options.prompt}: give a list of messages with at least one in it")
    if not all(one.get("content") for one in messages):
        raise UserError(
            f"prompt={options.prompt}: a message is empty; give every message a content"
        )
    return messages


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:])
