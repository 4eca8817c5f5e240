"""One call of `forward_backward` whose micro-batches several replicas compute."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from planish.engine.replication import ComputePart, FinishParts, SentPart
from planish.fleet.link import ReplicaLostError
from planish.fleet.replica import Replica, SharedVersion
from planish.service import ForwardBackward

Plan = Sequence[tuple[int, Sequence[int]]]
"""The number of computed tokens and the datums of each micro-batch of a call."""


@dataclass(frozen=True)
class _Part:
    """A part of a call that a replica computes."""

    micro_batches: range
    replica: Replica
    future: Future[SentPart]


@dataclass(frozen=True)
class SpreadCall:
    """A `ForwardBackward`, the home replica of its model, and the version for other replicas."""

    model_id: str
    operation: ForwardBackward
    home: Replica
    shared: SharedVersion | None
    """The weights; None if only the home replica computes."""
    plan: Plan

    def compute(self, others: Sequence[Replica]) -> FinishParts:
        """Compute the micro-batches on the home replica and on others. Return the operation that
        adds their gradients on the home replica.
        """
        replicas = [self.home, *others]
        rows = [num_rows for num_rows, _ in self.plan]
        parts = [
            self._start(micro_batches, replica)
            for micro_batches, replica in zip(divide(rows, len(replicas)), replicas, strict=False)
        ]
        results = [self._result_of(part) for part in parts]
        operation = self.operation
        return FinishParts(
            self.model_id, operation.loss_fn, operation.num_tokens, results, operation.forward_only
        )

    def _start(self, micro_batches: range, replica: Replica) -> _Part:
        operation = self.operation
        datums = {index: self.plan[index][1] for index in micro_batches}
        part = ComputePart(
            # Only what the replica computes: the head would send all datums once per replica.
            {datum: operation.data[datum] for indices in datums.values() for datum in indices},
            operation.loss_fn,
            datums,
            len(self.plan),
            operation.loss_fn_config,
            operation.forward_only,
            model_id=self.model_id,
        )
        if replica is self.home:
            return _Part(micro_batches, replica, replica.engine.submit(part))
        assert self.shared is not None
        part = replace(part, model_id=None, version=self.shared.version.name)
        try:
            replica.add_version(self.shared)
            future = replica.engine.submit(part)
        except ReplicaLostError as error:
            future = Future[SentPart]()
            future.set_exception(error)
        return _Part(micro_batches, replica, future)

    def _result_of(self, part: _Part) -> SentPart:
        """Return the result of a part. The home computes the part of a lost replica again."""
        try:
            result = part.future.result()
        except ReplicaLostError:
            if part.replica is self.home:
                raise
            return self._start(part.micro_batches, self.home).future.result()
        if part.replica is not self.home:
            part.replica.num_micro_batches += len(part.micro_batches)
        return result


def divide(rows: Sequence[int], count: int) -> list[range]:
    """Divide micro-batches of these numbers of rows into at most `count` ranges of about equal
    work. No range is empty.
    """
    count = min(count, len(rows))
    ends = list(accumulate(rows))
    borders = [0]
    for part in range(1, count):
        target = ends[-1] * part / count
        nearest = min(range(len(rows)), key=lambda index: abs(ends[index] - target)) + 1
        # Leave at least one micro-batch for this part and for each of the parts after it.
        borders.append(min(max(nearest, borders[-1] + 1), len(rows) - (count - part)))
    borders.append(len(rows))
    return [range(start, stop) for start, stop in pairwise(borders)]
