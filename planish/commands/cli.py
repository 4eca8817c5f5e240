"""The command `planish`: base models, the results of runs, and the server.

    planish models               list the base models that can be loaded, and from where
    planish models --fetch       download and prepare the default model before its first use
    planish doctor               show what planish uses on this machine and why
    planish console DIR [DIR...] show runs in a browser, while they train and afterwards
    planish sweep RECIPE N=A,B   run a recipe with each combination of options' values
    planish plot RUN [RUN ...]   draw the curves of runs, as a picture and as a page
    planish play RECIPE          be the policy yourself, in an environment of a recipe
    planish rollouts RUN         show prompts, answers and rewards of a run
    planish replay RUN           sample recorded rollouts again, and compare them bit for bit
    planish trace RUN            write a timeline of a traced run for Perfetto
    planish eval TASK            evaluate a model or checkpoint on GSM8K, MATH-500 or your questions
    planish inspect-logs DIR     write evaluations as logs that `inspect view` shows
    planish run SCRIPT           run an unmodified script for the tinker SDK, without a server
    planish serve                serve the engine to the tinker SDK and to clients of OpenAI's API
    planish fleet status|drain|add
                                 list the replicas of a server, drain one, or add one
    planish runs                 list training runs of a server or of this machine
    planish checkpoints          list, show, delete, publish, expire or download checkpoints
    planish export CKPT DIR      write a PEFT adapter, or a merged model
    planish chat                 talk with a model or a checkpoint

The module of a command is imported only when that command is named. So `planish --help` does not
wait for torch.
"""

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import select
import sys
from collections.abc import Sequence
from typing import Any

from planish.errors import PlanishError

COMMANDS = {
    "doctor": "show what planish uses on this machine and why; status 1 if something needs "
    "attention",
    "models": "list the base models that can be loaded, and where their files are",
    "console": "show runs in a browser, while they train and afterwards",
    "sweep": "run a recipe with each combination of some options' values, one after the other",
    "plot": "plot the metrics of runs as curves.png and as an interactive curves.html",
    "replay": "sample recorded rollouts again, and compare them bit for bit",
    "trace": "write a timeline of a run that had enable_trace=True, for Perfetto (trace.json)",
    "eval": "evaluate a model or checkpoint on GSM8K, MATH-500 or your own questions",
    "inspect-logs": "write evaluations as log files of Inspect, which `inspect view` shows",
    "run": "run a script written for the tinker SDK or its cookbook, unmodified, without a server",
    "serve": "serve base models to the tinker SDK, planish clients and OpenAI clients",
    "fleet": "list the replicas of a server, drain one, or add one",
    "rollouts": "show the rollouts of a run: prompts, answers and rewards",
    "play": "answer in an environment of a recipe yourself, and see the rewards",
    "runs": "list the training runs of a server or of this machine",
    "checkpoints": "list, show, delete, publish, expire, download or import checkpoints",
    "export": "write a checkpoint as a PEFT adapter or as a merged Hugging Face model",
    "chat": "talk with a base model or a checkpoint in the terminal",
}
"""The subcommands, each with its help."""
OTHER_MODULES = {
    "eval": "planish.commands.evaluate",
    "inspect-logs": "planish.commands.inspect_logs",
}
"""The modules of subcommands that are not planish.commands.NAME."""


def command_module(name: str) -> Any:
    """Import and return the module of a subcommand.

    The module has `add_arguments(parser)` and `run(arguments)`, which returns an exit status or
    None.
    """
    return importlib.import_module(OTHER_MODULES.get(name, f"planish.commands.{name}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    The status is 0 on success, 1 after an error with a message on stderr, 130 after Ctrl-C, and 141
    if nothing reads stdout any more.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("\nplanish: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _has_no_reader(sys.stdout.fileno()):
            raise
        # Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(words: Sequence[str]) -> int:
    parser = _parser(words[:1])
    try:
        arguments = parser.parse_args(words)
        status = arguments.function(arguments) or 0
        sys.stdout.flush()
        return status
    except PlanishError as error:
        print(f"planish: {_with_option_names(str(error), parser)}", file=sys.stderr)
        return 1


def _has_no_reader(pipe: int) -> bool:
    """Return whether the process that reads the pipe has exited, as `head` does."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("planish", "torch")]
        print(*versions, f"Python {platform.python_version()}", sep=", ")
        parser.exit()


def _parser(requested: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser with all commands. Only the commands in `requested` get their arguments."""
    parser = argparse.ArgumentParser(
        prog="planish", description="Reinforcement learning of language models, locally."
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="print the versions of planish, torch and Python, for bug reports, and exit",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=f"{text}.")
        if name in requested:
            module = command_module(name)
            module.add_arguments(subparser)
            subparser.set_defaults(function=module.run)
    return parser


def _with_option_names(message: str, parser: argparse.ArgumentParser) -> str:
    """Return an error message with command-line options in place of argument names.

    Library errors say `max_tokens=0`; the user typed `--max-tokens 0`.
    """
    options = _option_names(parser)
    # An argument name without an underscore may be an ordinary word of the sentence, so it is
    # replaced only with its value. Names within paths and quotations are never arguments.
    names = "|".join(rf"{name}(?:=|\b)" if "_" in name else f"{name}=" for name in options)
    return re.sub(
        rf"(?<![\w./'\"-])({names})",
        lambda match: options[match[1].rstrip("=")] + " " * match[1].endswith("="),
        message,
    )


def _option_names(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the options of a parser by the names of their arguments."""
    names = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                names |= _option_names(subparser)
        elif action.option_strings:
            names[action.dest] = action.option_strings[0]
    return names


if __name__ == "__main__":
    sys.exit(main())
