"""The operations of a training model, as generators that run in the engine thread.

A generator yields between pieces of work, so that other work can use the device. It sets the result
of the job's future itself. If it raises an exception, the engine thread sets the exception on the
future. Checkpoints are written by another thread while the model continues. That is safe because
their tensors never change.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from planish.engine.checkpoints.store import CheckpointStore, Label, SavedAdapter
from planish.engine.training.adapters import Adapter
from planish.engine.training_models import Job, Tenant
from planish.service import (
    CreateModel,
    ForwardBackward,
    ForwardBackwardLater,
    LoadWeights,
    OptimStep,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import (
    ForwardBackwardOutput,
    LoadWeightsResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

Work = Generator[None, None, None]


class TrainingOperations:
    """The operations of a training model, with one method per operation type."""

    def __init__(self, store: CheckpointStore, disk: Executor) -> None:
        self._store = store
        self._disk = disk
        self._methods: dict[type, Callable[[Tenant, Job], Work]] = {
            CreateModel: self._create,
            UnloadModel: self._unload,
            ForwardBackward: self._forward_backward,
            ForwardBackwardLater: self._forward_backward_later,
            OptimStep: self._optim_step,
            SaveWeights: self._save,
            SaveWeightsForSampler: self._save,
            LoadWeights: self._load,
            PublishSampler: self._publish,
        }

    def start(self, tenant: Tenant, job: Job) -> Work:
        """Return the generator that runs the job's operation on the training model `tenant`."""
        return self._methods[type(job.operation)](tenant, job)

    def _create(self, tenant: Tenant, job: Job) -> Work:
        """Create the adapter, from a checkpoint if the job has one."""
        loaded, base = job.loaded, tenant.base
        try:
            adapter = Adapter(
                tenant.layout, base.dtype, base.device, loaded.state["master"] if loaded else None
            )
            if loaded is not None:
                adapter.load_state(dict(loaded.state), loaded.with_optimizer)
        except BaseException as error:
            tenant.failure = f"it could not be created ({error}); create another one"
            raise
        tenant.adapter = adapter
        job.future.set_result(tenant.info())
        yield from ()

    def _unload(self, tenant: Tenant, job: Job) -> Work:
        tenant.adapter, tenant.failure = None, "it was unloaded"
        job.future.set_result(None)
        yield from ()

    def _forward_backward(self, tenant: Tenant, job: Job) -> Work:
        op = job.operation
        assert isinstance(op, ForwardBackward)
        work = tenant.base.trainer.forward_backward(
            tenant.created(), op.data, op.loss_fn, op.loss_fn_config, op.forward_only
        )
        job.future.set_result(_naming_substitute(job, op.loss_fn, (yield from work)))

    def _forward_backward_later(self, tenant: Tenant, job: Job) -> Work:
        """Run a forward_backward whose data is a future that is done by now.

        If the future failed, the next optimizer step fails too.
        """
        op = job.operation
        assert isinstance(op, ForwardBackwardLater)
        adapter = tenant.created()
        try:
            now = ForwardBackward(
                op.model_id, op.data.result(timeout=0), op.loss_fn, op.loss_fn_config
            )
        except BaseException as error:
            adapter.refuse_step(error)
            raise
        work = tenant.base.trainer.forward_backward(
            adapter, now.data, now.loss_fn, now.loss_fn_config
        )
        job.future.set_result(_naming_substitute(job, op.loss_fn, (yield from work)))

    def _optim_step(self, tenant: Tenant, job: Job) -> Work:
        op = job.operation
        assert isinstance(op, OptimStep)
        job.future.set_result(tenant.created().optim_step(op.adam_params))
        yield from ()

    def _load(self, tenant: Tenant, job: Job) -> Work:
        op = job.operation
        assert isinstance(op, LoadWeights)
        assert job.loaded is not None
        tenant.created().load_state(dict(job.loaded.state), job.loaded.with_optimizer)
        job.future.set_result(LoadWeightsResponse(op.path))
        yield from ()

    def _publish(self, tenant: Tenant, job: Job) -> Work:
        """Make the current version of the adapter available to the job's sampler."""
        handle = job.handle
        assert handle is not None
        try:
            adapter = tenant.created()
        except Exception as error:
            handle.failure = str(error)
            raise
        handle.weights, handle.version = adapter.snapshot(), (tenant.key, adapter.version)
        job.future.set_result(handle.sampler_id)
        yield from ()

    def _save(self, tenant: Tenant, job: Job) -> Work:
        """Hand the current state to the disk thread, which writes the checkpoint."""
        op = job.operation
        assert isinstance(op, (SaveWeights, SaveWeightsForSampler))
        assert job.save_to is not None
        metadata = {**tenant.user_metadata, **op.user_metadata}
        label = Label(job.save_to, op.ttl_seconds, op.overwrite, metadata)
        state = tenant.created().state()
        base = tenant.base
        adapter = SavedAdapter(
            state, tenant.layout, tenant.base_model, base.config.fingerprint(), base.fingerprint
        )
        respond = (
            SaveWeightsResponse if isinstance(op, SaveWeights) else SaveWeightsForSamplerResponse
        )
        try:
            self._disk.submit(self._write, job, label, adapter, respond)
        except RuntimeError:  # the program is ending, and its thread pools reject new work
            self._write(job, label, adapter, respond)
        yield from ()

    def _write(
        self, job: Job, label: Label, adapter: SavedAdapter, respond: Callable[[str], Any]
    ) -> None:
        try:
            self._store.save(label, adapter)
        except BaseException as error:
            job.fail(error)
        else:
            job.future.set_result(respond(str(label.path)))


def _naming_substitute(
    job: Job, computed: str, output: ForwardBackwardOutput
) -> ForwardBackwardOutput:
    """Return `output`, with an added metric if the requested loss was substituted."""
    if job.asked_loss in (None, computed):
        return output
    metric = f"substituted_loss/{job.asked_loss}={computed}:max"
    return replace(output, metrics={**output.metrics, metric: 1.0})
