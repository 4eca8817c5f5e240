"""What a service knows of a checkpoint: when it was saved, and the metadata of its run."""

from planish import SamplingClient, ServiceClient
from planish.errors import PlanishError, UserError
from planish.types import Checkpoint, CheckpointPath


def find_checkpoint(service_client: ServiceClient, path: str) -> Checkpoint | None:
    """Return the checkpoint as its run lists it; None if the list cannot be read."""
    try:
        parsed = CheckpointPath.parse(path)
        checkpoints = (
            service_client.create_rest_client().list_checkpoints(parsed.run_id).result().checkpoints
        )
    except (PlanishError, ValueError):
        # These weights were saved elsewhere: they can be sampled from, but their run is not listed
        # here.
        return None
    return next(
        (
            checkpoint
            for checkpoint in checkpoints
            if checkpoint.checkpoint_id == parsed.checkpoint_id
        ),
        None,
    )


def recorded_renderer_name(checkpoint: Checkpoint | None) -> str | None:
    """Return the renderer that the checkpoint's run recorded; None if it is not known."""
    metadata = checkpoint.user_metadata if checkpoint is not None else None
    return (metadata or {}).get("renderer_name")


def require_base_model(
    client: SamplingClient, base_model: str, checkpoint: str, option: str
) -> None:
    """Raise UserError, which names `option`, unless the weights of a sampling client were trained
    on `base_model`. `checkpoint` is the name of the weights in the message.

    The tokens of another base model have another meaning, so they would be read without any error.
    """
    if client.get_base_model() != base_model:
        raise UserError(
            f"{option}: {checkpoint} was trained on the base model {client.get_base_model()}, not "
            f"on {base_model}; give the checkpoint's base model"
        )
