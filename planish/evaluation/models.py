"""A model by one name: a base model, a checkpoint, or the directory of a training run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.checkpointing import choose_renderer
from planish.errors import PlanishError, UserError
from planish.renderers import Renderer
from planish.runs import CHECKPOINTS, read_rows
from planish.types import CheckpointPath

SCHEMES = ("tinker://", "planish://")


@dataclass(frozen=True)
class OpenedModel:
    name: str
    """A checkpoint's path, or the base model's name."""
    sampling_client: Any
    renderer: Renderer
    context_window: int | None
    """Tokens; None where the service does not say."""


def open_model(service_client: Any, name: str, renderer_name: str | None = None) -> OpenedModel:
    """The renderer is the named one, else the one that a checkpoint says it was trained with, else the base model's."""
    resolved = newest_weights(name)
    is_checkpoint = resolved.startswith(SCHEMES)
    place = {"model_path": resolved} if is_checkpoint else {"base_model": resolved}
    client = service_client.create_sampling_client(**place)
    base_model = client.get_base_model()
    trained_with = checkpoint_renderer(service_client, resolved) if is_checkpoint else None
    renderer = choose_renderer(renderer_name or trained_with, base_model, client.get_tokenizer())
    return OpenedModel(resolved, client, renderer, context_window_of(service_client, base_model))


def newest_weights(name: str) -> str:
    """`name` itself, or the newest checkpoint of the run directory that it names."""
    rows = Path(name).expanduser() / CHECKPOINTS
    if not rows.is_file():
        return name
    saved = [path for row in read_rows(rows) if (path := row.get("sampler_path") or row.get("state_path"))]
    if not saved:
        raise UserError(f"model={name}: the run in it saved no weights; let it reach a checkpoint first")
    return str(saved[-1])


def checkpoint_renderer(service_client: Any, path: str) -> str | None:
    """The renderer's name in the checkpoint's metadata; None if there is none to be read."""
    try:
        parsed = CheckpointPath.parse(path)
        listed = service_client.create_rest_client().list_checkpoints(parsed.run_id).result().checkpoints
    except (PlanishError, ValueError):  # weights of another place, which are sampled from and not listed
        return None
    found = next((one for one in listed if one.checkpoint_id == parsed.checkpoint_id), None)
    return (found.user_metadata or {}).get("renderer_name") if found else None


def context_window_of(service_client: Any, base_model: str) -> int | None:
    models = service_client.get_server_capabilities().supported_models
    return next((model.max_context_length for model in models if model.model_name == base_model), None)
