"""The queues of training operations, one for each training model.

Only the engine thread uses a `TrainingQueues`.
"""

from planish.engine.failures import fail_all, prepare_error
from planish.engine.sampler_sessions import CANCELLED_CREATION
from planish.engine.training_models import (
    QueuedCreation,
    QueuedDeferredForwardBackward,
    QueuedForwardBackward,
    QueuedPublish,
    QueuedTraining,
    TrainingModel,
)
from planish.engine.training_operations import TrainingOperations
from planish.errors import UserError


class TrainingQueues:
    """The training models whose queues are not empty."""

    def __init__(self, operations: TrainingOperations) -> None:
        """`operations` runs the operations."""
        self._operations = operations
        self._models: list[TrainingModel] = []

    @property
    def await_data(self) -> bool:
        """Whether the next operation of any model waits for data that are being prepared."""
        return any(model.awaits_data for model in self._models)

    def ready_models(self) -> list[TrainingModel]:
        """Return the models whose first operation can be started or continued now."""
        return [model for model in self._models if model.is_ready]

    def append(self, queued: QueuedTraining) -> None:
        """Append an operation to the queue of its model."""
        if not queued.model.queue:
            self._models.append(queued.model)
        queued.model.queue.append(queued)

    def run_turn(self, model: TrainingModel) -> QueuedTraining | None:
        """Do one piece (for instance a micro-batch) of the model's first operation. Return the
        operation if it has ended, else None.
        """
        queued = model.queue[0]
        model.base.make_current()
        if self._run_piece(model, queued):
            return None
        model.work = None
        model.queue.popleft()
        if not model.queue:
            self._models.remove(model)
        return queued

    def _run_piece(self, model: TrainingModel, queued: QueuedTraining) -> bool:
        """Do one piece of the operation, and return whether it needs another turn."""
        try:
            if model.work is None:
                if not queued.future.set_running_or_notify_cancel():
                    _record_cancellation(queued)
                    return False
                model.work = self._operations.start(queued)
            next(model.work)
        except StopIteration:
            return False
        except BaseException as error:
            prepare_error(error, model.base)
            queued.fail(error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def close(self, error: Exception) -> None:
        """Fail all operations with `error`, and drop the references to all tensors."""
        for model in self._models:
            if model.work is not None:
                model.work.close()
            fail_all(model.queue, error)
        self._models = []


def _record_cancellation(queued: QueuedTraining) -> None:
    """Record that a queued operation was cancelled.

    If it was a forward_backward, the next optim_step is rejected, because its gradient would
    lack the cancelled part.
    """
    if isinstance(queued, QueuedPublish):
        queued.session.failure = CANCELLED_CREATION
    elif isinstance(queued, QueuedCreation):
        queued.model.failure = CANCELLED_CREATION
    adds_gradient = isinstance(queued, QueuedDeferredForwardBackward) or (
        isinstance(queued, QueuedForwardBackward) and not queued.operation.forward_only
    )
    if adds_gradient and queued.model.adapter is not None:
        queued.model.adapter.reject_next_step(UserError("the forward_backward was cancelled"))
