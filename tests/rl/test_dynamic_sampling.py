"""Steps that roll out further batches until enough groups have advantages."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import chz
import pytest
from digest_service import FakeService, Killed
from digit_env import DigitGroup, Digits, DigitsBuilder
from hypothesis import given, strategies as st
from metric_tables import definition_of

from planish.errors import UnsupportedError, UserError
from planish.files import read_rows
from planish.runlog.run_directory import CheckpointRecord
from planish.training.batch_order import BatchOrder
from planish.training.rl_config import AsyncConfig, Config, StreamMinibatchConfig
from planish.training.train_rl import main

GROUPS, BATCHES = 4, 6
MIXED_SIZE = 16
"""Size of a group with random rewards, large enough that all these groups are mixed."""


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    monkeypatch.setattr("planish.training.run_loop.code_diff", lambda paths: "")


@dataclass(frozen=True)
class Noted(Digits):
    """Batches whose first `constant_every` groups are constant. `requested` lists the indices."""

    requested: list[int] = field(default_factory=list)

    def get_batch(self, index):
        self.requested.append(index)
        return super().get_batch(index)

    def _group(self, number):
        is_constant = number % self.groups < self.constant_every
        tag = "constant" if is_constant else "digits"
        return DigitGroup(number, size=MIXED_SIZE, tag=tag)


REQUESTED: list[int] = []


@chz.chz
class Builder(DigitsBuilder):
    batches: int = BATCHES

    async def __call__(self):
        REQUESTED.clear()
        return Noted(self.batches, GROUPS, 1, self.constant_every, REQUESTED), None


def config_of(path, **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": Builder(constant_every=2),
        "model_name": "tiny",
        "max_tokens": 8,
        "log_path": str(path),
        "save_every": 2,
        "eval_every": 0,
        "num_groups_to_log": 0,
        "rollout_json_export": False,
        "remove_constant_reward_groups": True,
        "max_refills": 2,
        **changes,
    }
    return Config(**options)


def run(service, path, **changes):
    asyncio.run(main(config_of(path, **changes), cast(Any, service)))
    return read_rows(path / "metrics.jsonl")


def sampled(row):
    return {
        name: row[f"dynamic_sampling/{name}_groups"] for name in ("mixed", "missing", "unused")
    } | {"refills": row["dynamic_sampling/refills"]}


@pytest.mark.parametrize(
    ("num_constant", "options", "trained", "expected"),
    [
        # Two of four groups are mixed, so one refill fills the batch exactly.
        (2, {}, 4, {"mixed": 4, "missing": 0, "unused": 0, "refills": 1}),
        # Three mixed groups; a refill adds three, of which one is needed.
        (1, {}, 4, {"mixed": 6, "missing": 0, "unused": 2, "refills": 1}),
        # One mixed group in each of three batches is too few: the bound ends the search.
        (3, {}, 3, {"mixed": 3, "missing": 1, "unused": 0, "refills": 2}),
        (3, {"max_refills": 5}, 4, {"mixed": 4, "missing": 0, "unused": 0, "refills": 3}),
        (4, {}, 0, {"mixed": 0, "missing": 4, "unused": 0, "refills": 2}),
        (0, {}, 4, {"mixed": 4, "missing": 0, "unused": 0, "refills": 0}),
        # A batch that has enough is trained on with all its mixed groups.
        (1, {"min_mixed_groups": 2}, 3, {"mixed": 3, "missing": 0, "unused": 0, "refills": 0}),
        (2, {"min_mixed_groups": 6}, 6, {"mixed": 6, "missing": 0, "unused": 0, "refills": 2}),
    ],
)
def test_a_step_is_refilled(service, tmp_path, num_constant, options, trained, expected):
    builder = Builder(constant_every=num_constant)
    [row] = run(service, tmp_path, dataset_builder=builder, max_steps=1, **options)
    assert sampled(row) == expected
    assert service.clients[-1].calls == ([trained * MIXED_SIZE] if trained else [])
    num_batches = 1 + expected["refills"]
    assert row["env/all/total_episodes"] == num_batches * GROUPS * MIXED_SIZE
    assert row["env/all/by_group/frac_degenerate"] == num_constant / GROUPS
    assert row["tokens/sampled"] == num_batches * GROUPS * MIXED_SIZE * 3
    assert "rollout_errors/groups_skipped" not in row
    assert all(definition_of(key) for key in row if key.startswith("dynamic_sampling/"))


def test_substeps_share_the_mixed_groups(service, tmp_path):
    run(service, tmp_path, num_substeps=2, max_steps=1)
    assert service.clients[-1].calls == [2 * MIXED_SIZE, 2 * MIXED_SIZE]


def test_refills_are_the_next_batches_and_no_batch_repeats_within_an_epoch(service, tmp_path):
    """Each step of three batches begins where the step before has ended."""
    builder = Builder(constant_every=4)
    rows = run(service, tmp_path, dataset_builder=builder, num_epochs=2, max_steps=8)
    epochs = [REQUESTED[start : start + BATCHES] for start in range(0, 24, BATCHES)]
    assert epochs[0] == list(range(BATCHES)), "the dataset's own order"
    assert [sorted(epoch) for epoch in epochs] == [list(range(BATCHES))] * 4
    assert len(set(map(tuple, epochs))) == 4
    assert [row["dynamic_sampling/epochs"] for row in rows] == [step / 2 for step in range(1, 9)]


def test_a_run_with_refills_has_as_many_steps_as_one_without(service, tmp_path):
    rows = run(service, tmp_path, dataset_builder=Builder(constant_every=4), num_epochs=2)
    assert len(rows) == 2 * BATCHES
    assert len(REQUESTED) == 3 * 2 * BATCHES


def test_a_problem_that_comes_again_is_sampled_with_other_random_numbers(service, tmp_path):
    """With one batch, every refill has the same problems."""
    builder = Builder(constant_every=3, batches=1)
    [row] = run(service, tmp_path, dataset_builder=builder)
    assert sampled(row) == {"mixed": 3, "missing": 1, "unused": 0, "refills": 2}
    assert service.operations.count("sample") == len(service.seeds) == 3 * GROUPS * MIXED_SIZE


@pytest.mark.parametrize("options", [{}, {"async_config": AsyncConfig(max_steps_off_policy=1)}])
def test_the_same_seed_gives_the_same_run(tokenizer, tmp_path, options):
    runs = []
    for name in "ab":
        service = FakeService(tokenizer)
        generator = iter(range(10**6))
        service.delay = lambda tokens, seed, g=generator, n=name: (
            (next(g) * 7 % 5) * (n == "b") / 1e3
        )
        rows = run(service, tmp_path / name, **options)
        runs.append((service.clients[-1].weights, [sampled(row) for row in rows]))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) == BATCHES


def test_a_killed_run_resumes_to_the_same_result(tokenizer, tmp_path):
    run(whole := FakeService(tokenizer), tmp_path / "whole")
    for die_at in (len(whole.operations) // 3, len(whole.operations) * 2 // 3):
        service = FakeService(tokenizer, die_at=die_at)
        with suppress(Killed):
            run(service, tmp_path / f"{die_at}")
        service.die_at = None
        rows = run(service, tmp_path / f"{die_at}")
        assert [row["step"] for row in rows] == list(range(BATCHES))
        assert service.clients[-1].weights == whole.clients[-1].weights


def test_a_resumed_run_continues_with_the_next_batches(tokenizer, tmp_path):
    """Two steps with one refill each have used the batches 0 to 3."""
    service = FakeService(tokenizer)
    run(service, tmp_path, max_steps=2, lr_schedule="constant")
    assert REQUESTED == [0, 1, 2, 3]
    run(service, tmp_path, max_steps=3, lr_schedule="constant")
    assert REQUESTED == [4, 5]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 3), st.data())
def test_a_resumed_run_has_the_batches_of_an_undisturbed_one(refills, lag, data):
    """`refills` has the number of refills of each step; the run stops within any step."""

    def batches_of_steps(order, begin, stop=None):
        started: dict[int, list[int]] = {}
        for step in range(begin, len(refills)):
            for index in range(begin + len(started), min(step + lag + 1, len(refills))):
                started[index] = [order.start_step()]
            started[step] += [order.refill() for _ in range(refills[step])]
            if step == stop:
                break
            order.finish_step()
        return started

    whole = batches_of_steps(BatchOrder(0), 0)
    used = sorted(index for indices in whole.values() for index in indices)
    assert used == list(range(len(used)))
    stop = data.draw(st.integers(0, len(refills) - 1))
    stopped = BatchOrder(0)
    batches_of_steps(stopped, 0, stop)
    extra = json.loads(json.dumps(stopped.checkpoint_fields()))
    record = CheckpointRecord("a", stop, "tinker://a", extra=extra)
    resumed = batches_of_steps(BatchOrder.from_checkpoint(record, stop), stop)
    assert resumed == {step: whole[step] for step in range(stop, len(refills))}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_refills": -1}, UserError, "max_refills=-1: give a whole number, 0 for none"),
        ({"min_mixed_groups": 0}, UserError, "min_mixed_groups=0: give a whole number of at least"),
        ({"max_refills": 0, "min_mixed_groups": 2}, UserError, "has no effect with max_refills=0"),
        ({"remove_constant_reward_groups": False}, UserError, "remove_constant_reward_groups=True"),
        (
            {"stream_minibatch_config": StreamMinibatchConfig(num_minibatches=2)},
            UnsupportedError,
            "exclude each other",
        ),
    ],
)
def test_contradicting_options_are_rejected(service, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        run(service, tmp_path, **options)
