"""The choice of the replica for a sampling request.

A replica that has computed the beginning of a prompt has it in its prefix cache. The table here
remembers which replica got which prompts, in blocks of tokens. A request goes to the replica with
the least work, where the tokens of the prompt that are not cached there count as work. So a request
follows its prefix as long as that saves more than waiting costs, and a prefix that all prompts
share does not send all of them to one replica.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

_BLOCK_TOKENS = 64
_MAX_BLOCKS = 1 << 16
"""How many blocks the table remembers. The blocks that were not used for longest are dropped."""


class PrefixTable:
    """The replicas that have computed the blocks of earlier prompts."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[int, set[int]] = OrderedDict()

    def choose(
        self,
        tokens: Sequence[int],
        version: Hashable,
        num_new_tokens: int,
        loads: Mapping[int, int],
    ) -> tuple[int, int]:
        """Return the replica for a request, and the work that the request adds there, in tokens.

        `loads` has the unfinished work of each replica that may be chosen. `num_new_tokens`: the
        number of tokens that the request may sample. Of equal replicas, the first is chosen.
        """
        blocks = _block_hashes(tokens, version)
        cached, holders = dict.fromkeys(loads, 0), set(loads)
        for index, block in enumerate(blocks, 1):
            holders &= self._replicas.get(block, set())
            if not holders:
                break
            cached.update(dict.fromkeys(holders, index * _BLOCK_TOKENS))
        replica = min(loads, key=lambda replica: loads[replica] - cached[replica])
        for block in blocks:
            self._replicas.setdefault(block, set()).add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > _MAX_BLOCKS:
            self._replicas.popitem(last=False)
        return replica, len(tokens) - cached[replica] + num_new_tokens

    def forget(self, replica: int) -> None:
        """Forget a replica whose cache is gone."""
        for replicas in self._replicas.values():
            replicas.discard(replica)


def _block_hashes(tokens: Sequence[int], version: Hashable) -> list[int]:
    """Return a hash of each complete block with everything before it."""
    hashes, value = [], hash(version)
    for start in range(0, len(tokens) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        value = hash((value, *tokens[start : start + _BLOCK_TOKENS]))
        hashes.append(value)
    return hashes
