"""What there is, apart from training: base models and checkpoints."""

from __future__ import annotations

from planish.client.futures import Pending, completed, reading
from planish.errors import UserError
from planish.service import Service
from planish.types import (
    CheckpointPath,
    CheckpointsListResponse,
    GetServerCapabilitiesResponse,
    WeightsInfoResponse,
)


class RestClient:
    """Made by `ServiceClient.create_rest_client`. The work is done when a method returns; its
    result is a future all the same.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def get_server_capabilities(self) -> Pending[GetServerCapabilitiesResponse]:
        """The base models that can be named here."""
        return completed(self._service.capabilities())

    get_server_capabilities_async = reading(get_server_capabilities)

    def list_checkpoints(self, training_run_id: str) -> Pending[CheckpointsListResponse]:
        """The checkpoints of one model, newest first."""
        if not isinstance(training_run_id, str) or not training_run_id or "/" in training_run_id:
            raise UserError(
                f"training_run_id={training_run_id!r}: give the id of a model, such as client.model_id"
            )
        return completed(CheckpointsListResponse(self._service.checkpoints(training_run_id)))

    list_checkpoints_async = reading(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> Pending[CheckpointsListResponse]:
        """All checkpoints, newest first."""
        if limit < 1 or offset < 0:
            raise UserError(
                f"limit={limit}, offset={offset}: give a limit of at least 1 and an offset of at least 0"
            )
        return completed(
            CheckpointsListResponse(self._service.checkpoints()[offset : offset + limit])
        )

    list_user_checkpoints_async = reading(list_user_checkpoints)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Pending[WeightsInfoResponse]:
        """Base model and shape of a checkpoint."""
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

    get_weights_info_by_tinker_path_async = reading(get_weights_info_by_tinker_path)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> Pending[None]:
        """Remove it from the disk. `checkpoint_id`: weights/NAME or sampler_weights/NAME."""
        return self.delete_checkpoint_from_tinker_path(
            f"tinker://{training_run_id}/{checkpoint_id}"
        )

    delete_checkpoint_async = reading(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Pending[None]:
        """The same by its path, `tinker://RUN/weights/NAME` or `tinker://RUN/sampler_weights/NAME`."""
        self._service.delete_checkpoint(str(CheckpointPath.parse(tinker_path)))
        return completed(None)

    delete_checkpoint_from_tinker_path_async = reading(delete_checkpoint_from_tinker_path)
