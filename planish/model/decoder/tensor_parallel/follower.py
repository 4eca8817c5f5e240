"""The process of one rank of tensor parallelism above 0: it obeys the commands of rank 0."""

from __future__ import annotations

import gc
import os
import pickle
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.decoder.decoder import Decoder
from planish.model.decoder.tensor_parallel.collectives import Collectives, connect
from planish.model.decoder.tensor_parallel.decoder import own_token_logits, weight_bytes
from planish.model.decoder.tensor_parallel.follower_cache import FollowerCache
from planish.model.decoder.tensor_parallel.group import FollowerOptions, FollowerReport
from planish.model.decoder.tensor_parallel.shards import ShardedWeights, shard_config
from planish.model.device import Device, accumulate_in_float32
from planish.model.layers.lora import AdapterRange, LoraLayout, LoraWeights
from planish.model.sequences.kv_cache import KVChunk
from planish.model.sources.weights import load_weights
from planish.types import LoraConfig


class Follower:
    """One rank's part of a base model and of its adapters.

    The methods without an underscore are the commands of rank 0, and those of `cache` too. Objects
    are known by the numbers that rank 0 gives them.
    """

    def __init__(self, options: FollowerOptions, decoder: Decoder) -> None:
        self._decoder, self._backend = decoder, decoder.backend
        self._rank = options.shard.rank
        self._device = decoder.device
        self._objects: dict[int, LoraWeights | KVChunk] = {}
        self.cache = FollowerCache(self._backend, self._objects)
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
        attend = self.cache.attention(*attention)
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
                target = follower.cache if hasattr(follower.cache, name) else follower
                getattr(target, name)(*args)


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
