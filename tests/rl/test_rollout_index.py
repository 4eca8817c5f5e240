"""The index of a run's rollouts: its rows, its places, repeated iterations, and its cost."""

import asyncio
import json
import os

import numpy as np
import pytest
from byte_chat import ScriptedPolicy
from rollout_samples import NASTY, group, questions, single, spoken, turn

from planish.completers import TinkerTokenCompleter, derived_seed
from planish.files import read_rows
from planish.renderers import get_renderer
from planish.reports.rollout_files import ROLLOUT_TEXTS, RolloutFiles
from planish.reports.rollout_index import INDEX
from planish.reports.rollout_records import TrainedTokens
from planish.reports.rollout_rows import shortest_floats
from planish.rl.environments.problem_env import ProblemEnv, ProblemGroupBuilder
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.rollout.strategy import RetryOnFailure
from planish.rl.types import RolloutError, Trajectory, prompt_id
from planish.types import ModelInput, SampledSequence, SampleResponse


@pytest.fixture
def files(tmp_path, tokenizer):
    return RolloutFiles(tmp_path, "flat", 2, True, tokenizer)


def test_every_trajectory_has_a_row_with_the_place_of_its_texts(files, tmp_path):
    nasty = single(NASTY, NASTY, -2.0)
    cut_off = Trajectory(
        [turn("q", spoken("abc", is_cut_off=True), 0.5)], ModelInput.empty(), "max_tokens", 7
    )
    errors = [RolloutError("TimeoutError", "too slow")]
    groups = [*questions(2, 3), group(5, [nasty, cut_off], errors=errors, sampler_step=9)]
    files.write("train", 10, groups, [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [1.5, None]])
    rows = read_rows(tmp_path / INDEX)
    assert [(row["group"], row["sample"]) for row in rows] == [
        *((0, index) for index in range(3)),
        *((1, index) for index in range(3)),
        (5, 0),
        (5, 1),
    ]
    content = files.path("train", 10, ROLLOUT_TEXTS).read_bytes()
    for row in rows:
        texts = json.loads(content[row["offset"] :][: row["bytes"]])
        assert (texts["group_idx"], texts["traj_idx"]) == (row["group"], row["sample"])
        assert row["file"] == "train_iteration_000010_rollouts.jsonl"
        assert texts["total_reward"] == row["reward"]
    assert rows[-1] == {
        "step": 10,
        "split": "train",
        "group": 5,
        "sample": 1,
        "tags": ["sums"],
        "prompt_id": prompt_id(ModelInput.from_ints(list(b"q"))),
        "seed": 7,
        "sampler_step": 9,
        "reward": 0.5,
        "advantage": None,
        "ending": "max_tokens",
        "turns": 1,
        "tokens": 3,
        "mean_logprob": pytest.approx(-0.02),
        "gap": None,
        "errors": ["TimeoutError"],
        "file": rows[-1]["file"],
        "offset": rows[-1]["offset"],
        "bytes": rows[-1]["bytes"],
    }


def test_places_are_relative_to_the_run_in_folders(tmp_path, tokenizer):
    files = RolloutFiles(tmp_path, "folders", 2, True, tokenizer)
    files.write("eval/a b", 3, questions(1))
    assert {row["file"] for row in read_rows(tmp_path / INDEX)} == {
        "iteration_000003/eval_a_b_rollouts.jsonl"
    }


def test_without_json_files_rows_have_no_place(tmp_path, tokenizer):
    RolloutFiles(tmp_path, "flat", 2, False, tokenizer).write("train", 0, questions(1, 2))
    rows = read_rows(tmp_path / INDEX)
    assert len(rows) == 2
    assert {(row["file"], row["offset"], row["bytes"]) for row in rows} == {(None, None, None)}


def test_a_resumed_run_has_no_rows_of_the_iterations_that_it_repeats(files, tmp_path):
    for step in range(4):
        files.write("train", step, questions(1, 2))
    with open(tmp_path / INDEX, "ab") as file:
        file.write(b'{"step": 4, "spl')  # a crash while a row was written
    files.remove_from(2)
    assert [row["step"] for row in read_rows(tmp_path / INDEX)] == [0, 0, 1, 1]
    files.write("train", 2, questions(1, 2))
    assert [row["step"] for row in read_rows(tmp_path / INDEX)] == [0, 0, 1, 1, 2, 2]


def test_a_turn_has_its_tokens_and_exact_logprobs(files):
    logprobs = np.random.default_rng(0).normal(-3, 2, 6).astype(np.float32).tolist()
    trajectory = Trajectory([turn("hi", spoken("hello", logprobs))], ModelInput.empty())
    files.write("train", 0, [group(0, [trajectory])])
    [row] = read_rows(files.path("train", 0, ROLLOUT_TEXTS))
    [found] = row["turns"]
    assert found["observation_ids"] == list(b"hi")
    assert found["answer_ids"] == trajectory.transitions[0].ac.tokens
    assert np.float32(found["logprobs"]).tolist() == logprobs
    assert max(len(str(value)) for value in found["logprobs"]) <= 12
    assert found["is_trained"]
    assert found["piece_lengths"].split() == ["1"] * 5 + [str(len("<|im_end|>"))]
    assert found["control_pieces"] == [5]


