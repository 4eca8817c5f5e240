"""Steps whose advantages are all zero leave the weights as they are."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import chz
import numpy as np
import pytest
from digest_service import FakeService
from digit_env import DigitGroup, Digits, DigitsBuilder

from planish.files import read_rows
from planish.rl.data_processing import TrainingSequence
from planish.rl.kl import AdvantageShaping
from planish.training.rl_config import Config, KLReferenceConfig, StreamMinibatchConfig
from planish.training.train_rl import main, train

GROUPS = 4


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    monkeypatch.setattr("planish.training.run_loop.code_diff", lambda paths: "")


class ConstantInSecondBatch(Digits):
    """Digits with equal rewards in all groups of batch 1, and in the first `constant_every` groups
    of every batch.
    """

    def _group(self, number: int):
        is_constant = GROUPS <= number < 2 * GROUPS or number % GROUPS < self.constant_every
        return DigitGroup(number, tag="constant" if is_constant else "digits")


@chz.chz
class Builder(DigitsBuilder):
    async def __call__(self):
        return ConstantInSecondBatch(3, GROUPS, constant_every=self.constant_every), None


def config_of(path, **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": Builder(),
        "model_name": "tiny",
        "max_tokens": 8,
        "log_path": str(path),
        "save_every": 0,
        "eval_every": 0,
        "num_groups_to_log": 0,
        "rollout_json_export": False,
        "compute_post_kl": True,
        **changes,
    }
    return Config(**options)


def run(service, path, **changes):
    asyncio.run(main(config_of(path, **changes), service))
    return read_rows(path / "metrics.jsonl")


@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "dro"])
def test_a_step_without_a_mixed_group_makes_no_optimizer_step(service, tmp_path, removes, loss_fn):
    rows = run(service, tmp_path, remove_constant_reward_groups=removes, loss_fn=loss_fn)
    assert service.operations.count("optim_step") == 2
    assert [row.get("optim/adam_step") for row in rows] == [1.0, None, 2.0]
    for name in ("optim/grad_norm", "optim/kl_sample_train_v2", "kl_pre_post_v2"):
        assert [name in row for row in rows] == [True, False, True]
    assert ("optim/entropy" in rows[1]) is not removes
    assert [row["tokens/trained"] > 0 for row in rows] == [True, False, True]


def test_a_substep_without_a_mixed_group_makes_no_optimizer_step(service, tmp_path):
    """The first two of four groups are constant, so the first of two substeps is."""
    run(service, tmp_path, num_substeps=2, dataset_builder=Builder(constant_every=2))
    assert service.operations.count("optim_step") == 2
    assert service.clients[-1].calls == [2 * 4, 2 * 4]


def test_a_minibatch_without_a_mixed_group_is_not_submitted(service, tmp_path):
    streaming = StreamMinibatchConfig(num_minibatches=2)
    run(
        service,
        tmp_path,
        stream_minibatch_config=streaming,
        dataset_builder=Builder(constant_every=2),
    )
    assert service.operations.count("optim_step") == 2
    assert service.clients[-1].calls == [2 * 4, 2 * 4]


def test_the_kl_penalty_trains_on_groups_of_equal_rewards(service, tmp_path):
    rows = run(
        service,
        tmp_path,
        kl_penalty_coef=0.1,
        kl_reference_config=KLReferenceConfig(base_model="tiny"),
    )
    assert [row["optim/adam_step"] for row in rows] == [1.0, 2.0, 3.0]


class Removing(AdvantageShaping):
    """Sets all advantages to zero."""

    timing_name = "removing"

    async def __call__(self, data_D: Sequence[TrainingSequence]):
        return [sequence.with_advantages(np.zeros(len(sequence.mask_N))) for sequence in data_D], {}


def test_advantages_count_after_shaping(tokenizer, tmp_path):
    service = FakeService(tokenizer)
    asyncio.run(train(config_of(tmp_path), cast(Any, service), Removing()))
    assert "optim_step" not in service.operations
