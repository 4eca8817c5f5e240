"""Conversations that a teacher wrote, kept in a file: what off-policy and prompt distillation learn
from.

    PATH         a row a conversation: {"index": number of its prompt, "messages": [...]}
    PATH.json    what the file was made from, how many prompts are done, and how many answers were
                 left out

The teacher may be shown more than is kept: `prefix`, such as long instructions or worked examples,
stands in front of each prompt when it is answered and is not in the rows. So what is learned from
the file is to answer as if it was there: context distillation (Askell et al. 2021; Snell et al.
2022).

Answers that were cut off have no end to learn and are left out, as are prompts that leave the
context no room for an answer; both are counted. Draws are a function of (seed, index). A process
that is killed goes on after the last prompts that are recorded as done; a file that was made from
anything else is not gone on with.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planish.completers import SamplesTokens, TinkerTokenCompleter, derived_seed
from planish.errors import DamagedFileError, UserError
from planish.files import RowFile, read_rows, write_whole
from planish.processes.interruption import at_once
from planish.renderers import Renderer
from planish.runlog.console import Stage, StepDisplay
from planish.supervised.conversations import Conversation

PROMPTS_AT_ONCE = 64

Row = dict[str, Any]


@dataclass(frozen=True)
class TeacherSampler:
    """How a teacher answers prompts."""

    client: SamplesTokens
    renderer: Renderer
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    prefix: Sequence[Mapping[str, Any]] = ()
    context_window: int | None = None

    async def answer(self, index: int, messages: Conversation) -> Row | None:
        """The row of a prompt; None if its answer is left out."""
        prompt = self.renderer.build_generation_prompt([*self.prefix, *messages])
        if self.context_window is not None and prompt.length >= self.context_window:
            return None
        policy = TinkerTokenCompleter(
            self.client, self.max_tokens, self.temperature, self.context_window
        )
        stop = self.renderer.get_stop_sequences()
        drawn = await policy.seeded(derived_seed(self.seed, index))(prompt, stop)
        message, termination = self.renderer.parse_response(drawn.tokens)
        return {"index": index, "messages": [*messages, message]} if termination.is_clean else None


@dataclass
class SampledFile:
    """The rows at `path`, as far as they are done."""

    path: Path
    origin: Mapping[str, Any]
    """What they are made from, as JSON has it."""
    done: int = 0
    left_out: int = 0
    _record: Path = field(init=False)

    def __post_init__(self) -> None:
        self._record = self.path.with_name(self.path.name + ".json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._record.exists():
            self._go_on(json.loads(self._record.read_text()))
        elif self.path.exists():
            raise UserError(
                f"{self.path} is there, and was not sampled by planish; give another place"
            )
        else:
            self._write_record()

    def _go_on(self, record: Row) -> None:
        """Take over what is recorded, and drop rows behind it: a process was killed between the
        two.
        """
        try:
            found, self.done, self.left_out = record["origin"], record["done"], record["left_out"]
        except KeyError as error:
            raise DamagedFileError(
                f"{self._record} lacks {error}; remove it and {self.path}"
            ) from error
        given = json.loads(json.dumps(self.origin))
        changed = [name for name in sorted({*found, *given}) if found.get(name) != given.get(name)]
        if changed:
            listed = ", ".join(
                f"{name} was {found.get(name)!r:.80}, is {given.get(name)!r:.80}"
                for name in changed
            )
            raise UserError(
                f"{self.path} was sampled with other options: {listed}; give the same to go on with it, or another place"
            )
        rows = read_rows(self.path)
        kept = [row for row in rows if row["index"] < self.done]
        if len(kept) != self.done - self.left_out:
            raise DamagedFileError(
                f"{self.path} has not the rows that {self._record.name} speaks of; remove both"
            )
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, answers: Sequence[Row | None], file: RowFile) -> None:
        """Keep the answers to the next prompts; first the rows, on disk, then that they are there.
        `file` is that at `path`.
        """
        rows = [row for row in answers if row is not None]
        file.append(*rows)
        file.sync()
        self.done += len(answers)
        self.left_out += len(answers) - len(rows)
        self._write_record()

    def _write_record(self) -> None:
        record = {"origin": self.origin, "done": self.done, "left_out": self.left_out}
        write_whole(self._record, json.dumps(record, indent=2) + "\n")


async def sample_conversations(
    sampler: TeacherSampler,
    prompts: Sequence[Conversation],
    path: str | Path,
    origin: Mapping[str, Any],
) -> SampledFile:
    """Have all prompts answered that are not yet, `PROMPTS_AT_ONCE` at a time, and keep the answers
    at `path`.
    """
    kept = SampledFile(Path(path).expanduser(), origin)
    chunks = range(kept.done, len(prompts), PROMPTS_AT_ONCE)
    with closing(RowFile(kept.path)) as file, StepDisplay(len(chunks)) as display:
        for start in chunks:
            chunk = range(start, min(start + PROMPTS_AT_ONCE, len(prompts)))
            with display.begin(
                f"the teacher answers prompts {start} to {chunk[-1]}", len(chunk)
            ) as stage:
                kept.add(await answers_to(sampler, prompts, chunk, stage), file)
            display.step_done()
        if kept.left_out:
            display.say(
                f"{kept.left_out} of {kept.done} answers were cut off or had no room, and are left out"
            )
    if kept.done == kept.left_out:
        raise UserError(
            f"none of {kept.done} answers has an end: they are cut off at max_tokens={sampler.max_tokens}, or their prompts fill "
            "the context; give a larger max_tokens, or shorter prompts"
        )
    return kept


async def answers_to(
    sampler: TeacherSampler, prompts: Sequence[Conversation], indices: Iterable[int], stage: Stage
) -> list[Row | None]:
    """Rows by index, None for what is left out; all asked for at once."""

    async def answer(index: int) -> Row | None:
        row = await sampler.answer(index, prompts[index])
        stage.advance()
        return row

    return await at_once(answer(index) for index in indices)
