"""A cache of renderers by model name, one for each process.

A renderer contains a tokenizer of several megabytes. Group builders are pickled, so they carry
names instead. They get the renderer from this cache when they make their environments, in this
process or in a worker.

A server may have models whose names only it knows. So a run first gets the tokenizer from the
service (`learn_renderer`). Other processes resolve the name as an engine does
(planish/model/sources/resolve.py).
"""

from planish import ServiceClient
from planish.model.sources.resolve import resolve_model
from planish.renderers import Renderer
from planish.runlog.checkpoints import choose_renderer
from planish.tokenizer import ModelTokenizer, load_tokenizer

_RENDERERS: dict[tuple[str, str | None], Renderer] = {}


def model_renderer(model_name: str, renderer_name: str | None = None) -> Renderer:
    """Return the named renderer, or the model's default one, with the model's tokenizer."""
    if (model_name, renderer_name) not in _RENDERERS:
        return _keep(model_name, renderer_name, load_tokenizer(resolve_model(model_name)))
    return _RENDERERS[model_name, renderer_name]


def learn_renderer(
    service_client: ServiceClient, model_name: str, renderer_name: str | None = None
) -> Renderer:
    """Return the named renderer, or the model's default one, with the service's tokenizer.

    Later calls of `model_renderer` in this process return this renderer.
    """
    tokenizer = service_client.create_sampling_client(base_model=model_name).get_tokenizer()
    return _keep(model_name, renderer_name, tokenizer)


def _keep(model_name: str, renderer_name: str | None, tokenizer: ModelTokenizer) -> Renderer:
    renderer = choose_renderer(renderer_name, model_name, tokenizer)
    _RENDERERS[model_name, renderer_name] = renderer
    return renderer
