"""vLLM itself as the sampler: `make test-vllm` installs it and runs this file."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from short_datum import STEP, datum

from planish import ModelInput, SamplingParams, ServiceClient
from planish.fleet.vllm.options import VllmSampler
from planish.model.sources.resolve import DEFAULT_MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPT = ModelInput.from_ints([504, 3575, 282, 4649, 314])
SERVER_ARGUMENTS = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16")


def vllm_processes(python: str) -> list[str]:
    """Return the command lines of the vLLM servers that run with an interpreter."""
    lines: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            lines.append(file.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if line.startswith(f"{python} -m vllm.entrypoints")]


def test_logprobs_of_trained_adapters(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    python = os.environ.get("PLANISH_VLLM_PYTHON", sys.executable)
    sampler = VllmSampler(python=python, arguments=SERVER_ARGUMENTS)
    with ServiceClient(data_dir=tmp_path, sampler=sampler) as client:
        training_client = client.create_lora_training_client(DEFAULT_MODEL, rank=4, seed=1)
        training_client.forward_backward([datum()], "cross_entropy").result()
        training_client.optim_step(STEP).result()
        policy = training_client.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=8, seed=1, stop=[])
        response = policy.sample(PROMPT, 2, params).result()
        gaps = []
        for sequence in response.sequences:
            tokens = PROMPT.to_ints() + sequence.tokens
            scores = policy.compute_logprobs(ModelInput.from_ints(tokens)).result()[5:]
            gaps += [abs(float(a or 0) - b) for a, b in zip(scores, sequence.logprobs, strict=True)]
        # vLLM adds in another order, so an exact 0 would mean that the engine has sampled.
        assert 0 < sum(gaps) / len(gaps) < 0.1
        assert vllm_processes(python)
    assert not vllm_processes(python)
