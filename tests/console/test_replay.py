"""Recorded rollouts of a real run are sampled again, bit for bit."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from digit_env import DigitsBuilder
from rollout_samples import group, single
from sample_runs import write_run

from planish import ServiceClient
from planish.commands.cli import main as planish
from planish.console.continuation import AnswerPlace, alternatives, continued
from planish.console.replay import ReplayedTurn, all_equal, recorded_texts, replay
from planish.console.run_reader import RunReader
from planish.errors import CheckpointError, UserError
from planish.files import read_rows
from planish.reports.rollout_index import INDEX
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main

pytestmark = pytest.mark.slow  # they train a run


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[ServiceClient]:
    model = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with ServiceClient(
        models={"tiny": str(model)},
        data_dir=tmp_path_factory.mktemp("data"),
        dtype="float32",
        deterministic=True,
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(client, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run"
    config = Config(
        learning_rate=1e-2,
        dataset_builder=DigitsBuilder(batches=3, turns=2, tests=2),
        model_name="tiny",
        lora_rank=4,
        max_tokens=6,
        log_path=str(path),
        eval_every=2,
        save_every=2,
        temperature=1.3,
    )
    return asyncio.run(main(config, client))


@pytest.mark.parametrize("step", [0, 2])
def test_a_replay_is_equal_bit_for_bit(client, run, step):
    turns = replay(run, step, 1, service_client=client)
    rows = [row for row in read_rows(run / INDEX) if row["split"] == "train"]
    expected = [row for row in rows if row["step"] == step and row["group"] == 1]
    assert [(turn.sample, turn.turn) for turn in turns] == [
        (row["sample"], number + 1) for row in expected for number in range(row["turns"])
    ]
    assert sum(len(turn.tokens) for turn in turns) == sum(row["tokens"] for row in expected) > 20
    assert all_equal(turns)
    assert "bit-equal" in str(turns[0])


def test_a_rollout_of_an_evaluation_is_replayed(client, run):
    turns = replay(run, 2, 0, sample=0, split="eval/test", service_client=client)
    assert turns
    assert all_equal(turns)


def test_other_weights_meet_the_same_random_numbers(client, run):
    final = read_rows(run / "checkpoints.jsonl")[-1]["sampler_path"]
    turns = replay(run, 0, 1, checkpoint=final, service_client=client)
    assert not all_equal(turns)
    differing = next(turn for turn in turns if turn.first_difference is not None)
    place = differing.first_difference
    assert place is not None
    assert differing.tokens[:place] == differing.recorded_tokens[:place]
    assert f"token {place + 1} of" in str(differing)


def test_weights_that_were_not_saved_are_named(client, run):
    with pytest.raises(CheckpointError, match="step 1 were not saved.*: 0, 2, 3"):
        replay(run, 1, 0, service_client=client)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"step": 9, "group": 0}, "no rollout with step=9, group=0 .*its steps are 0 to 2"),
        ({"step": 0, "group": 99}, "no rollout with step=0, group=99"),
        ({"step": 0, "group": 0, "sample": 7}, "sample=7"),
        ({"step": 0, "group": 0, "split": "eval/none"}, "it has no rollouts"),
    ],
)
def test_a_place_without_rollouts_is_named(client, run, place, message):
    with pytest.raises(UserError, match=message):
        replay(run, **place, service_client=client)


def test_rollouts_without_seeds_cannot_be_replayed(client, tmp_path, tokenizer):
    run = write_run(
        tmp_path / "a",
        tokenizer,
        steps=1,
        rollouts=lambda step: [group(0, [single("q", "a", 1.0)], sampler_step=0)],
        model_name="tiny",
    )
    with pytest.raises(UserError, match="has no seed"):
        replay(run, 0, 0, service_client=client)


def test_logprobs_of_another_machine_are_told_from_other_tokens():
    turn = ReplayedTurn(0, 1, [1, 2], [1, 2], [-1.0, -2.0], [-1.0, -2.0000002])
    assert not turn.is_equal
    assert turn.first_difference is None
    assert "tokens are equal, and their logprobs differ by at most 2.4e-07" in str(turn)
    other = ReplayedTurn(0, 1, [1, 2], [1, 3], [-1.0, -2.0], [-1.0, -9.0])
    assert other.largest_gap == 0.0
    assert "token 2 of 2 differs: 2 was recorded, and 3 is sampled now" in str(other)


def test_the_command_compares_a_group(client, run, capsys, monkeypatch):
    monkeypatch.setattr("planish.console.replay._client", lambda config: _Lent(client))
    assert planish(["replay", str(run), "--step", "2", "--group", "0"]) == 0
    assert capsys.readouterr().out.count("bit-equal") == 8
    assert planish(["replay", str(run), "--step", "2", "--group", "0", "--json"]) == 0
    [first, *_] = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["is_equal"]
    assert planish(["replay", str(run), "--step", "1", "--group", "0"]) == 1
    assert "were not saved" in capsys.readouterr().err


class _Lent:
    """A client that stays open after the command."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client

    def __enter__(self) -> ServiceClient:
        return self._client

    def __exit__(self, *_: object) -> None:
        pass


def test_sampler_and_trainer_agree_at_every_token(run):
    rows = [row for row in read_rows(run / INDEX) if row["split"] == "train"]
    gaps = [row["gap"] for row in rows if row["advantage"]]
    assert gaps
    assert max(gaps) < 1e-5


def test_the_alternatives_at_a_token_have_its_recorded_logprob(client, run):
    [row, *_] = [row for row in read_rows(run / INDEX) if row["split"] == "train"]
    reader = RunReader(run, "run")
    reader.refresh_metrics()
    texts = recorded_texts(reader, {**row})
    turn = texts["turns"][0]
    place = AnswerPlace(row["step"], row["group"], row["sample"], 1, 2)
    found = alternatives(reader, place, client, count=272)
    assert [each.logprob for each in found] == sorted(
        (each.logprob for each in found), reverse=True
    )
    [recorded] = [each for each in found if each.is_recorded]
    assert recorded.token == turn["answer_ids"][2]
    assert sum(math.exp(each.logprob) for each in found) == pytest.approx(1.0, abs=1e-3)
    at_end = dataclasses.replace(place, token=len(turn["answer_ids"]))
    assert not any(each.is_recorded for each in alternatives(reader, at_end, client))


def test_an_answer_is_continued_from_another_token(client, run):
    [row, *_] = [row for row in read_rows(run / INDEX) if row["split"] == "train"]
    reader = RunReader(run, "run")
    reader.refresh_metrics()
    place = AnswerPlace(row["step"], row["group"], row["sample"], 1, 2)
    other = continued(reader, place, [65, 66], client)
    assert other["answer_ids"][:2] == [65, 66]
    assert other["answer"].startswith("AB")
    assert 2 < len(other["answer_ids"]) <= 6 - 2
    assert len(other["logprobs"]) == len(other["answer_ids"])
    assert None not in other["logprobs"]
    assert continued(reader, place, [65, 66], client) == other
    assert continued(reader, place, "AB", client) == other
    assert continued(reader, place, [67], client)["answer_ids"] != other["answer_ids"]
    for changed, words in (
        ({"token": 1000}, "token=1000: the answer has"),
        ({"turn": 9}, "no such turn"),
        ({"group": 99}, "has no rollout"),
    ):
        with pytest.raises(UserError, match=words):
            continued(reader, dataclasses.replace(place, **changed), [65], client)
    with pytest.raises(UserError, match="at least one token"):
        continued(reader, place, [], client)
