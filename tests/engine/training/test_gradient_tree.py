"""The sum of gradients does not depend on who adds which part, or when."""

import itertools

import pytest
import torch

from planish.engine.training.gradient_tree import GradientTree


def leaves(count: int) -> list[torch.Tensor]:
    """Return float32 vectors whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(64, generator=generator) * 10.0 ** (index % 5) for index in range(count)]


def total(grads: list[torch.Tensor], ranges: list[range]) -> torch.Tensor:
    """Add up each range in a tree of its own, and these sums in one tree."""
    tree = GradientTree(len(grads))
    for indices in ranges:
        part = GradientTree(len(grads))
        for index in indices:
            part.add_leaf(index, grads[index].clone())
        for node, grad in part.nodes.items():
            tree.add(node, grad)
    result = tree.total()
    assert result is not None
    return result


def pairwise_sum(grads: list[torch.Tensor]) -> torch.Tensor:
    """Add siblings level by level; the last of an odd number moves up unchanged."""
    while len(grads) > 1:
        grads = [
            grads[i] + grads[i + 1] if i + 1 < len(grads) else grads[i]
            for i in range(0, len(grads), 2)
        ]
    return grads[0]


@pytest.mark.parametrize("count", range(1, 14))
def test_every_division_into_ranges_has_the_bits_of_the_pairwise_sum(count):
    grads = leaves(count)
    expected = pairwise_sum(grads)
    for cuts in itertools.combinations(range(1, count), min(2, count - 1)):
        borders = [0, *cuts, count]
        ranges = [range(a, b) for a, b in itertools.pairwise(borders)]
        for order in (ranges, ranges[::-1]):
            assert torch.equal(total(grads, order), expected)


def test_the_sum_from_left_to_right_has_other_bits():
    grads = leaves(8)
    in_sequence = grads[0].clone()
    for grad in grads[1:]:
        in_sequence += grad
    assert not torch.equal(total(grads, [range(8)]), in_sequence)


def test_few_gradients_are_in_memory_at_a_time():
    tree = GradientTree(64)
    for index in range(64):
        tree.add_leaf(index, torch.ones(1))
        assert len(tree.nodes) <= 6
    assert tree.total() == 64
    assert GradientTree(3).total() is None
