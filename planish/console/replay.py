"""Replay: sample recorded rollouts again, from the same seeds, prompts and weights.

    for sample in replay("runs/mine", step=12, group=3):
        print(sample)

A sample depends on its prompt, its seed and the weights only, and not on the batch that it was
computed in. So on the same kind of machine, a replay returns the same tokens with the same
logprobs, bit for bit. Each turn is sampled after its recorded prompt, so environment and grader are
not needed.

With `checkpoint`, the same random numbers meet other weights. The first token that differs shows
where the two policies part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planish import SamplingClient, ServiceClient
from planish.client.local import connect, start_engine
from planish.client.remote_connection import resolve_api_key
from planish.completers import derived_seed
from planish.console.rollout_table import Filter
from planish.console.row_tail import Row
from planish.console.run_reader import RunReader
from planish.errors import CheckpointError, UserError
from planish.runlog.run_directory import checkpoint_of
from planish.service import Service
from planish.types import ModelInput, SamplingParams


@dataclass(frozen=True)
class ReplayedTurn:
    """One turn that was sampled again."""

    sample: int
    """Index of the rollout in its group."""
    turn: int
    """Number of the turn, from 1."""
    recorded_tokens: list[int]
    tokens: list[int]
    recorded_logprobs: list[float] | None
    logprobs: list[float]

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None if all tokens are equal."""
        pairs = enumerate(zip(self.recorded_tokens, self.tokens, strict=True))
        return next((index for index, (old, new) in pairs if old != new), None)

    @property
    def largest_gap(self) -> float:
        """Largest difference of the logprobs, up to the first token that differs."""
        if self.recorded_logprobs is None:
            return 0.0
        end = self.first_difference
        old, new = (
            np.array(values[:end], np.float32) for values in (self.recorded_logprobs, self.logprobs)
        )
        return float(np.abs(old - new).max(initial=0.0))

    @property
    def is_equal(self) -> bool:
        """Whether tokens and logprobs are equal bit for bit."""
        return self.first_difference is None and self.largest_gap == 0.0

    def __str__(self) -> str:
        name = f"sample {self.sample}, turn {self.turn}: "
        if self.is_equal:
            return f"{name}bit-equal ({len(self.tokens)} tokens)"
        if self.first_difference is not None:
            return (
                f"{name}token {self.first_difference + 1} of {len(self.tokens)} differs: "
                f"{self.recorded_tokens[self.first_difference]} was recorded, and "
                f"{self.tokens[self.first_difference]} is sampled now"
            )
        return (
            f"{name}the {len(self.tokens)} tokens are equal, and their logprobs differ by at most "
            f"{self.largest_gap:.2g}, as on another kind of machine"
        )


def replay(
    run: str | Path,
    step: int,
    group: int,
    *,
    sample: int | None = None,
    split: str = "train",
    checkpoint: str | None = None,
    service_client: ServiceClient | None = None,
) -> list[ReplayedTurn]:
    """Sample the rollouts of a group again (or only one of them), and compare.

    `checkpoint` is the path of other weights. Without `service_client`, an engine is started in
    this process, or the run's server is used. Raises UserError if the run has no such group, or its
    texts were not written, and CheckpointError if its weights were not saved or have expired.
    """
    reader = RunReader(Path(run).expanduser(), str(run))
    reader.refresh_metrics()
    rows = recorded_rows(reader, step, group, sample, split)
    recorded = [(row, recorded_texts(reader, row)) for row in rows]
    model: dict[str, Any] = (
        {"model_path": checkpoint} if checkpoint else weights_of_row(reader, rows[0])
    )
    with ExitStack() as stack:
        client = service_client or stack.enter_context(_client(reader.config))
        sampling_client = client.create_sampling_client(**model)
        temperature = sampling_temperature(reader.config, split)
        pending = [
            (turn, _sample_again(sampling_client, turn, temperature))
            for row, texts in recorded
            for turn in recorded_turns(row, texts)
        ]
        return [_compare(turn, future.result().sequences[0]) for turn, future in pending]


