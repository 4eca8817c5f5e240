"""The operations of a training model, as generators that run in the engine thread.

A generator yields between pieces of work, so that other work can use the device. It sets the result
of the operation's future itself. If it raises an exception, the engine thread sets the exception on
the future. Checkpoints are written by another thread while the model continues. That is safe
because their tensors never change.
"""

from collections.abc import Generator
from concurrent.futures import Executor
from dataclasses import replace

from planish.engine.checkpoints.store import AdapterSnapshot, CheckpointStore, SaveRequest
from planish.engine.replication import (
    ExportedWeights,
    ExportWeights,
    RejectNextStep,
    SentPart,
)
from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import finish_call
from planish.engine.training_models import (
    QueuedCreation,
    QueuedDeferredForwardBackward,
    QueuedFinish,
    QueuedForwardBackward,
    QueuedLoad,
    QueuedPart,
    QueuedPublish,
    QueuedSave,
    QueuedTraining,
    TrainingModel,
)
from planish.service import OptimStep, SaveWeights, UnloadModel
from planish.types import (
    ForwardBackwardOutput,
    LoadWeightsResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

OperationGenerator = Generator[None, None, None]


class TrainingOperations:
    """The operations of a training model, with one method per kind of queued operation."""

    def __init__(self, store: CheckpointStore, disk_executor: Executor) -> None:
        """Create the operations of an engine.

        Checkpoints are saved in `store`. They are written by the threads of `disk_executor`.
        """
        self._store = store
        self._disk_executor = disk_executor

    def start(self, queued: QueuedTraining) -> OperationGenerator:
        """Run the operation on its training model. Yield after each piece except the last."""
        match queued:
            case QueuedCreation():
                self._create(queued)
            case QueuedTraining(operation=UnloadModel()):
                # Later operations on the model fail.
                queued.model.adapter, queued.model.failure = None, "it was unloaded"
                queued.future.set_result(None)
            case QueuedForwardBackward():
                yield from self._forward_backward(queued)
            case QueuedDeferredForwardBackward():
                yield from self._deferred_forward_backward(queued)
            case QueuedPart():
                yield from self._compute_part(queued)
            case QueuedFinish():
                self._finish_parts(queued)
            case QueuedTraining(operation=RejectNextStep(error=error)):
                queued.model.require_adapter().reject_next_step(error)
                queued.future.set_result(None)
            case QueuedTraining(operation=ExportWeights()):
                queued.future.set_result(_export_weights(queued.model))
            case QueuedTraining(operation=OptimStep() as step):
                queued.future.set_result(
                    queued.model.require_adapter().optim_step(step.adam_params)
                )
            case QueuedSave():
                self._save(queued)
            case QueuedLoad():
                self._load(queued)
            case QueuedPublish():
                self._publish(queued)
            case _:
                raise TypeError(
                    f"queued is a {type(queued).__name__}, which a training model does not support"
                )

    def _create(self, queued: QueuedCreation) -> None:
        """Create the adapter, from a checkpoint if there is one."""
        model, loaded_adapter = queued.model, queued.loaded_adapter
        try:
            master = loaded_adapter.state["master"] if loaded_adapter else None
            adapter = Adapter(model.layout, model.base.backend, master)
            if loaded_adapter is not None:
                adapter.load_state(dict(loaded_adapter.state), loaded_adapter.with_optimizer)
        except BaseException as error:
            model.failure = f"the model could not be created ({error}); create another model"
            raise
        model.adapter = adapter
        queued.future.set_result(model.info())

    def _forward_backward(self, queued: QueuedForwardBackward) -> OperationGenerator:
        """Run the forward pass, and the backward pass unless the operation is forward-only."""
        model, op = queued.model, queued.operation
        work = model.base.trainer.run(model.require_adapter(), queued.batch, op.forward_only)
        output = yield from work
        queued.future.set_result(
            _with_substitution_metric(op.loss_fn, queued.batch.loss_fn, output)
        )

    def _deferred_forward_backward(
        self, queued: QueuedDeferredForwardBackward
    ) -> OperationGenerator:
        """Run a forward_backward whose data is a future that is done by now.

        If the future failed, the next optimizer step fails too.
        """
        op, adapter = queued.operation, queued.model.require_adapter()
        try:
            data = op.data.result(timeout=0)
        except BaseException as error:
            adapter.reject_next_step(error)
            raise
        output = yield from queued.model.base.trainer.forward_backward(
            adapter, data, queued.loss_fn, op.loss_fn_config
        )
        queued.future.set_result(_with_substitution_metric(op.loss_fn, queued.loss_fn, output))

    def _compute_part(self, queued: QueuedPart) -> OperationGenerator:
        """Run some micro-batches of a forward_backward."""
        model, op, version = queued.model, queued.operation, queued.added_version
        weights = (
            model.require_adapter().weights
            if version is None
            else version.sampler_weights(model.base)
        )
        part = yield from model.base.trainer.run_part(
            weights, queued.batch, op.forward_only, op.micro_batches, op.num_micro_batches
        )
        queued.future.set_result(SentPart.pack(part))

    def _finish_parts(self, queued: QueuedFinish) -> None:
        """Add the gradients of a forward_backward that several engines computed."""
        model, op = queued.model, queued.operation
        adapter = model.require_adapter()
        parts = [part.unpack(model.base.device) for part in op.parts]
        output = finish_call(adapter, parts, op.num_tokens)
        queued.future.set_result(_with_substitution_metric(op.loss_fn, queued.loss_fn, output))

    def _load(self, queued: QueuedLoad) -> None:
        """Replace the adapter's state by that of a checkpoint."""
        loaded_adapter = queued.loaded_adapter
        queued.model.require_adapter().load_state(
            dict(loaded_adapter.state), loaded_adapter.with_optimizer
        )
        queued.future.set_result(LoadWeightsResponse(queued.operation.path))

    def _publish(self, queued: QueuedPublish) -> None:
        """Make the current version of the adapter available to the new sampler."""
        session = queued.session
        try:
            adapter = queued.model.require_adapter()
        except Exception as error:
            session.failure = str(error)
            raise
        session.weights = adapter.snapshot()
        session.version = (queued.model.key, adapter.version)
        queued.future.set_result(session.sampler_id)

    def _save(self, queued: QueuedSave) -> None:
        """Hand the current state to the disk thread, which writes the checkpoint."""
        model, op = queued.model, queued.operation
        metadata = {**model.user_metadata, **op.user_metadata}
        request = SaveRequest(queued.path, op.ttl_seconds, op.overwrite, metadata)
        base = model.base
        snapshot = AdapterSnapshot(
            model.require_adapter().state(),
            model.layout,
            model.base_model,
            base.config.fingerprint(),
            base.fingerprint,
            base.quantize,
        )
        try:
            self._disk_executor.submit(self._write, queued, request, snapshot)
        except RuntimeError:  # the program is ending, and its thread pools reject new work
            self._write(queued, request, snapshot)

    def _write(self, queued: QueuedSave, request: SaveRequest, snapshot: AdapterSnapshot) -> None:
        """Write the checkpoint, and set the result."""
        response_class = (
            SaveWeightsResponse
            if isinstance(queued.operation, SaveWeights)
            else SaveWeightsForSamplerResponse
        )
        try:
            self._store.save(request, snapshot)
        except BaseException as error:
            queued.fail(error)
        else:
            queued.future.set_result(response_class(str(request.path)))


def _export_weights(model: TrainingModel) -> ExportedWeights:
    base = model.base
    # A later optimizer step replaces the master vector instead of changing it.
    vector = model.require_adapter().master.to(base.backend.dtype)
    return ExportedWeights(model.base_model, base.fingerprint, model.layout.lora_config, vector)


def _with_substitution_metric(
    requested: str, computed: str, output: ForwardBackwardOutput
) -> ForwardBackwardOutput:
    """Return `output`, with an added metric if the requested loss was substituted."""
    if requested == computed:
        return output
    metric = f"substituted_loss/{requested}={computed}:max"
    return replace(output, metrics={**output.metrics, metric: 1.0})
