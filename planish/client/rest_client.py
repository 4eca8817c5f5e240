"""RestClient: lists of base models, checkpoints and training runs, and the removal of
checkpoints.
"""

# pyright: reportUnnecessaryIsInstance=false

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import ClassVar

from planish.client.futures import Pending, completed, in_thread_returning_result
from planish.client.session import RefusesMethods
from planish.errors import CheckpointError, UserError
from planish.service import CheckpointInfo, Service
from planish.types import (
    Checkpoint,
    CheckpointPath,
    CheckpointsListResponse,
    Cursor,
    GetServerCapabilitiesResponse,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)

_NO_SERVER = "use the tinker SDK or `planish checkpoints --base-url` with the server"
_NO_ACCOUNTS = "planish has no accounts, projects, session lists or bills"


class RestClient(RefusesMethods):
    """Lists and deletes checkpoints. Made by `ServiceClient.create_rest_client`.

    Methods block until the work is done, and return a completed Pending as the tinker SDK does.
    """

    refused_methods: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                "assign_session_project",
                "export_session_trace",
                "get_audit_log",
                "get_billing_usage",
                "get_session",
                "list_sessions",
                "search_sessions",
                "whoami",
            ),
            _NO_ACCOUNTS,
        ),
        "copy_weights": "local checkpoints can be loaded by their path; " + _NO_SERVER,
        "get_current_checkpoint_storage_usage": "`planish checkpoints list` shows sizes",
        "get_external_weights_urls": "`planish checkpoints download` copies the files",
        "get_sampler": "a SamplingClient has model_path and get_base_model()",
        "publish_checkpoint_from_tinker_path": _NO_SERVER,
        "unpublish_checkpoint_from_tinker_path": _NO_SERVER,
        "set_checkpoint_ttl_from_tinker_path": "`planish checkpoints ttl` does it",
    }

    def __init__(self, service: Service) -> None:
        """Use the checkpoints of `service`."""
        self._service = service

    def get_server_capabilities(self) -> Pending[GetServerCapabilitiesResponse]:
        """Return the base models that are available."""
        return completed(self._service.capabilities())

    get_server_capabilities_async = in_thread_returning_result(get_server_capabilities)

    def list_checkpoints(self, training_run_id: str) -> Pending[CheckpointsListResponse]:
        """Return the checkpoints of one training run, newest first. Raises UserError for an id that
        cannot be one.
        """
        if not isinstance(training_run_id, str) or not training_run_id or "/" in training_run_id:
            raise UserError(
                f"training_run_id={training_run_id!r}: give the id of a training model, such as "
                "client.model_id"
            )
        return completed(CheckpointsListResponse(self._service.checkpoints(training_run_id)))

    list_checkpoints_async = in_thread_returning_result(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> Pending[CheckpointsListResponse]:
        """Return a page of all checkpoints, newest first: at most `limit`, from `offset` on."""
        _check_page(limit, offset)
        checkpoints = self._service.checkpoints()
        cursor = Cursor(offset, limit, len(checkpoints))
        return completed(CheckpointsListResponse(checkpoints[offset : offset + limit], cursor))

    list_user_checkpoints_async = in_thread_returning_result(list_user_checkpoints)

    def get_training_run(
        self, training_run_id: str, access_scope: str = "owned"
    ) -> Pending[TrainingRun]:
        """Return one training run. Raise CheckpointError if it has no checkpoints. `access_scope`
        has no effect: the run is one of this machine, or of the API key.
        """
        checkpoints = self._service.checkpoints(training_run_id)
        if not checkpoints:
            raise CheckpointError(
                f"training_run_id={training_run_id!r} has no checkpoints; save one first"
            )
        (run,) = training_runs(checkpoints, self._service.checkpoint_info)
        return completed(run)

    get_training_run_async = in_thread_returning_result(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: str = "owned"
    ) -> Pending[TrainingRun]:
        """Return the training run of the checkpoint at `tinker_path`. `access_scope` has no effect,
        as in `get_training_run`.
        """
        return self.get_training_run(CheckpointPath.parse(tinker_path).run_id)

    get_training_run_by_tinker_path_async = in_thread_returning_result(
        get_training_run_by_tinker_path
    )

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: str = "owned"
    ) -> Pending[TrainingRunsResponse]:
        """Return a page of the training runs that have checkpoints, the most recent first: at most
        `limit`, from number `offset` on. `access_scope` has no effect: the runs are those of this
        machine, or of the API key.
        """
        _check_page(limit, offset)
        runs = training_runs(self._service.checkpoints(), self._service.checkpoint_info)
        cursor = Cursor(offset, limit, len(runs))
        return completed(TrainingRunsResponse(runs[offset : offset + limit], cursor))

    list_training_runs_async = in_thread_returning_result(list_training_runs)

    def get_telemetry(self) -> None:
        """Return None: planish sends no telemetry."""

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Pending[WeightsInfoResponse]:
        """Return base model and adapter shape of the checkpoint at `tinker_path`."""
        info = self._service.checkpoint_info(tinker_path)
        lora = info.lora
        return completed(
            WeightsInfoResponse(
                info.base_model,
                True,
                lora.rank,
                lora.train_unembed,
                lora.train_mlp,
                lora.train_attn,
            )
        )

    get_weights_info_by_tinker_path_async = in_thread_returning_result(
        get_weights_info_by_tinker_path
    )

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> Pending[None]:
        """Delete a checkpoint. `checkpoint_id` is weights/NAME or sampler_weights/NAME."""
        return self.delete_checkpoint_from_tinker_path(
            f"tinker://{training_run_id}/{checkpoint_id}"
        )

    delete_checkpoint_async = in_thread_returning_result(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Pending[None]:
        """Delete the checkpoint at tinker://RUN/weights/NAME or
        tinker://RUN/sampler_weights/NAME.
        """
        self._service.delete_checkpoint(str(CheckpointPath.parse(tinker_path)))
        return completed(None)

    delete_checkpoint_from_tinker_path_async = in_thread_returning_result(
        delete_checkpoint_from_tinker_path
    )


def _check_page(limit: int, offset: int) -> None:
    if limit < 1 or offset < 0:
        raise UserError(
            f"limit={limit}, offset={offset}: give a limit of at least 1 and an offset of at least "
            "0"
        )


def training_runs(
    checkpoints: Sequence[Checkpoint], info_of: Callable[[str], CheckpointInfo]
) -> list[TrainingRun]:
    """Return the training runs that have these checkpoints, the most recent first. `info_of`
    returns the CheckpointInfo for the path of a checkpoint.
    """
    grouped = groupby(sorted(checkpoints, key=_run_id_of), key=_run_id_of)
    runs = [
        _training_run(run_id, list(run_checkpoints), info_of) for run_id, run_checkpoints in grouped
    ]
    return sorted(runs, key=lambda run: run.last_request_time, reverse=True)


def _training_run(
    run_id: str, checkpoints: Sequence[Checkpoint], info_of: Callable[[str], CheckpointInfo]
) -> TrainingRun:
    """Return the training run that has these checkpoints, at least one."""
    newest_first = sorted(checkpoints, key=lambda checkpoint: checkpoint.time, reverse=True)
    info = info_of(newest_first[0].tinker_path)
    last = {
        kind: next((c for c in newest_first if c.checkpoint_type == kind), None)
        for kind in ("training", "sampler")
    }
    return TrainingRun(
        run_id,
        info.base_model,
        True,
        newest_first[0].time,
        info.lora.rank,
        last["training"],
        last["sampler"],
        newest_first[0].user_metadata,
    )


def _run_id_of(checkpoint: Checkpoint) -> str:
    """Return the id of the training run that a checkpoint belongs to."""
    return CheckpointPath.parse(checkpoint.tinker_path).run_id