def recorded_rows(
    reader: RunReader, step: int, group: int, sample: int | None, split: str
) -> list[Row]:
    """Return the index rows of a group, or of its rollout `sample` if that is not None. Raises
    UserError if there are none.
    """
    reader.refresh_rollouts()
    table = reader.rollouts
    chosen = table.select(Filter(split=split, step_from=step, step_to=step, group=group))
    rows = [table.row(index) for index in chosen]
    rows = [row for row in rows if sample is None or row["sample"] == sample]
    if not rows:
        place = f"step={step}, group={group}" + ("" if sample is None else f", sample={sample}")
        steps = sorted(
            {int(table.row(index)["step"]) for index in table.select(Filter(split=split))}
        )
        known = f"its steps are {steps[0]} to {steps[-1]}" if steps else "it has no rollouts"
        raise UserError(f"RUN {reader.path} has no rollout with {place} ({split}); {known}")
    return rows


def weights_of_row(reader: RunReader, row: Row) -> dict[str, Any]:
    """Return the argument of `create_sampling_client` for the weights that sampled a rollout.
    Raises CheckpointError if no checkpoint has them.
    """
    step = row["sampler_step"]
    for checkpoint in reversed(reader.checkpoints):
        path = checkpoint.get("sampler_path") or checkpoint.get("state_path")
        if checkpoint.get("batch") == step and path:
            return {"model_path": path}
    start = reader.config.get("load_checkpoint_path")
    if step == 0 and start:
        return {"model_path": checkpoint_of(start)}
    if step == 0:
        return {"base_model": reader.config["model_name"]}
    saved = sorted({0, *(int(each["batch"]) for each in reader.checkpoints if "batch" in each)})
    raise CheckpointError(
        f"RUN {reader.path}: the weights of step {step} were not saved, or have expired; rollouts "
        f"of these steps can be replayed: {', '.join(map(str, saved))}. Give --checkpoint to "
        "sample with other weights"
    )


@dataclass(frozen=True)
class RecordedTurn:
    """One turn as the run has recorded it."""

    sample: int
    """Index of the rollout in its group."""
    turn: int
    """Number of the turn, from 1."""
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float] | None
    seed: int
    """Seed of the sample."""


def recorded_texts(reader: RunReader, row: Row) -> Row:
    """Return the texts of a rollout. Raises UserError if they cannot be read."""
    try:
        return reader.texts(row)
    except LookupError as error:
        raise UserError(f"RUN {reader.path}: {error}") from error


def recorded_turns(row: Row, texts: Row) -> Iterator[RecordedTurn]:
    """Yield the turns of a rollout that have tokens. Raises UserError if it has no seed."""
    if row["seed"] is None:
        raise UserError(
            f"the rollout with step={row['step']}, group={row['group']} has no seed, so it cannot "
            "be sampled again"
        )
    context: list[int] = []
    for number, turn in enumerate(texts["turns"], start=1):
        prompt = [*(context if turn["extends_context"] else ()), *turn["observation_ids"]]
        tokens = turn["answer_ids"]
        if tokens:
            seed = derived_seed(row["seed"], number)
            yield RecordedTurn(row["sample"], number, prompt, tokens, turn["logprobs"], seed)
        context = [*prompt, *tokens]


def _sample_again(client: SamplingClient, turn: RecordedTurn, temperature: float) -> Any:
    """Return a future of the same number of tokens, without a stop condition: the recorded tokens
    end where the condition was met.
    """
    params = SamplingParams(
        max_tokens=len(turn.tokens), seed=turn.seed, stop=[], temperature=temperature
    )
    return client.sample(ModelInput.from_ints(turn.prompt), 1, params)


def _compare(turn: RecordedTurn, sequence: Any) -> ReplayedTurn:
    return ReplayedTurn(
        turn.sample, turn.turn, turn.tokens, sequence.tokens, turn.logprobs, sequence.logprobs
    )


def sampling_temperature(config: Mapping[str, Any], split: str) -> float:
    """Return the temperature at which a run samples the rollouts of a split."""
    evaluation = config.get("eval_temperature") if split != "train" else None
    return config.get("temperature", 1.0) if evaluation is None else evaluation


def open_service(config: Mapping[str, Any]) -> Service:
    """Return a connection to the run's server, or an engine with the run's options. The caller
    closes it.
    """
    if config.get("base_url"):
        return connect(config["base_url"], resolve_api_key(None), {})
    options = {name: config.get(name) for name in ("quantize", "deterministic")}
    return start_engine(None, None, options)


@contextmanager
def _client(config: Mapping[str, Any]) -> Iterator[ServiceClient]:
    service = open_service(config)
    try:
        yield ServiceClient(service=service)
    finally:
        service.close(finish=False)


def all_equal(turns: Sequence[ReplayedTurn]) -> bool:
    """Return whether all turns are equal bit for bit."""
    return all(turn.is_equal for turn in turns)
