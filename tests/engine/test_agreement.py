"""The comparison of sampled and trained logprobs when a model is loaded on a GPU."""

import logging
from pathlib import Path

import pytest
import torch
from backends import CPU, load_on

from planish.engine import base_models
from planish.engine.agreement import ROUNDING_DIFFERENCES, measure_difference, warn_of_difference
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.training.trainer import Trainer
from planish.model.decoder.base_decoder import BaseDecoder
from planish.testing import tiny_model


def decoder_of(directory: Path, **options) -> BaseDecoder:
    return load_on(tiny_model(directory, **options), torch.bfloat16, CPU)


def test_a_correct_decoder_is_not_warned_about(tmp_path, caplog):
    decoder = decoder_of(tmp_path)
    sampler = Sampler(decoder, SamplerSettings(), str)
    difference = warn_of_difference(decoder, sampler, Trainer(decoder))
    assert difference is not None
    assert difference <= ROUNDING_DIFFERENCES[torch.bfloat16]
    assert not caplog.records
    assert not sampler.busy


def test_a_trainer_with_other_weights_is_warned_about(tmp_path, caplog):
    sampled, trained = (decoder_of(tmp_path / str(seed), seed=seed) for seed in range(2))
    with caplog.at_level(logging.WARNING):
        difference = warn_of_difference(
            sampled, Sampler(sampled, SamplerSettings(), str), Trainer(trained)
        )
    assert difference is not None
    assert difference > 0.3
    [record] = caplog.records
    assert "more than rounding explains" in record.getMessage()
    assert "planish doctor --gpu-report" in record.getMessage()


@pytest.mark.parametrize("measure", [warn_of_difference, measure_difference])
def test_a_kv_cache_without_space_is_not_waited_for(tmp_path, measure):
    decoder = decoder_of(tmp_path)
    assert measure(decoder, Sampler(decoder, SamplerSettings(1000), str), Trainer(decoder)) is None


def test_the_adapter_of_a_mixture_of_experts_is_small(tmp_path):
    decoder = decoder_of(tmp_path, family="qwen3_moe", experts=16, experts_per_token=8)
    sampler = Sampler(decoder, SamplerSettings(), str)
    assert warn_of_difference(decoder, sampler, Trainer(decoder)) is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_load_on_a_gpu_measures_the_difference(tmp_path):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the GPU tests load models on the GPU")
    from pretended_gpu import pretended_gpu

    from planish.engine.memory import DeviceMemory
    from planish.engine.settings import EngineSettings

    directory = tiny_model(
        tmp_path, family="qwen3", layers=1, heads=2, kv_heads=1, hidden_size=32, intermediate=32
    )
    real = base_models.warn_of_difference
    with pytest.MonkeyPatch.context() as patch, pretended_gpu(patch):
        patch.setattr(base_models, "warn_of_difference", real)
        settings = EngineSettings(max_batch=4, kv_cache_bytes=1 << 24, prefix_cache_bytes=1 << 20)
        base = base_models.BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
        numerics = base.numerics()
    assert numerics.measured_difference is not None
    assert numerics.measured_difference <= ROUNDING_DIFFERENCES[torch.bfloat16]
    assert "logprobs of some tokens differ by at most" in numerics.summary
