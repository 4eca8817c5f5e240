"""The samplers of a fleet, and their requests, which any replica can answer."""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from planish.errors import UserError
from planish.fleet.futures import RemoteFuture, copy_outcome
from planish.fleet.link import ReplicaLostError
from planish.fleet.remote_engine import unknown_id
from planish.fleet.replica import Replica, SamplerSource, SharedVersion
from planish.fleet.replica_set import ReplicaSet
from planish.fleet.routing import PrefixTable
from planish.images import ImageChunk
from planish.service import ReleaseSampler, Sample, SampledToken, SamplerInfo
from planish.types import ModelInput, SampleResponse

_SUSPECT_LOSSES = 2
_MAX_LOSSES = 5
"""A request fails after so many replicas were lost while they sampled it. After the first two, it
no longer runs together with other such requests.
"""


@dataclass(eq=False)
class FleetSampler:
    """One sampler. Replicas create it when they get the first request."""

    info: SamplerInfo
    source: SamplerSource | None = None
    """None until the weights are exported."""
    failure: BaseException | None = None
    """Why the sampler will never have weights."""
    waiting: list[FleetSample] = field(default_factory=list)
    """Requests that arrived before the weights."""
    num_open: int = 0
    """The number of requests without a response."""
    is_released: bool = False


class FleetSample:
    """One request, which is sampled again elsewhere if its replica is lost."""

    def __init__(self, operation: Sample, sampler: FleetSampler) -> None:
        """Fix the seed, so that every attempt samples the same tokens."""
        params = operation.sampling_params
        if params.seed is None:
            operation = replace(
                operation, sampling_params=replace(params, seed=secrets.randbits(63))
            )
        self.operation = operation
        self.sampler = sampler
        self.future: RemoteFuture[SampleResponse] = RemoteFuture(self._cancel)
        self._attempt: Future[SampleResponse] | None = None
        self.num_lost_replicas = 0
        """How many replicas were lost while they ran this request."""
        self._num_delivered: Counter[int] = Counter()
        """The number of streamed tokens of each sample that the caller has got."""

    def submit(self, replica: Replica) -> Future[SampleResponse]:
        """Submit the request to a replica."""
        operation = self.operation
        if operation.on_token is not None:
            operation = replace(
                operation, on_token=partial(self._deliver, operation.on_token, Counter())
            )
        self._attempt = replica.engine.submit(operation)
        return self._attempt

    def _cancel(self) -> bool:
        return self._attempt is None or self._attempt.cancel()

    def _deliver(
        self,
        on_token: Callable[[SampledToken], None],
        num_seen: Counter[int],
        token: SampledToken,
    ) -> None:
        """Pass on a token, unless an earlier attempt has delivered it."""
        num_seen[token.sample] += 1
        if num_seen[token.sample] > self._num_delivered[token.sample]:
            self._num_delivered[token.sample] += 1
            on_token(token)


