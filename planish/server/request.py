"""One request of a client: its row in the journal, its operation and its answer.

Operations and results are stored in the encoding of the wire protocol (planish/wire/operations.py).
An operation has the same encoding whether it arrived as JSON or as protobuf, so a repeated request
has the same digest. A seed that the server chose is part of the stored body, but not of the digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from planish.errors import is_out_of_memory
from planish.server.durable.journal import RequestRow
from planish.server.durable.store import Transaction
from planish.server.results import OUT_OF_MEMORY, BadRequest, Category, Done, Failed, Tenant
from planish.service import CreateModel, ForwardBackward, Operation, Sample
from planish.wire.client_errors import error_class_name
from planish.wire.operations import operation_kind, operation_to_bytes, result_to_bytes
from planish.wire.sampling import target_count

R = TypeVar("R")

_MAX_INLINE_TOKENS = 4096
"""Requests with more tokens than this are encoded in a thread."""
_SEED_BITS = 62
_SEEDED_KINDS = ("create_model", "sample")
"""Kinds whose stored bodies may contain a seed from the server. Their digests do not include it."""

TransactionHook = Callable[[Transaction], None]
"""A function that adds further changes to the transaction that writes a request or an answer."""
SettledState = Literal["done", "failed", "refused"]
"""The state of an answered request; "refused" if it was rejected and never ran (schema.py)."""


@dataclass(frozen=True)
class EncodedOperation:
    """The operation of one request, encoded for the journal."""

    kind: str
    body: bytes
    digest: bytes
    operation: Operation[Any]
    """The operation with the seed that it will run with."""


@dataclass(eq=False)
class Request:
    """A request that is unanswered, or whose answer is not on disk yet."""

    row: RequestRow
    operation: Operation[Any] | None
    """The decoded operation; None if it must be read from the journal, or is not needed anymore."""
    body: bytes = b""
    """The encoded operation until it is in the journal."""
    answer: asyncio.Future[Done | Failed] = field(default_factory=asyncio.Future[Done | Failed])
    """Done when the answer may be sent to the client."""
    journaled: asyncio.Future[None] = field(default_factory=asyncio.Future[None])
    """Done when the request is in the journal. It has an exception if that failed."""
    num_input_tokens: int = 0
    """The number of input tokens of the operation (see `input_token_count`)."""
    num_sequences: int = 0
    """The number of sequences that a sample request generates. It is 0 for other requests, and for
    a request of an earlier process until its operation is read.
    """
    num_lost_replicas: int = 0
    """How often a replica was lost while this was the first unanswered request of its model."""
    begun: float | None = None
    """When the request's turn came, in seconds since 1970; None until then."""
    answer_written: asyncio.Future[None] | None = None
    """Done when the answer is on disk."""

    @classmethod
    def rejected(cls, tenant: Tenant, owner: str, seq: int, kind: str, error: Exception) -> Request:
        """Return a request that uses up its number and never runs, because of `error`."""
        row = RequestRow(
            id=f"{owner}:{seq}",
            tenant=tenant.name,
            kind=kind,
            owner=owner,
            seq=seq,
            state="refused",
            digest=None,
            accepted=time.time(),
            message=str(error),
            category="user",
            error_class=error_class_name(error),
        )
        return cls(row, None)

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.row.id

    @property
    def seq(self) -> int:
        """The sequence number of the request."""
        return self.row.seq

    def set_counts(self, operation: Operation[Any]) -> None:
        """Set `num_input_tokens` and `num_sequences` from the operation."""
        self.num_input_tokens = input_token_count(operation)
        self.num_sequences = operation.num_samples if isinstance(operation, Sample) else 0


def input_token_count(operation: Operation[Any]) -> int:
    """Return the number of input tokens of an operation. Sampled tokens are not counted, because
    their number is not known in advance.
    """
    match operation:
        case ForwardBackward():
            return operation.num_tokens
        case Sample():
            return operation.prompt.max_length
        case _:
            return 0


def check_same_request(row: RequestRow, digest: bytes | None) -> None:
    """Raise BadRequest if the request in `row` has another digest, or was rejected."""
    if row.was_rejected_on_arrival:
        raise BadRequest(row.message or "the request with this number was rejected")
    if row.digest != digest:
        raise BadRequest(
            f"seq_id={row.seq} has already been used by a different request of {row.owner!r}; "
            "continue with the next sequence number"
        )


