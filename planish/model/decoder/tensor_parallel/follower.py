"""The process of one rank of tensor parallelism above 0: it obeys the commands of rank 0."""

from __future__ import annotations

import gc
import os
import pickle
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.decoder.decoder import Decoder
from planish.model.decoder.tensor_parallel.collectives import Collectives, connect
from planish.model.decoder.tensor_parallel.decoder import own_token_logits, weight_bytes
from planish.model.decoder.tensor_parallel.group import FollowerOptions, FollowerReport
from planish.model.decoder.tensor_parallel.shards import ShardedWeights, shard_config
from planish.model.device import Device, accumulate_in_float32
from planish.model.kernels.interface.parts import Attend
from planish.model.layers.lora import AdapterRange, LoraLayout, LoraWeights
from planish.model.sequences.kv_cache import KVChunk, KVPool, KVPools, PrefillSpan, SlotOwner
from planish.model.sources.weights import load_weights
from planish.types import LoraConfig


@dataclass(eq=False)
class _Owner:
    """A prompt or a sample of rank 0 with a slot in the KV cache."""

    length: int
    prompt: _Owner | None
    slot: int = -1
    stored: int = 0


class Follower:
    """One rank's part of a base model, of its adapters and of the KV cache.

    The methods without an underscore are the commands of rank 0. Objects are known by the numbers
    that rank 0 gives them.
    """

    def __init__(self, options: FollowerOptions, decoder: Decoder) -> None:
        self._decoder, self._backend = decoder, decoder.backend
        self._rank = options.shard.rank
        self._device = decoder.device
        self._pools: dict[int, KVPool] = {}
        self._owners: dict[int, _Owner] = {}
        self._objects: dict[int, LoraWeights | KVChunk] = {}
        self._hidden: Tensor | None = None

    @property
    def _collectives(self) -> Collectives:
        collectives = self._decoder.collectives
        assert collectives is not None
        return collectives

    # Adapters

    def add_adapter(
        self, number: int, lora: LoraConfig, parts: Sequence[np.ndarray], requires_grad: bool
    ) -> None:
        """Keep this rank's part of a version of an adapter."""
        layout = LoraLayout(self._decoder.config, lora, has_head=False)
        master = torch.from_numpy(parts[self._rank - 1])
        self._objects[number] = LoraWeights(layout, master, self._backend, requires_grad)

    def drop(self, number: int) -> None:
        """Free an adapter, or keys and values of the prefix cache."""
        self._objects.pop(number, None)

    def end_training(self, number: int) -> None:
        """See `LoraWeights`."""
        self._adapter(number).end_training()

    def collect_grad(self, number: int) -> None:
        """Send the gradient of an adapter to rank 0."""
        self._hidden = None
        adapter = self._adapter(number)
        if adapter.layout.size:
            self._collectives.gather(adapter.collect_grad())

    def drop_grad(self, number: int) -> None:
        """See `LoraWeights`."""
        self._hidden = None
        self._adapter(number).drop_grad()

    def _adapter(self, number: int) -> LoraWeights:
        adapter = self._objects[number]
        assert isinstance(adapter, LoraWeights)
        return adapter

    # The KV cache

    def create_pool(self, number: int, capacity: int) -> None:
        """Create a pool of KV cache slots."""
        self._pools[number] = self._backend.pool_class(self._backend.kv_spec, capacity)

    def drop_pool(self, number: int) -> None:
        """Free a pool."""
        self._pools.pop(number, None)

    def ensure_free_slots(self, number: int, additional: int) -> None:
        """See `KVPool`."""
        self._pools[number].ensure_free_slots(additional)

    def allocate(self, number: int, owner: int, length: int, prompt: int | None) -> None:
        """Assign a slot to a new owner."""
        new_owner = _Owner(length, None if prompt is None else self._owners[prompt])
        self._owners[owner] = new_owner
        self._pools[number].allocate(new_owner)

    def free(self, number: int, owners: Sequence[int]) -> None:
        """See `KVPool`."""
        self._pools[number].free(*(self._owners.pop(owner) for owner in owners))

    def trim(self, number: int) -> None:
        """See `KVPool`."""
        self._pools[number].trim()

    def move(self, number: int, owners: Sequence[int], target: int) -> None:
        """See `KVPool`."""
        self._pools[number].move([self._owners[owner] for owner in owners], self._pools[target])

    def read(self, number: int, slot: int, start: int, stop: int, chunk: int) -> None:
        """Keep a copy of the keys and values of some positions."""
        self._objects[chunk] = self._pools[number].read(slot, start, stop)

    def write(self, number: int, slot: int, chunks: Sequence[int]) -> None:
        """See `KVPool`."""
        found = [self._objects[chunk] for chunk in chunks]
        self._pools[number].write(slot, [chunk for chunk in found if isinstance(chunk, KVChunk)])

    def copy_from(self, number: int, source: int, *args: Any) -> None:
        """See `KVPool`."""
        self._pools[number].copy_from(self._pools[source], *args)

    # Passes

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        attention: tuple[Any, ...],
        adapters: int | Sequence[tuple[int, int, int | None]] | None,
        layers_per_checkpoint: int,
        has_grad: bool,
    ) -> None:
        """Run the decoder. `adapters`: one adapter for all rows, or those of ranges of rows."""
        self._hidden = None
        device = self._device
        if adapters is None or isinstance(adapters, int):
            weights = None if adapters is None else self._adapter(adapters)
        else:
            weights = self._backend.adapter_batch(
                [
                    AdapterRange(start, stop, None if number is None else self._adapter(number))
                    for start, stop, number in adapters
                ]
            )
        attend = getattr(self, f"_{attention[0]}_attention")(*attention[1:])
        with torch.set_grad_enabled(has_grad):
            hidden = self._decoder.forward(
                torch.tensor(tokens, device=device),
                torch.tensor(positions, device=device),
                attend,
                weights,
                layers_per_checkpoint=layers_per_checkpoint,
            )
        if hidden.requires_grad:
            self._hidden = hidden

    def _tree_attention(self, micro_batch: Any) -> Attend:
        return self._backend.tree_attention(micro_batch)

    def _prefill_attention(self, spans: Sequence[tuple[int, int, int, int, int]]) -> Attend:
        return self._backend.prefill_attention(
            [
                PrefillSpan(self._pools[pool], slot, row, start, count)
                for pool, slot, row, start, count in spans
            ]
        )

    def _decode_attention(
        self,
        samples: Sequence[tuple[int, int, int, int]],
        prompt_pools: Sequence[int],
        sample_pools: Sequence[int],
    ) -> Attend:
        first_rows: dict[SlotOwner, int] = {}
        row_counts: dict[SlotOwner, int] = {}
        for number, row, stored, count in samples:
            owner = self._owners[number]
            owner.stored = stored
            first_rows[owner], row_counts[owner] = row, count
        pools = self._pools_of(prompt_pools), self._pools_of(sample_pools)
        return self._backend.decode_attention(first_rows, pools[0], pools[1], row_counts)

    def _pools_of(self, numbers: Sequence[int]) -> KVPools:
        pools = KVPools(self._backend.kv_spec)
        found = (self._pools[number] for number in numbers)
        pools.pools = {pool.capacity: pool for pool in found}
        return pools

    def backward(self) -> None:
        """Run the backward pass of the last forward pass."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        hidden.backward(self._collectives.broadcast(torch.empty_like(hidden)))

    def base_logits(self, num_rows: int, training: bool) -> None:
        """Compute the logits of this rank's part of the vocabulary."""
        hidden = self._received_hidden(num_rows)
        logits = self._backend.base_logits(hidden, self._decoder.head, training=training)
        self._collectives.gather(logits)

    def token_logits(self, num_rows: int, rows: list[int], tokens: list[int]) -> None:
        """Compute single logits."""
        hidden, device = self._received_hidden(num_rows), self._device
        row_index, token_index = (
            torch.tensor(values, dtype=torch.int64, device=device) for values in (rows, tokens)
        )
        head, local = self._decoder.head, self._backend.parts.head
        own_token_logits(local, self._collectives, hidden, head, row_index, token_index)

    def logits_backward(self, num_rows: int) -> None:
        """Compute this rank's part of the gradient of the hidden states."""
        head = self._decoder.head
        size = (num_rows, head.sizes[0])
        grad = torch.empty(size, dtype=self._backend.dtype, device=self._device)
        self._collectives.sum(head.matmul_backward(self._collectives.scatter(grad)))

    def _received_hidden(self, num_rows: int) -> Tensor:
        size = (num_rows, self._decoder.config.hidden_size)
        return self._collectives.broadcast(
            torch.empty(size, dtype=self._backend.dtype, device=self._device)
        )