class FleetSamplers:
    """All samplers of a fleet."""

    def __init__(
        self,
        replicas: ReplicaSet,
        threads: Executor,
        on_unused: Callable[[SharedVersion], None],
    ) -> None:
        """`threads` runs what must not delay the caller. `on_unused` is called when a sampler no
        longer needs its version.
        """
        self._replicas = replicas
        self._threads = threads
        self._on_unused = on_unused
        self._samplers: dict[str, FleetSampler] = {}
        self._suspects: deque[FleetSample] = deque()
        """Requests that were lost with several replicas, of which one may be the cause."""
        self._running_suspect: FleetSample | None = None
        self._prefixes = PrefixTable()
        self._lock = threading.Lock()

    def add(self, info: SamplerInfo) -> FleetSampler:
        """Create a sampler without weights. Raise UserError if the id is in use. The id of a
        sampler that got no weights can be used again.
        """
        sampler = FleetSampler(info)
        with self._lock:
            old = self._samplers.get(info.sampler_id)
            if old is not None and old.failure is None:
                raise UserError(
                    f"sampler_id={info.sampler_id!r} is already in use; choose another id"
                )
            self._samplers[info.sampler_id] = sampler
        return sampler

    def remove(self, sampler_id: str) -> FleetSampler:
        """Remove a sampler from the ids in use, before it is released. A finalizer may call this."""
        sampler = self._samplers.pop(sampler_id, None)
        if sampler is None:
            raise unknown_id("sampler", sampler_id)
        return sampler

    def info(self, sampler_id: str) -> SamplerInfo:
        """Return a sampler's base model and checkpoint."""
        if sampler_id not in self._samplers:
            raise unknown_id("sampler", sampler_id)
        return self._samplers[sampler_id].info

    def set_source(
        self, sampler: FleetSampler, shared: SharedVersion | None, failure: BaseException | None
    ) -> None:
        """Give a sampler its weights, or the reason why it has none. Start waiting requests."""
        with self._lock:
            sampler.failure = failure
            if failure is None:
                sampler.source = SamplerSource(
                    sampler.info.sampler_id, sampler.info.base_model, shared
                )
            waiting, sampler.waiting = sampler.waiting, []
        for sample in waiting:
            self._threads.submit(self._dispatch_later, sample)
        self._release_if_unused(sampler)

    def sample(self, operation: Sample) -> Future[SampleResponse]:
        """Submit a request to the best replica. Raise UserError for invalid input."""
        sampler = self._samplers.get(operation.sampler_id)
        if sampler is None:
            raise unknown_id("sampler", operation.sampler_id)
        sample = FleetSample(operation, sampler)
        with self._lock:
            sampler.num_open += 1
        try:
            if sampler.source is None and sampler.failure is None:
                checked = replace(operation, on_token=None)
                self._replicas.call("check_sample", sampler.info.base_model, checked)
                with self._lock:
                    if sampler.source is None and sampler.failure is None:
                        sampler.waiting.append(sample)
                        return sample.future
            self._dispatch(sample)
        except BaseException:
            self._close_request(sample)
            raise
        return sample.future

    def release(self, sampler: FleetSampler) -> None:
        """Free a removed sampler as soon as its requests are done."""
        sampler.is_released = True
        self._release_if_unused(sampler)

    def forget_replica(self, replica: Replica) -> None:
        """Forget what a lost replica had cached."""
        with self._lock:
            self._prefixes.forget(replica.number)

    def _dispatch(self, sample: FleetSample) -> None:
        sampler = sample.sampler
        if sampler.failure is not None:
            raise UserError(f"sampler_id={sampler.info.sampler_id!r}: {sampler.failure}")
        assert sampler.source is not None
        while True:
            replica, work = self._choose(sample)
            try:
                replica.add_sampler(sampler.source)
                attempt = sample.submit(replica)
            except ReplicaLostError:
                # Another replica gets the request. `live` waits if there is none.
                self._charge(replica, -work)
                self._replicas.wait_until_lost(replica)
            except BaseException:
                self._charge(replica, -work)
                raise
            else:
                break
        attempt.add_done_callback(partial(self._finish, sample, replica, work))

    def _dispatch_later(self, sample: FleetSample) -> None:
        """Dispatch a request whose `submit` has returned."""
        if sample.future.done():
            self._close_request(sample)
            return
        try:
            self._dispatch(sample)
        except BaseException as error:
            self._close_request(sample)
            sample.future.set_exception(error)

    def _dispatch_again(self, sample: FleetSample) -> None:
        """Dispatch a request whose replica was lost. Suspects run one at a time, so that a request
        that ends its replica does not do so while the others run.
        """
        sample.num_lost_replicas += 1
        self._end_suspicion(sample)
        if sample.num_lost_replicas >= _MAX_LOSSES:
            self._close_request(sample)
            sample.future.set_exception(
                UserError(
                    f"the request is not sampled again: {_MAX_LOSSES} replicas were lost while "
                    "they sampled it; send fewer or shorter sequences in one request"
                )
            )
        elif sample.num_lost_replicas >= _SUSPECT_LOSSES:
            with self._lock:
                self._suspects.append(sample)
            self._dispatch_suspect()
        else:
            self._threads.submit(self._dispatch_later, sample)

    def _dispatch_suspect(self) -> None:
        with self._lock:
            if self._running_suspect is not None or not self._suspects:
                return
            self._running_suspect = suspect = self._suspects.popleft()
        self._threads.submit(self._dispatch_later, suspect)

    def _end_suspicion(self, sample: FleetSample) -> None:
        """Let the next suspect run, if this one was running."""
        if self._running_suspect is sample:
            self._running_suspect = None
            self._dispatch_suspect()

    def _choose(self, sample: FleetSample) -> tuple[Replica, int]:
        """Return the replica for a request and its work in tokens, and charge the work."""
        # Of equal replicas, the one that has answered the fewest requests comes first.
        live = sorted(self._replicas.open(), key=attrgetter("num_samples"))
        replicas = {replica.number: replica for replica in live}
        op, source = sample.operation, sample.sampler.source
        assert source is not None
        max_tokens = 0 if op.prompt_only else (op.sampling_params.max_tokens or 0)
        weights = source.base_model if source.shared is None else source.shared.version.name
        version = (weights, op.owner)  # cached prefixes belong to an owner
        keys = prefix_keys(op.prompt)
        with self._lock:
            number, work = self._prefixes.choose(
                keys,
                version,
                op.num_samples * max_tokens,
                {number: replica.load for number, replica in replicas.items()},
            )
            replicas[number].load += work
        return replicas[number], work

    def _charge(self, replica: Replica, work: int) -> None:
        with self._lock:
            replica.load += work

    def _finish(
        self, sample: FleetSample, replica: Replica, work: int, attempt: Future[SampleResponse]
    ) -> None:
        self._charge(replica, -work)
        error = None if attempt.cancelled() else attempt.exception()
        if isinstance(error, ReplicaLostError) and not self._replicas.is_closing:
            self._dispatch_again(sample)
            return
        replica.num_samples += 1
        self._close_request(sample)
        copy_outcome(attempt, sample.future)

    def _close_request(self, sample: FleetSample) -> None:
        self._end_suspicion(sample)
        with self._lock:
            sample.sampler.num_open -= 1
        self._release_if_unused(sample.sampler)

    def _release_if_unused(self, sampler: FleetSampler) -> None:
        with self._lock:
            is_ready = sampler.source is not None or sampler.failure is not None
            if not sampler.is_released or sampler.num_open or not is_ready:
                return
            source, sampler.source = sampler.source, None
            sampler.failure = UserError("it was released")
        if source is None:
            return
        for replica in self._replicas.replicas:
            if replica.remove_sampler(source.sampler_id) and not replica.is_lost:
                replica.engine.submit(ReleaseSampler(source.sampler_id))
        if source.shared is not None:
            self._on_unused(source.shared)


def prefix_keys(prompt: ModelInput) -> list[int]:
    """Return integers that are equal in two prompts as far as their tokens and images are. An image
    without `expected_tokens` has one of them, because only an engine knows its number of tokens.
    """
    chunks = [
        replace(chunk, expected_tokens=chunk.expected_tokens or 1)
        if isinstance(chunk, ImageChunk)
        else chunk
        for chunk in prompt.chunks
    ]
    return ModelInput(chunks).to_keys()
