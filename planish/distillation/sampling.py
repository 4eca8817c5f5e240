"""Sample a teacher's answers to prompts into a file, for off-policy and prompt distillation.

    PATH         one conversation per row: {"index": number of its prompt, "messages": [...]}
    PATH.json    the options of the file, how many prompts are done, and how many were left out

The teacher may get more messages than the rows contain: `prefix`, such as long instructions or
worked examples, precedes each prompt. A student that is trained on the rows learns to answer as if
the prefix were there (context distillation: Askell et al. 2021; Snell et al. 2022).

Answers that the length limit cut off are left out, because their end cannot be learned. Answers with
</think> and no <think> are left out, because no renderer can write them. Prompts that leave no space
for an answer in the context window are left out too. All are counted. Each answer's random numbers
depend only on (seed, index). After a crash, sampling resumes after the last prompts recorded as done.
A file that was made with other options is rejected.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planish.completers import SamplesTokens, TinkerTokenCompleter, derived_seed
from planish.datasets.messages import Message, ends_unbegun_reasoning
from planish.errors import DamagedFileError, UserError
from planish.files import RowFile, differences, read_rows, write_atomically
from planish.processes.interruption import gather_or_cancel
from planish.renderers import Renderer
from planish.runlog.console import Stage, StepDisplay

PROMPTS_PER_CHUNK = 64

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

    async def answer(self, index: int, messages: list[Message]) -> Row | None:
        """Return the row of a prompt; None if it is left out."""
        prompt = self.renderer.build_generation_prompt([*self.prefix, *messages])
        if self.context_window is not None and prompt.length >= self.context_window:
            return None
        policy = TinkerTokenCompleter(
            self.client, self.max_tokens, self.temperature, self.context_window
        )
        stop = self.renderer.get_stop_sequences()
        sampled = await policy.seeded(derived_seed(self.seed, index))(prompt, stop)
        message, termination = self.renderer.parse_response(sampled.tokens)
        if not termination.is_clean or ends_unbegun_reasoning(message):
            return None
        return {"index": index, "messages": [*messages, message]}


@dataclass
class SampledFile:
    """The file of sampled conversations, with the record of how many prompts are done."""

    path: Path
    origin: Mapping[str, Any]
    """The options that the rows depend on, as JSON values."""
    num_done: int = 0
    """The number of prompts that are done, including those left out."""
    num_left_out: int = 0
    """The number of prompts without a row."""
    _record: Path = field(init=False)

    def __post_init__(self) -> None:
        self._record = self.path.with_name(self.path.name + ".json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._record.exists():
            self._resume(json.loads(self._record.read_text()))
        elif self.path.exists():
            raise UserError(f"{self.path} exists and was not sampled by planish; give another path")
        else:
            self._write_record()

    def _resume(self, record: Row) -> None:
        """Continue from the record, and drop rows of prompts that it does not count as done. A
        process that is killed after writing rows and before the record leaves such rows.
        """
        try:
            recorded_options = record["origin"]
            self.num_done = record["done"]
            self.num_left_out = record["left_out"]
        except KeyError as error:
            raise DamagedFileError(
                f"{self._record} lacks {error}; remove it and {self.path}"
            ) from error
        new_options = json.loads(json.dumps(self.origin))
        if changed := differences(recorded_options, new_options):
            raise UserError(
                f"{self.path} was sampled with other options: {changed}; give the same options to "
                "continue it, or another path"
            )
        recorded_rows = [row for row in read_rows(self.path) if row["index"] < self.num_done]
        if len(recorded_rows) != self.num_done - self.num_left_out:
            raise DamagedFileError(
                f"{self.path} does not contain the rows that {self._record.name} counts; remove "
                "both"
            )
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in recorded_rows))

    def add(self, answers: Sequence[Row | None], file: RowFile) -> None:
        """Append the answers to the next prompts to `file`, which is open at `path`. The rows are
        synced to disk before the record counts them as done.
        """
        rows = [row for row in answers if row is not None]
        file.append(*rows)
        file.sync()
        self.num_done += len(answers)
        self.num_left_out += len(answers) - len(rows)
        self._write_record()

    def _write_record(self) -> None:
        record = {"origin": self.origin, "done": self.num_done, "left_out": self.num_left_out}
        write_atomically(self._record, json.dumps(record, indent=2) + "\n")


async def sample_conversations(
    sampler: TeacherSampler,
    prompts: Sequence[list[Message]],
    path: str | Path,
    origin: Mapping[str, Any],
) -> SampledFile:
    """Sample answers to all prompts that are not done yet, and write them to `path`.

    `PROMPTS_PER_CHUNK` prompts are answered concurrently, and then recorded as done. Raises
    UserError if the file was made with another `origin`, or if no prompt has a complete answer.
    """
    sampled_file = SampledFile(Path(path).expanduser(), origin)
    chunks = range(sampled_file.num_done, len(prompts), PROMPTS_PER_CHUNK)
    with closing(RowFile(sampled_file.path)) as file, StepDisplay(len(chunks)) as display:
        for start in chunks:
            chunk = range(start, min(start + PROMPTS_PER_CHUNK, len(prompts)))
            with display.open_stage(
                f"the teacher answers prompts {start} to {chunk[-1]}", len(chunk)
            ) as stage:
                sampled_file.add(await answers_to(sampler, prompts, chunk, stage), file)
            display.step_done()
        if sampled_file.num_left_out:
            display.say(
                f"{sampled_file.num_left_out} of {sampled_file.num_done} answers are left out: "
                "they were cut off, have </think> without <think>, or their prompts fill the context "
                "window"
            )
    if sampled_file.num_done == sampled_file.num_left_out:
        raise UserError(
            f"none of {sampled_file.num_done} answers is complete: they were cut off at "
            f"max_tokens={sampler.max_tokens}, or their prompts fill the context window; give "
            "another path with a larger max_tokens, shorter prompts, or a teacher that ends its "
            "answers"
        )
    return sampled_file


async def answers_to(
    sampler: TeacherSampler, prompts: Sequence[list[Message]], indices: Iterable[int], stage: Stage
) -> list[Row | None]:
    """Sample the answers concurrently. Return one row per index, or None if it is left out."""

    async def answer(index: int) -> Row | None:
        row = await sampler.answer(index, prompts[index])
        stage.advance()
        return row

    return await gather_or_cancel(answer(index) for index in indices)
