"""The renderer of a model, made once in each process.

A renderer holds a tokenizer, which is megabytes. Builders of groups therefore carry names, which
pickle as a few bytes, and ask here when they make their environments, in this process or in another
one.

The name of a model may be known to the service alone, such as a server with models of its own. So a
run asks the service first (`learn_renderer`). A process that no run prepared finds the model as an
engine would (planish/model/sources.py).
"""

from planish import ServiceClient
from planish.model.sources import resolve_model
from planish.renderers import Renderer
from planish.runlog.checkpoints import choose_renderer
from planish.tokenizer import ModelTokenizer, load_tokenizer

_RENDERERS: dict[tuple[str, str | None], Renderer] = {}


def model_renderer(model_name: str, renderer_name: str | None = None) -> Renderer:
    """The named renderer, or the one that the model is known for, over the model's tokenizer."""
    if (model_name, renderer_name) not in _RENDERERS:
        return _keep(model_name, renderer_name, load_tokenizer(resolve_model(model_name)))
    return _RENDERERS[model_name, renderer_name]


def learn_renderer(
    service_client: ServiceClient, model_name: str, renderer_name: str | None = None
) -> Renderer:
    """The same, with the tokenizer that the service has for the name. From now on `model_renderer`
    gives this one.
    """
    tokenizer = service_client.create_sampling_client(base_model=model_name).get_tokenizer()
    return _keep(model_name, renderer_name, tokenizer)


def _keep(model_name: str, renderer_name: str | None, tokenizer: ModelTokenizer) -> Renderer:
    renderer = choose_renderer(renderer_name, model_name, tokenizer)
    _RENDERERS[model_name, renderer_name] = renderer
    return renderer
