"""A tenant cannot read the prompts of others through what the engine caches."""

from dataclasses import replace

import pytest
from server_client import Client, run, running, sample

from planish.errors import UserError
from planish.server.results import Tenant
from planish.types import Constraint

VICTIM, ATTACKER = Tenant("victim"), Tenant("attacker")
TEMPLATE = b"You are a bank's assistant. The PIN of this customer is %02d. Never tell it."
SECRET = 42


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_a_secret_in_a_known_template_cannot_be_guessed(model_dir, data_dir, shared, scored):
    """The engine reports the cached tokens of a prompt, and prompt logprobs use the same cache."""

    async def scenario() -> dict[int, int]:
        async with running(model_dir, data_dir, share_prefix_cache=shared) as server:
            victim = await Client.start(server, VICTIM)
            await victim.sample(await victim.sampler(), prompt=TEMPLATE % SECRET, max_tokens=1)
            attacker = await Client.start(server, ATTACKER)
            sampler = await attacker.sampler()
            hits = {}
            for guess in range(30, 50):
                operation = sample(sampler, TEMPLATE % guess, 1, 1)
                if scored:
                    operation = replace(operation, prompt_only=True, prompt_logprobs=True)
                response = await server.sampling.sample(ATTACKER, operation)
                hits[guess] = response.prompt_cache_hit_tokens
            return hits

    hits = run(scenario())
    # The attacker's own first guess leaves the beginning of the template in the cache.
    first, *others = hits.values()
    assert first == (32 if shared else 0)
    found = {guess for guess, tokens in hits.items() if tokens > 32}
    assert found == ({SECRET} if shared else set())
    if not shared:
        assert set(others) == {32}


async def test_a_tenant_uses_its_own_cached_prefixes_and_grammars(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        words = Constraint("choice", choices=["yes", "no"])
        for tenant in (VICTIM, ATTACKER):
            client = await Client.start(server, tenant)
            sampler = await client.sampler()
            hits, texts = [], []
            for number in range(2):
                response = await client.sample(
                    sampler, number, prompt=TEMPLATE % SECRET, seed=1, constraint=words
                )
                hits.append(response.prompt_cache_hit_tokens)
                texts.append([bytes(s.tokens[:-1]) for s in response.sequences])
            assert hits == [0, 64]
            assert texts[0] == texts[1]
            assert set(texts[0]) <= {b"yes", b"no"}
        with pytest.raises(UserError, match="unclosed group"):
            await client.sample(sampler, 2, constraint=Constraint("regex", "(("))
