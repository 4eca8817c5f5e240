"""Continue a recorded answer from another token.

    place = AnswerPlace(step=12, group=3, sample=0, turn=1, token=17)
    alternatives(reader, place, service_client)          # what else the policy could have said there
    continued(reader, place, [42], service_client)       # the answer that follows if it says 42

The answer begins with the recorded tokens before the place. Then come the given tokens, and then
samples of the same weights, or of those of `checkpoint`. The seed of the new samples is derived from
the seed of the recorded turn and the place, so the same question has the same answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish import SamplingClient, ServiceClient
from planish.completers import derived_seed
from planish.console.replay import (
    RecordedTurn,
    recorded_rows,
    recorded_texts,
    recorded_turns,
    sampling_temperature,
    weights_of_row,
)
from planish.console.row_tail import Row
from planish.console.run_reader import RunReader
from planish.errors import UserError
from planish.reports.rollout_rows import shortest_floats
from planish.reports.rollout_tokens import DisplayDetokenizer
from planish.types import ModelInput, SamplingParams

_DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class AnswerPlace:
    """A token of a recorded answer."""

    step: int
    group: int
    sample: int
    turn: int
    """Number of the turn, from 1."""
    token: int
    """Index of the token in the answer, from 0. The number of tokens is the place after the last."""
    split: str = "train"


@dataclass(frozen=True)
class Alternative:
    """A token that the policy could have sampled."""

    token: int
    text: str
    logprob: float
    is_recorded: bool


def alternatives(
    reader: RunReader,
    place: AnswerPlace,
    service_client: ServiceClient,
    *,
    count: int = 8,
    checkpoint: str | None = None,
) -> list[Alternative]:
    """Return the `count` most likely tokens at a place, the most likely first. Raises UserError if
    there is no such place, and CheckpointError if its weights were not saved.
    """
    turn, client = _open(reader, place, service_client, checkpoint)
    # The logprobs of a prompt's tokens need a token there. Which one it is does not matter.
    recorded = turn.tokens[place.token] if place.token < len(turn.tokens) else None
    prompt = [*turn.prompt, *turn.tokens[: place.token], recorded or 0]
    params = SamplingParams(max_tokens=1, temperature=1.0)
    response = client.sample(
        ModelInput.from_ints(prompt),
        1,
        params,
        topk_prompt_logprobs=count,
        prompt_logprobs_last_n=1,
    ).result()
    found = (response.topk_prompt_logprobs or [None])[-1] or []
    detokenizer = DisplayDetokenizer(client.get_tokenizer())
    return [
        Alternative(token, detokenizer.text([token]), logprob, token == recorded)
        for token, logprob in found
    ]


def continued(
    reader: RunReader,
    place: AnswerPlace,
    tokens: Sequence[int] | str,
    service_client: ServiceClient,
    *,
    checkpoint: str | None = None,
    max_tokens: int | None = None,
) -> Row:
    """Return the answer from the place on: `tokens` (ids, or a text), and what the policy samples
    after them. The fields are those of a turn in *_rollouts.jsonl, and `stop_reason`. Raises
    UserError if there is no such place, and CheckpointError if its weights were not saved.
    """
    turn, client = _open(reader, place, service_client, checkpoint)
    tokenizer = client.get_tokenizer()
    if isinstance(tokens, str):
        tokens = tokenizer.encode(tokens, add_special_tokens=False)
    if not tokens:
        raise UserError("tokens: give at least one token to continue from")
    before = [*turn.prompt, *turn.tokens[: place.token], *tokens]
    limit = max_tokens or reader.config.get("max_tokens") or _DEFAULT_TOKENS
    params = SamplingParams(
        max_tokens=max(1, limit - place.token - len(tokens)),
        seed=derived_seed(turn.seed, place.token, *tokens),
        temperature=sampling_temperature(reader.config, place.split),
    )
    response = client.sample(
        ModelInput.from_ints(before),
        1,
        params,
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=len(tokens),
    ).result()
    [sequence] = response.sequences
    prompt_logprobs = list(response.prompt_logprobs or [])[-len(tokens) :]
    given = [math.nan if logprob is None else logprob for logprob in prompt_logprobs]
    all_tokens = [*tokens, *sequence.tokens]
    pieces = DisplayDetokenizer(tokenizer).pieces(all_tokens)
    return {
        "answer": "".join(piece.text for piece in pieces),
        "answer_ids": all_tokens,
        "logprobs": shortest_floats([*(given or [math.nan] * len(tokens)), *sequence.logprobs]),
        "piece_lengths": " ".join(piece.length_code for piece in pieces),
        "control_pieces": [index for index, piece in enumerate(pieces) if piece.is_control],
        "stop_reason": sequence.stop_reason,
    }


def _open(
    reader: RunReader, place: AnswerPlace, service_client: ServiceClient, checkpoint: str | None
) -> tuple[RecordedTurn, SamplingClient]:
    """Return the recorded turn of a place, and a client with its weights."""
    [row] = recorded_rows(reader, place.step, place.group, place.sample, place.split)
    turns = recorded_turns(row, recorded_texts(reader, row))
    turn = next((each for each in turns if each.turn == place.turn), None)
    if turn is None:
        raise UserError(f"turn={place.turn}: the rollout has no such turn")
    if not 0 <= place.token <= len(turn.tokens):
        raise UserError(f"token={place.token}: the answer has {len(turn.tokens)} tokens")
    weights: dict[str, Any] = (
        {"model_path": checkpoint} if checkpoint else weights_of_row(reader, row)
    )
    return turn, service_client.create_sampling_client(**weights)
