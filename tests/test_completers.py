"""TinkerTokenCompleter, the policy that RL rollouts and evaluations sample from."""

import asyncio

import numpy as np
import pytest

from planish.completers import TinkerTokenCompleter
from planish.errors import UserError
from planish.types import Constraint, ModelInput, SampledSequence, SampleResponse, SamplingParams

WORDS = Constraint("choice", choices=["yes", "no"])


class RecordingSampler:
    """Answers every request with one token and keeps its parameters."""

    def __init__(self) -> None:
        self.params: list[SamplingParams] = []

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        self.params.append(sampling_params)
        one = SampledSequence("stop", "id", np.zeros(1, np.int32), np.zeros(1, np.float32))
        return SampleResponse([one])


def test_a_policy_takes_a_constraint_only_with_its_own_consent():
    sampler = RecordingSampler()
    with pytest.raises(UserError, match="allow_off_policy=True"):
        TinkerTokenCompleter(sampler, 8, constraint=WORDS)
    policy = TinkerTokenCompleter(sampler, 8, constraint=WORDS, allow_off_policy=True)
    asyncio.run(policy(ModelInput.from_ints([1]), []))
    asyncio.run(policy.seeded(3)(ModelInput.from_ints([1]), []))
    asyncio.run(TinkerTokenCompleter(sampler, 8)(ModelInput.from_ints([1]), []))
    assert [params.constraint for params in sampler.params] == [WORDS, WORDS, None]
    assert sampler.params[1].seed is not None
