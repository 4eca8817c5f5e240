import random

from planish.rl.environments.datasets import GeneratedDataset


def draws(seed, index):
    dataset = GeneratedDataset(random.Random.random, 4, seed)  # type: ignore[arg-type]
    return dataset.get_batch(index)


def test_every_group_has_its_own_draws():
    assert draws(0, 3) == draws(0, 3)
    drawn = [value for seed in range(2) for index in range(5) for value in draws(seed, index)]
    assert len(set(drawn)) == 40