def encoded_request(
    tenant: Tenant,
    owner: str,
    seq: int,
    operation: Operation[Any],
    request_id: str | None = None,
) -> Awaitable[Request]:
    """Return a new request to the model or sampler with the id `owner`. Large operations are
    encoded in a thread. Raise ValueError if the operation is invalid.
    """
    row = RequestRow(
        id=request_id or f"{owner}:{seq}",
        tenant=tenant.name,
        kind=operation_kind(operation),
        owner=owner,
        seq=seq,
        state="accepted",
        digest=None,
        accepted=time.time(),
    )
    request = Request(row, operation)

    def encode() -> Request:
        encoded = encode_operation(operation, seq)
        request.operation, request.body = encoded.operation, encoded.body
        request.row = replace(row, digest=encoded.digest, body_bytes=len(encoded.body))
        request.set_counts(encoded.operation)
        return request

    # Datums without tokens take time too, so every ForwardBackward is encoded in a thread.
    if not isinstance(operation, ForwardBackward):
        num_targets = target_count(operation) if isinstance(operation, Sample) else 0
        if input_token_count(operation) + num_targets <= _MAX_INLINE_TOKENS:
            return completed(encode())
    return asyncio.to_thread(encode)


def encode_operation(operation: Operation[Any], seq_id: int) -> EncodedOperation:
    """Encode an operation. The time is proportional to its size, so encode large operations in a
    thread.
    """
    kind, body = operation_kind(operation), _operation_to_bytes(operation, seq_id)
    digest = _digest(kind, body)
    seeded = _with_seed(operation)
    if seeded is not operation:
        body = _operation_to_bytes(seeded, seq_id)
    return EncodedOperation(kind, body, digest, seeded)


def is_unaltered(kind: str, body: bytes, digest: bytes | None) -> bool:
    """Return whether a body still has the digest of its journal row. A body that may contain a seed
    from the server cannot be checked, and counts as unchanged.
    """
    return kind in _SEEDED_KINDS or digest is None or _digest(kind, body) == digest


def _digest(kind: str, body: bytes) -> bytes:
    return hashlib.blake2b(kind.encode() + body, digest_size=16).digest()


def _with_seed(operation: Operation[Any]) -> Operation[Any]:
    """Return the operation with a random seed if it needs a seed and has none. The seed is
    journaled. So if the request runs again after a crash, it samples the same tokens, or
    initializes the adapter with the same weights.
    """
    match operation:
        case Sample(sampling_params=params) if params.seed is None:
            return replace(
                operation, sampling_params=replace(params, seed=secrets.randbits(_SEED_BITS))
            )
        case CreateModel(lora=lora, from_path=None) if lora.seed is None:
            return replace(operation, lora=replace(lora, seed=secrets.randbits(_SEED_BITS)))
        case _:
            return operation


def _operation_to_bytes(operation: Operation[Any], seq_id: int) -> bytes:
    # A seq_id can exceed the 32 bits of the protobuf field. The row stores the real number, so the
    # message always contains 1.
    return operation_to_bytes(operation, 1 if isinstance(operation, ForwardBackward) else seq_id)


def done_from_result(operation: Operation[Any], result: Any) -> Done:
    """Encode the result of an operation."""
    return done_from_bytes(operation_kind(operation), result_to_bytes(operation, result))


def done_from_bytes(kind: str, content: bytes) -> Done:
    """Return the Done for the encoded result of a request of this kind."""
    media = "protobuf" if kind in ("forward", "forward_backward", "sample") else "json"
    return Done("save_weights_for_sampler" if kind == "publish_sampler" else kind, media, content)


def failed_from_error(error: Exception) -> Failed:
    """Return the answer that reports an error to the client."""
    category: Category = "user" if isinstance(error, ValueError) else "server"
    message = str(error)
    if is_out_of_memory(error):
        message = f"{OUT_OF_MEMORY} ({message})" if message else OUT_OF_MEMORY
    message = "\n".join([message or type(error).__name__, *getattr(error, "__notes__", ())])
    return Failed(message, category, error_class_name(error))


def completed(result: R) -> asyncio.Future[R]:
    """Return a future that is done."""
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


async def run_uncancelled(work: Coroutine[Any, Any, R]) -> R:
    """Await `work`, which continues even if the caller is cancelled. Otherwise a cancellation could
    leave a request in the journal that is never queued.
    """
    return await asyncio.shield(asyncio.create_task(work))
