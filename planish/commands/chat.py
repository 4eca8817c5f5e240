"""`planish chat`: a conversation with a base model or a checkpoint.

    planish chat                                          the default model
    planish chat --model tinker://.../sampler_weights/x   a checkpoint
    planish chat --model RUN                              the last checkpoint of a run directory
    planish chat < questions.txt                          each line is one turn; only the answers
                                                          are printed

Each line is a user message or a command that begins with a slash. At a terminal, an error is
printed and the conversation continues. With piped input, the first error ends the program with
status 1. Renderers ensure that user text is never read as control tokens.
"""

from __future__ import annotations

import argparse
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from planish.commands.chat_session import ChatSession, SamplingOptions
from planish.commands.runs import add_quantize_argument, add_server_arguments
from planish.console.chat_sampler import AnswerPart, open_chat_sampler
from planish.errors import PlanishError, UserError
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.processes.arguments import argument_adder

_PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish chat`."""
    add = argument_adder(parser)
    add("--model", "base model, checkpoint (tinker://...) or run directory", default=DEFAULT_MODEL)
    add("--renderer NAME", "chat format (default: the checkpoint's, else the model's)")
    add("--system TEXT", "system message (default: none)")
    add("--temperature T", "sampling temperature; 0 = greedy", default=0.7)
    add("--max-tokens N", "maximum number of tokens in an answer", default=512)
    add(
        "--seed N",
        "seed of sampling; with a seed, the same messages get the same answers",
        type=int,
    )
    add_server_arguments(add)
    add_quantize_argument(add)


def run(arguments: argparse.Namespace) -> None:
    """Run `planish chat` until the input ends or a line says /quit."""
    sampling = SamplingOptions(arguments.temperature, arguments.max_tokens, arguments.seed)
    with open_chat_sampler(
        arguments.model,
        arguments.renderer,
        arguments.base_url,
        arguments.api_key,
        arguments.data_dir,
        arguments.quantize,
    ) as sampler:
        session = ChatSession(sampler, sampling, arguments.system)
        at_terminal = sys.stdin.isatty()
        screen = Screen(at_terminal)
        if at_terminal:
            screen.note(
                f"{sampler.name}, renderer {sampler.renderer.name}. /help lists the commands, "
                "Ctrl-D ends."
            )
            if not sampler.streams:
                screen.note("The server returns complete answers, so they appear all at once.")
        converse(session, _terminal_lines(screen) if at_terminal else _piped_lines(), screen)


class Screen:
    """Prints answers to stdout and everything else to stderr."""

    def __init__(self, at_terminal: bool) -> None:
        self.at_terminal = at_terminal
        self._answers = Console(highlight=False, soft_wrap=True)
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)

    def show(self, part: AnswerPart) -> None:
        """Print a part of an answer. Reasoning is shown at a terminal only."""
        if part.reasoning and self.at_terminal:
            self._answers.print(
                Text(without_control_characters(part.reasoning), style="dim"), end=""
            )
        if part.is_first_text and part.had_reasoning and self.at_terminal:
            self._answers.print()
        if part.text:
            # Write the text directly, because rich would interpret brackets in it as markup.
            self._answers.file.write(
                without_control_characters(part.text) if self.at_terminal else part.text
            )
        self._answers.file.flush()

    def end_answer(self) -> None:
        """End the line of an answer."""
        self._answers.file.write("\n")
        self._answers.file.flush()

    def note(self, text: str) -> None:
        """Print a note to stderr; an empty one prints nothing."""
        if text:
            self._notes.print(Text(text, style="dim"))


def without_control_characters(text: str) -> str:
    """Return the text with terminal control characters replaced, because a model may write escape
    sequences.
    """
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def converse(session: ChatSession, lines: Iterator[str], screen: Screen) -> None:
    """Process lines until they end or one says /quit.

    At a terminal an error is printed; otherwise it is raised.
    """
    for line in lines:
        if not line.strip():
            continue
        try:
            outcome = session.process_line(line, screen.show)
        except PlanishError as error:
            if not screen.at_terminal:
                raise
            screen.note(str(error))
            continue
        if outcome.is_end:
            return
        if outcome.is_answer:
            screen.end_answer()
        screen.note(outcome.note)


def _terminal_lines(screen: Screen) -> Iterator[str]:
    with suppress(ImportError):  # some systems lack readline
        import readline  # noqa: F401  (its import gives input() a history)
    while True:
        try:
            yield input(_PROMPT)
        except KeyboardInterrupt:
            screen.note("\nCtrl-D or /quit ends; Ctrl-C stops an answer")
        except EOFError:
            screen.note("")
            return


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is not text ({error}); give lines in {error.encoding}") from error
