"""The operations of one training model, and its custom losses, which threads compute."""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from planish.client.custom_loss import add_custom_metrics, custom_gradient, first_pass_data
from planish.client.futures import map_future
from planish.errors import UserError
from planish.processes.background import BackgroundThread
from planish.service import DeferredForwardBackward, ForwardBackward, Operation, Service
from planish.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from planish.client.custom_loss import CustomLoss

T = TypeVar("T")

_LOSS_EXIT_SECONDS = 10.0
"""How long the program waits at exit for a custom loss that is being computed."""


class ModelOperations:
    """Submits the operations of one training model."""

    def __init__(self, service: Service, model_id: str) -> None:
        self._service = service
        self._model_id = model_id
        self._loss_thread_ids: set[int] = set()
        """Ids of the threads that compute custom losses of this model."""

    def submit(self, operation: Operation[T]) -> Future[T]:
        """Submit an operation. Raise UserError in a custom loss of this model."""
        if threading.get_ident() in self._loss_thread_ids:
            raise UserError(
                "the custom loss called its own client, which waits for the loss; call the client "
                "before forward_backward_custom, or use another client"
            )
        return self._service.submit(operation)

    def submit_failed_gradient(self, error: UserError) -> Future[ForwardBackwardOutput]:
        """Submit a forward_backward that fails with `error`, in place of the rejected one."""
        data: Future[Sequence[Datum]] = Future()
        data.set_exception(error)
        return self.submit(DeferredForwardBackward(self._model_id, data, "cross_entropy"))

    def submit_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> Future[ForwardBackwardOutput]:
        """Submit the two passes of a custom loss. See `TrainingClient.forward_backward_custom`."""
        data = list(data) if isinstance(data, Sequence) else data
        try:
            first_pass = ForwardBackward(
                self._model_id, first_pass_data(data), "cross_entropy", forward_only=True
            )
            forward_future = self.submit(first_pass)
        except UserError as error:
            return self.submit_failed_gradient(error)
        weighted_data: Future[Sequence[Datum]] = Future()
        # `Service.close` waits for a DeferredForwardBackward only if the future of its data is in
        # the state "running". So set this state before the operation is submitted.
        weighted_data.set_running_or_notify_cancel()
        metrics: dict[str, float] = {}

        def differentiate() -> None:
            self._loss_thread_ids.add(threading.get_ident())
            try:
                gradient = custom_gradient(data, forward_future.result(), loss_fn)
                metrics.update(gradient.metrics)
            except BaseException as error:
                weighted_data.set_exception(error)
            else:
                weighted_data.set_result(gradient.data)
            finally:
                self._loss_thread_ids.discard(threading.get_ident())

        BackgroundThread(differentiate, "planish-custom-loss", exit_seconds=_LOSS_EXIT_SECONDS)
        backward_future = self.submit(
            DeferredForwardBackward(self._model_id, weighted_data, "cross_entropy")
        )
        return map_future(backward_future, lambda output: add_custom_metrics(output, metrics))
