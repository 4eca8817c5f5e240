"""The hardware limit of a workload."""

import pytest
import torch
from limits import Limit, RowCounts, matmul_factories, random_matrix, seconds_for_rows

from planish.model.architecture.config import ModelConfig
from planish.testing import tiny_model


def round_spec(
    prompts: int, samples: int, new_tokens: int, prompt_tokens: int, shared: int
) -> dict[str, object]:
    tokens = [[0] * prompt_tokens for _ in range(prompts)]
    return {
        "prompts": tokens,
        "shared_tokens": shared,
        "samples": samples,
        "new_tokens": new_tokens,
    }


def test_what_is_shared_counts_once():
    counts = RowCounts.of(round_spec(16, 8, 64, 200, 120))
    assert counts.num_samples == 128
    assert counts.prompt_rows == 120 + 16 * 80
    assert counts.answer_rows == 128 * 63
    assert counts.scored_rows == 128 * 63 + 16


def test_the_best_tile_is_taken():
    asked = []

    def seconds(rows: int) -> float:
        asked.append(rows)
        return 1.0 if rows == 1024 else 2.0

    assert seconds_for_rows(4096, seconds) == pytest.approx(4.0)
    assert asked == [512, 1024, 2048]
    assert seconds_for_rows(100, lambda rows: rows / 100) == pytest.approx(1.0)


def test_all_ways_make_the_same_product():
    weight, x = random_matrix(48, 32), random_matrix(16, 32)
    plain, prepacked = (way(weight)(x) for way in matmul_factories(weight, 16, None))
    torch.testing.assert_close(plain, prepacked)
    torch.testing.assert_close(plain.float(), x.float() @ weight.float().t(), rtol=2e-2, atol=1e-4)


def test_every_work_has_a_limit(tmp_path):
    limit = Limit(ModelConfig.from_directory(tiny_model(tmp_path / "model")))
    few, many = round_spec(2, 2, 3, 20, 10), round_spec(2, 2, 30, 20, 10)
    with torch.inference_mode():
        assert 0 < limit.rollouts(few) < limit.rollouts(many)
        assert limit.training(few) > 0
        assert limit.iteration(few) > 0
