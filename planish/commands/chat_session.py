"""A chat in the terminal: the conversation and its commands, such as /reset and /undo."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planish.completers import derived_seed
from planish.console.chat_sampler import Answer, ChatSampler, ShowFunction
from planish.errors import StorageError, UserError

HELP = """\
/help              show this list
/reset             clear the conversation, but keep the system message
/system [TEXT]     set the system message from now on; without TEXT, remove it
/retry             replace the last answer with another one
/undo              remove the last message and its answer
/save FILE         append the conversation to a JSONL file that the recipe chat_sl can train on
/temperature T     set the sampling temperature of the next answers; 0 = greedy
/quit              end the chat, as Ctrl-D does
//TEXT             send the message /TEXT, which begins with a slash"""


@dataclass
class SamplingOptions:
    """The sampling options of a conversation."""

    temperature: float
    max_tokens: int
    seed: int | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens}: give a whole number of at least 1")
        self._num_answers = 0

    def next_seed(self) -> int | None:
        """Return the seed of the next answer. No two answers have the same seed."""
        self._num_answers += 1
        return None if self.seed is None else derived_seed(self.seed, self._num_answers)


@dataclass(frozen=True)
class LineResult:
    """The result of a processed line."""

    note: str = ""
    """Text to show to the user after the line was processed, such as "temperature 0.5"."""
    is_answer: bool = False
    """Whether the model has written an answer."""
    is_end: bool = False
    """Whether the chat ends, because the line is /quit."""


@dataclass(eq=False)
class ChatSession:
    """A conversation that processes one line at a time."""

    sampler: ChatSampler
    sampling: SamplingOptions
    system: str | None = None
    turns: list[Mapping[str, Any]] = field(default_factory=list)
    """The messages of user and assistant, alternating."""

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation, with its system message if it has one."""
        return self._with_system(self.turns)

    def process_line(self, line: str, show: ShowFunction) -> LineResult:
        """Send a line as a message, or run its command. On UserError the conversation is
        unchanged.
        """
        if not line.startswith("/"):
            return self._send(line, show)
        if line.startswith("//"):
            return self._send(line[1:], show)
        name, _, argument = line[1:].partition(" ")
        commands: Mapping[str, Callable[[str], LineResult]] = {
            "help": lambda _: LineResult(HELP),
            "reset": self._reset,
            "system": self._set_system,
            "retry": lambda _: self._retry(show),
            "undo": self._undo,
            "save": self._save,
            "temperature": self._set_temperature,
            "quit": lambda _: LineResult(is_end=True),
        }
        if name not in commands:
            raise UserError(
                f"/{name} is not a command; /help lists the commands, and //TEXT sends the message "
                "/TEXT"
            )
        if argument.strip() and name not in ("system", "save", "temperature"):
            raise UserError(f"/{name} has no argument; write /{name} alone")
        return commands[name](argument.strip())

    def _with_system(self, turns: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *turns]

    def _send(self, text: str, show: ShowFunction) -> LineResult:
        return self._answer([*self.turns, {"role": "user", "content": text}], show)

    def _retry(self, show: ShowFunction) -> LineResult:
        if not self.turns:
            raise UserError("/retry: the conversation is empty; write a message first")
        return self._answer(self.turns[:-1], show)

    def _answer(self, turns: list[Mapping[str, Any]], show: ShowFunction) -> LineResult:
        """Answer the last message of `turns`. If sampling fails, the conversation is unchanged."""
        sampling, messages = self.sampling, self._with_system(turns)
        answer = self.sampler.answer(
            messages, sampling.temperature, sampling.max_tokens, sampling.next_seed(), show
        )
        self.turns = [*turns, answer.message]
        return LineResult(_note(answer), is_answer=True)

    def _reset(self, _: str) -> LineResult:
        self.turns = []
        return LineResult("conversation cleared")

    def _set_system(self, text: str) -> LineResult:
        self.system = text or None
        return LineResult("system message set" if text else "no system message")

    def _undo(self, _: str) -> LineResult:
        if not self.turns:
            raise UserError("/undo: the conversation is empty")
        self.turns = self.turns[:-2]
        return LineResult(f"last exchange removed; {len(self.turns) // 2} left")

    def _save(self, name: str) -> LineResult:
        if not name:
            raise UserError("/save: give the name of a file")
        if not self.turns:
            raise UserError("/save: the conversation is empty; write a message first")
        path = Path(name).expanduser()
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise StorageError(f"/save {name}: {error}") from error
        return LineResult(f"appended to {path}")

    def _set_temperature(self, text: str) -> LineResult:
        try:
            temperature = float(text)
        except ValueError:
            raise UserError(f"/temperature {text}: give a number") from None
        check_temperature(temperature)
        self.sampling.temperature = temperature
        return LineResult(f"temperature {temperature:g}")


def check_temperature(temperature: float) -> None:
    """Raise UserError for a temperature that is negative or not finite."""
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature={temperature}: give 0 or more")


def _note(answer: Answer) -> str:
    """Return a note about an answer: its tool calls, and why it ended early."""
    functions = [call["function"] for call in answer.message.get("tool_calls", ())]
    lines = [f"calls {function['name']}({function['arguments']})" for function in functions]
    if answer.stop_reason == "length":
        lines.append(f"cut off after {answer.num_tokens} tokens; --max-tokens sets the limit")
    elif answer.stop_reason == "stopped":
        lines.append("stopped")
    return "\n".join(lines)
