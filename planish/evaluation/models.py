"""Open a model by one name: a base model, a checkpoint, or the directory of a training run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish import SamplingClient, ServiceClient
from planish.errors import UnknownModelError
from planish.model.sources.weights import weights_fingerprint
from planish.renderers import Renderer
from planish.runlog.checkpoint_info import find_checkpoint, recorded_renderer_name
from planish.runlog.checkpoints import choose_renderer
from planish.runlog.run_directory import weights_of

CHECKPOINT_SCHEMES = ("tinker://", "planish://")


@dataclass(frozen=True)
class OpenedModel:
    """A model that is ready to be evaluated."""

    name: str
    """The path of a checkpoint, or the name of the base model."""
    sampling_client: SamplingClient
    renderer: Renderer
    context_window: int | None
    """The maximum number of tokens; None if the service does not report it."""
    weights: str | None = None
    """Distinguishes the weights from other weights under the same name.

    None if that is not possible, as for the base model of a server.
    """


def open_model(
    service_client: ServiceClient, name: str, renderer_name: str | None = None
) -> OpenedModel:
    """Open a model by name.

    The chat format is `renderer_name` if given, else the one that the checkpoint was trained with,
    else the base model's own.
    """
    resolved = weights_of(name)
    is_checkpoint = resolved.startswith(CHECKPOINT_SCHEMES)
    source: dict[str, Any] = {"model_path": resolved} if is_checkpoint else {"base_model": resolved}
    client = service_client.create_sampling_client(**source)
    base_model = client.get_base_model()
    tokenizer = client.get_tokenizer()
    checkpoint = find_checkpoint(service_client, resolved) if is_checkpoint else None
    renderer = choose_renderer(
        renderer_name or recorded_renderer_name(checkpoint), base_model, tokenizer
    )
    if is_checkpoint:
        weights = checkpoint.time.isoformat() if checkpoint else None
    else:
        weights = _fingerprint(Path(tokenizer.name_or_path))
    context_window = service_client.get_server_capabilities().context_length_of(base_model)
    return OpenedModel(resolved, client, renderer, context_window, weights)


def _fingerprint(directory: Path) -> str | None:
    """Return the fingerprint of a base model's files.

    None if the directory holds only a tokenizer, as for the model of a server.
    """
    try:
        return weights_fingerprint(directory)
    except UnknownModelError:
        return None
