"""The sums and broadcasts among the ranks of tensor parallelism.

Partial sums are gathered and added in the order of the ranks, in float32, and rounded once. So every
rank gets the same bits, and the result of a row does not depend on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planish.model.decoder.tensor_parallel.shards import Shard

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for the others. All ranks do equal work, so they arrive together."""


def connect(shard: Shard, store_file: Path, backend: str) -> dist.ProcessGroup:
    """Return the process group of all ranks. Each of them must call this function.

    `store_file`: a file on this machine that does not exist yet. `backend`: "gloo" or "nccl". The
    group is not torch's default group, which the caller's program may use for itself.
    """
    # torch's types do not declare these classes completely.
    torch_dist: Any = dist
    store = torch_dist.FileStore(str(store_file), shard.num_shards)
    if backend == "nccl":
        nccl = torch_dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = TIMEOUT
        return nccl(store, shard.rank, shard.num_shards, options)
    gloo = torch_dist.ProcessGroupGloo
    options = gloo._Options()
    # Only this machine can reach the group's sockets.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    options._threads = 1
    return gloo(store, shard.rank, shard.num_shards, options)


@dataclass(frozen=True)
class Collectives:
    """The sums and broadcasts of one rank. All ranks must call the same methods in one order."""

    shard: Shard
    group: dist.ProcessGroup
    guard: Callable[[Exception], Exception] = lambda error: error
    """Maps the error of a failed collective to the error to raise."""

    def _run(self, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait()
        except Exception as error:
            raise self.guard(error) from error

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks. Their shapes and dtypes must be equal."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.num_shards)]
        # The bytes, because gloo does not support every dtype.
        data, outputs = _bytes(x), [_bytes(part) for part in parts]
        self._run(lambda: self.group.allgather([outputs], [data]))
        return parts

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, in their dtype."""
        wide_dtype = torch.promote_types(x.dtype, torch.float32)
        first, *others = (part.to(wide_dtype) for part in self.gather(x))
        for other in others:
            first = first + other
        return first.to(x.dtype)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's tensor. `x`: that tensor on rank 0, and one of its shape elsewhere."""
        x = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        data = _bytes(x)
        self._run(lambda: self.group.broadcast([data], options))
        return x

    def scatter(self, out: Tensor, parts: Sequence[Tensor] = ()) -> Tensor:
        """Fill `out` with this rank's part of rank 0's `parts`, and return it."""
        options = dist.ScatterOptions()
        options.rootRank = 0
        inputs = [[_bytes(part) for part in parts]] if parts else []
        data = _bytes(out)
        self._run(lambda: self.group.scatter([data], inputs, options))
        return out

    # Operations of the decoder

    def embed(self, embedding: Tensor, tokens: Tensor) -> Tensor:
        """Return the embeddings [T, D] of `tokens`. `embedding`: this rank's rows [V / n, D]."""
        index, is_own = self.own_tokens(tokens, len(embedding))
        return self.sum(embedding[index] * is_own.unsqueeze(1))

    def own_tokens(self, tokens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return each token's row in this rank's part of the vocabulary, and whether it is there.

        `num_rows`: the number of rows of this part. The row of a token elsewhere is any row.
        """
        index = tokens - self.shard.rank * num_rows
        return index.clamp(0, num_rows - 1), (index >= 0) & (index < num_rows)

    def column_input(self, x: Tensor) -> Tensor:
        """Return `x`, the input of column shards. Its gradient is the sum of the ranks' ones."""
        return _ColumnInput.apply(self, x) if torch.is_grad_enabled() else x  # type: ignore[no-any-return]

    def row_output(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' outputs of row shards, with the same gradient on each."""
        return _RowOutput.apply(self, x)  # type: ignore[no-any-return]


class _ColumnInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, collectives: Collectives, x: Tensor) -> Tensor:
        ctx.collectives = collectives
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, ctx.collectives.sum(grad)


class _RowOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, collectives: Collectives, x: Tensor) -> Tensor:
        return collectives.sum(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, grad


def _bytes(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return x.detach().view(-1).view(torch.uint8)
