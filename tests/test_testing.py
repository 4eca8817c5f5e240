from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.testing import VOCAB_SIZE, tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def logits(directory):
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    model, loading = loaded
    assert not any(loading.values()), loading
    with torch.no_grad():
        return model(torch.arange(64)[None]).logits[0]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"tied": False, "dtype": "bfloat16", "shards": 3, "rope_scaling": LLAMA3, "head_dim": 32}],
)
def test_transformers_loads_it_and_its_logits_differ(tmp_path, family, options):
    scores = logits(tiny_model(tmp_path, family, **options))
    assert scores.shape == (64, VOCAB_SIZE)
    assert scores.dtype == (torch.bfloat16 if options else torch.float32)
    assert scores.float().std(dim=-1).min() > 0.5
    assert len(set(scores.argmax(-1).tolist())) > 10


def test_the_seed_decides(tmp_path):
    one, same, other = (
        logits(tiny_model(tmp_path / str(i), seed=seed)) for i, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


@pytest.mark.parametrize(
    "options", [{"family": "gpt2"}, {"dtype": "int8"}, {"vocab_size": 256}, {"shards": 0}]
)
def test_invalid_options_are_rejected(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        tiny_model(tmp_path, **options)