def _load(options: FollowerOptions) -> Decoder:
    torch.set_num_threads(options.num_threads)
    device = Device(options.device)
    device.make_current()
    if device.is_gpu:
        accumulate_in_float32()
    config = ModelConfig.from_directory(options.directory)
    local = shard_config(config, options.shard.num_shards)
    backend = options.make_backend(local, options.dtype, options.device, tiling=options.tiling)
    weights = ShardedWeights(load_weights(options.directory, config), options.shard)
    return Decoder(weights, backend)


def _run(connection: Connection) -> None:
    """Load this rank's part of the model, and obey commands until the connection is closed."""
    options = pickle.loads(connection.recv_bytes())
    try:
        decoder = _load(options)
    except Exception as error:
        report = FollowerReport("", 0, f"{type(error).__name__}: {error}")
        connection.send_bytes(pickle.dumps(report))
        raise
    report = FollowerReport(decoder.backend.name, weight_bytes(decoder))
    connection.send_bytes(pickle.dumps(report))
    group = connect(options.shard, options.store_file, options.backend)
    decoder.collectives = Collectives(options.shard, group)
    follower = Follower(options, decoder)
    gc.freeze()
    while True:
        for name, args in pickle.loads(connection.recv_bytes()):
            # A tensor of inference mode could take part in no backward pass.
            is_tracked = name in ("add_adapter", "backward") or (name == "forward" and args[-1])
            with torch.inference_mode(not is_tracked):
                getattr(follower, name)(*args)


def main(descriptor: int) -> None:
    """Run the process of a rank. `descriptor`: its socket to rank 0."""
    connection = Connection(descriptor)
    try:
        _run(connection)
    except (EOFError, ConnectionError):  # rank 0 has closed the connection, or has ended
        os._exit(0)
    except BaseException as error:
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
        traceback.print_exc()
        # Python would first wait for torch's threads, and the other ranks wait for this one.
        os._exit(1)
