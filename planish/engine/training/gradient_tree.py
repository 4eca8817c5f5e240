"""The sum of the gradients of a call's micro-batches, in an order that depends on the call alone.

Floating-point addition is not associative, so the order of a sum decides its last bits. Here the
micro-batches 0 .. n - 1 are the leaves of a binary tree, and the gradients of two siblings are
added, left plus right. A node of level k covers 2**k leaves, and the last node of a level may cover
fewer. So any range of micro-batches can be summed elsewhere, as far as whole nodes lie in the
range, and the sum of all gradients has the same bits.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TreeNode:
    """A node of the tree over n leaves: the leaves index * 2**level .. (index + 1) * 2**level - 1,
    as far as there are so many.
    """

    level: int
    index: int

    @property
    def start(self) -> int:
        """The first leaf."""
        return self.index << self.level


class GradientTree:
    """The gradients of the nodes whose siblings are not there yet.

    At most about log2(n) gradients are in memory if they are added from left to right.
    """

    def __init__(self, num_leaves: int) -> None:
        self._num_leaves = num_leaves
        self.nodes: dict[TreeNode, Tensor] = {}
        """The sums so far."""

    def add_leaf(self, index: int, grad: Tensor) -> None:
        """Add the gradient of micro-batch `index`. The tree may change the tensor later."""
        self.add(TreeNode(0, index), grad)

    def add(self, node: TreeNode, grad: Tensor) -> None:
        """Add the gradient of a node, and add up siblings as far as possible."""
        while (1 << node.level) < self._num_leaves:
            sibling = TreeNode(node.level, node.index ^ 1)
            if node.index % 2 or sibling.start < self._num_leaves:
                other = self.nodes.pop(sibling, None)
                if other is None:
                    break
                grad = other.add_(grad) if node.index % 2 else grad.add_(other)
            node = TreeNode(node.level + 1, node.index // 2)
        self.nodes[node] = grad

    def total(self) -> Tensor | None:
        """Return the sum of all gradients, or None if there are none."""
        if not self.nodes:
            return None
        (grad,) = self.nodes.values()
        return grad