def test_logprobs_that_are_no_float32_stay_as_they_are():
    assert shortest_floats([-0.1, -0.2]) == [-0.1, -0.2]
    assert shortest_floats([float("-inf"), -0.5]) == [None, -0.5]
    assert shortest_floats(None) is None


class Fails(ProblemEnv):
    """Fails at its first attempt."""

    failures = 0

    def get_question(self) -> str:
        if Fails.failures == 0:
            Fails.failures += 1
            raise ValueError("not yet")
        return "?"

    def check_answer(self, sample_str: str) -> bool:
        return True

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "!"


class Sampler:
    """Records the seeds that it is called with."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def sample_async(self, prompt, num_samples, sampling_params):
        self.seeds.append(sampling_params.seed)
        tokens, logprobs = np.array([65, 258], np.int32), np.array([-1, -1], np.float32)
        return SampleResponse([SampledSequence("stop", "", tokens, logprobs)])


def test_the_seed_of_a_row_gives_the_seeds_of_its_samples(tokenizer):
    Fails.failures = 0
    renderer = get_renderer("chatml", tokenizer)
    sampler = Sampler()
    result = asyncio.run(
        do_group_rollout(
            ProblemGroupBuilder(lambda: Fails(renderer), 2),
            TinkerTokenCompleter(sampler, 8),
            RetryOnFailure(max_retries=1),
            seed=5,
        )
    )
    assert result is not None
    seeds = [trajectory.seed or 0 for trajectory in result.trajectories_G]
    assert sorted(seeds) == sorted([derived_seed(5, 0, 1), derived_seed(5, 1)])
    assert sorted(sampler.seeds) == sorted(derived_seed(seed, 1) for seed in seeds)


def test_a_rollout_without_a_seed_has_none(tokenizer):
    renderer = get_renderer("chatml", tokenizer)
    Fails.failures = 1
    result = asyncio.run(
        do_group_rollout(
            ProblemGroupBuilder(lambda: Fails(renderer), 1), ScriptedPolicy(renderer, ["a"])
        )
    )
    assert result is not None
    assert [trajectory.seed for trajectory in result.trajectories_G] == [None]


def test_appending_reads_no_more_than_the_end_of_the_index(files, tmp_path, monkeypatch):
    """The index of a long run has many megabytes, and each step appends to it."""
    files.write("train", 0, questions(1, 2))
    reads: list[int] = []
    true_read_bytes = type(tmp_path).read_bytes

    def read_bytes(path):
        if path.name == "index.jsonl":
            reads.append(os.path.getsize(path))
        return true_read_bytes(path)

    monkeypatch.setattr(type(tmp_path), "read_bytes", read_bytes)
    files.write("train", 1, questions(1, 2))
    assert reads == []
    assert len(read_rows(tmp_path / INDEX)) == 4


def tokens_of(advantages: list[float], logprobs: list[float]) -> TrainedTokens:
    return TrainedTokens(np.array(advantages, np.float32), np.array(logprobs, np.float32))


def test_trained_tokens_are_written_where_they_differ(files, tmp_path):
    logprobs = [-1.0, -2.0, -3.0]
    answers = [spoken("ab", logprobs), spoken("cd", logprobs)]
    first = [turn("q", answers[0], 0.0, done=False), turn("qr", answers[1], 1.0)]
    second = [turn("q", answers[0], 0.0, train_on_action=False, done=False), turn("r", answers[1])]
    trained = {
        (0, 0): tokens_of([0.5] * 3 + [0.5, 0.25, 0.5], [*logprobs, -1.0, -2.5, -3.0]),
        (0, 1): tokens_of([-0.5] * 3, logprobs),
    }
    trajectories = [Trajectory(turns, ModelInput.empty()) for turns in (first, second)]
    files.write("train", 0, [group(0, trajectories)], [[0.5, -0.5]], trained=trained)
    rows = read_rows(files.path("train", 0, ROLLOUT_TEXTS))
    [[equal, other], [untrained, last]] = [row["turns"] for row in rows]
    assert equal["has_equal_trainer_logprobs"]
    assert "trainer_logprobs" not in equal
    assert "advantages" not in equal
    assert other["trainer_logprobs"] == [-1.0, -2.5, -3.0]
    assert other["advantages"] == [0.5, 0.25, 0.5]
    assert not other["has_equal_trainer_logprobs"]
    assert "has_equal_trainer_logprobs" not in untrained
    assert last["has_equal_trainer_logprobs"]
    assert "advantages" not in last
    assert [row["gap"] for row in read_rows(tmp_path / INDEX)] == [0.5, 0.0]
