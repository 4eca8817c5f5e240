"""A model by one name: a base model, a checkpoint, or the directory of a training run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish import SamplingClient, ServiceClient
from planish.errors import PlanishError, UnknownModelError
from planish.model.weights import weights_fingerprint
from planish.renderers import Renderer
from planish.runlog.checkpoints import choose_renderer
from planish.runlog.run_directory import weights_of
from planish.types import Checkpoint, CheckpointPath

SCHEMES = ("tinker://", "planish://")


@dataclass(frozen=True)
class OpenedModel:
    name: str
    """A checkpoint's path, or the base model's name."""
    sampling_client: SamplingClient
    renderer: Renderer
    context_window: int | None
    """Tokens; None where the service does not say."""
    weights: str | None = None
    """What tells them from others that had, or will have, this name; None where nobody knows, as of
    a server's base model.
    """


def open_model(
    service_client: ServiceClient, name: str, renderer_name: str | None = None
) -> OpenedModel:
    """The renderer is the named one, else the one that a checkpoint says it was trained with, else
    the base model's.
    """
    resolved = weights_of(name)
    is_checkpoint = resolved.startswith(SCHEMES)
    place: dict[str, Any] = {"model_path": resolved} if is_checkpoint else {"base_model": resolved}
    client = service_client.create_sampling_client(**place)
    base_model = client.get_base_model()
    tokenizer = client.get_tokenizer()
    saved = _checkpoint(service_client, resolved) if is_checkpoint else None
    trained_with = (saved.user_metadata or {}).get("renderer_name") if saved else None
    renderer = choose_renderer(renderer_name or trained_with, base_model, tokenizer)
    if is_checkpoint:
        weights = saved.time.isoformat() if saved else None
    else:
        weights = _fingerprint(Path(tokenizer.name_or_path))
    context_window = service_client.get_server_capabilities().context_of(base_model)
    return OpenedModel(resolved, client, renderer, context_window, weights)


def _checkpoint(service_client: ServiceClient, path: str) -> Checkpoint | None:
    """As its run's list has it; None if there is none to be read."""
    try:
        parsed = CheckpointPath.parse(path)
        listed = (
            service_client.create_rest_client().list_checkpoints(parsed.run_id).result().checkpoints
        )
    except (PlanishError, ValueError):
        # weights of another place, which are sampled from and not listed
        return None
    return next((one for one in listed if one.checkpoint_id == parsed.checkpoint_id), None)


def _fingerprint(directory: Path) -> str | None:
    """Of a base model's files; None if the directory has only a tokenizer, as that of a server's
    model.
    """
    try:
        return weights_fingerprint(directory)
    except UnknownModelError:
        return None
