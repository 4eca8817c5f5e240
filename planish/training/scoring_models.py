"""The models that score a policy's tokens: the reference of a KL penalty, and teachers.

A scoring model reads the token ids of the policy's prompts and answers. So it needs the policy's
vocabulary, and the answers must end where its context window ends. It should have the policy's chat
format. All this is settled before a run begins, and not at the first long answer or the first
unknown token.
"""

# pyright: reportUnknownMemberType=false

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import chz

from planish import ServiceClient
from planish.errors import UnknownModelError, UserError
from planish.renderers.templates import chat_template_of
from planish.runlog.checkpoint_info import (
    find_checkpoint,
    recorded_renderer_name,
    require_base_model,
)
from planish.runlog.checkpoints import choose_renderer
from planish.runlog.run_directory import checkpoint_of
from planish.types import SupportedModel

logger = logging.getLogger(__name__)


@chz.chz
class KLReferenceConfig:
    """The reference policy of the KL penalty."""

    base_model: str
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="checkpoint of the reference; none = the base model itself"
    )


C = TypeVar("C", bound=KLReferenceConfig)


def pin_checkpoint(scorer: C, option: str) -> C:
    """Return the config with a run directory replaced by its newest checkpoint. The directory may
    have a newer checkpoint when the policy's run is resumed, and the scoring model must not change.
    Raises UserError, which names `option`, if there is no checkpoint.
    """
    if scorer.load_checkpoint_path is None:
        return scorer
    try:
        path = checkpoint_of(scorer.load_checkpoint_path)
    except UserError as error:
        raise UserError(f"{option}: {error}") from error
    return chz.replace(scorer, load_checkpoint_path=path)


async def scoring_client(
    scorer: KLReferenceConfig,
    service_client: ServiceClient,
    policy_model: str,
    renderer_name: str | None,
    option: str,
) -> Any:
    """Return a sampling client of `scorer`, which scores tokens of `policy_model`. A warning
    reports another chat format (`warn_of_other_format`).

    Raises UserError, which names `option`, if the scorer's checkpoint is not found or belongs to
    another base model, or if its vocabulary is not the policy's.
    """
    scorer = pin_checkpoint(scorer, option)
    if scorer.load_checkpoint_path is None:
        client = await service_client.create_sampling_client_async(base_model=scorer.base_model)
    else:
        client = await service_client.create_sampling_client_async(
            model_path=scorer.load_checkpoint_path
        )
        require_base_model(client, scorer.base_model, scorer.load_checkpoint_path, option)
    await require_one_vocabulary(policy_model, scorer.base_model, service_client, option)
    await asyncio.to_thread(
        warn_of_other_format, scorer, service_client, policy_model, renderer_name, option
    )
    return client


def warn_of_other_format(
    scorer: KLReferenceConfig,
    service_client: ServiceClient,
    policy_model: str,
    renderer_name: str | None,
    option: str,
) -> None:
    """Log a warning, which names `option`, if `scorer` has another chat format than the prompts. It
    then scores texts that it was not trained on.

    `renderer_name` is the format of the prompts; None = that of `policy_model`. A checkpoint has
    the format that its run recorded. Nothing is reported of a model whose format is not known.
    """
    recorded_name = None
    if scorer.load_checkpoint_path is not None:
        path = checkpoint_of(scorer.load_checkpoint_path)
        recorded_name = recorded_renderer_name(find_checkpoint(service_client, path))
    if (scorer.base_model, recorded_name) == (policy_model, renderer_name):
        return
    try:
        policy_format = _chat_format(service_client, policy_model, renderer_name)
        scorer_format = _chat_format(service_client, scorer.base_model, recorded_name)
    except UnknownModelError:
        return
    if policy_format == scorer_format:
        return
    (policy_name, _), (scorer_name, _) = policy_format, scorer_format
    logger.warning(
        "%s: the prompts have the chat format %s, and %s has %s: it scores texts in a format that "
        "is not its own; give renderer_name, or another model",
        option,
        policy_name,
        scorer.load_checkpoint_path or scorer.base_model,
        "another chat template" if policy_name == scorer_name else scorer_name,
    )


def _chat_format(
    service_client: ServiceClient, model_name: str, renderer_name: str | None
) -> tuple[str, str | None]:
    """Return the name of a renderer, and the chat template if the renderer applies it."""
    tokenizer = service_client.create_sampling_client(base_model=model_name).get_tokenizer()
    name = choose_renderer(renderer_name, model_name, tokenizer).name
    return name, chat_template_of(tokenizer) if name == "template" else None


async def require_one_vocabulary(
    policy_model: str, other_model: str, service_client: ServiceClient, option: str
) -> None:
    """Raise UserError, which names `option`, unless the base model `other_model` has the vocabulary
    of `policy_model`: the same tokens, and an embedding for each id that the policy can sample.

    The embedding tables of models with one tokenizer may be padded to different sizes. A policy can
    sample the ids of its padding.
    """
    if other_model == policy_model:
        return
    clients = [
        await service_client.create_sampling_client_async(base_model=name)
        for name in (policy_model, other_model)
    ]
    tokenizers = [await asyncio.to_thread(client.get_tokenizer) for client in clients]
    difference = vocabulary_difference(*(tokenizer.get_vocab() for tokenizer in tokenizers))
    if difference is not None:
        raise UserError(
            f"{option}: the vocabulary of {policy_model} is not that of {other_model} "
            f"({difference}); give a model with the tokenizer of model_name"
        )
    sizes = [
        (await model_info(service_client, name)).vocab_size for name in (policy_model, other_model)
    ]
    policy_size, other_size = sizes
    if policy_size is not None and other_size is not None and policy_size > other_size:
        raise UserError(
            f"{option}: {policy_model} has {policy_size} token ids, and {other_model} only "
            f"{other_size}, because their embedding tables are padded to different sizes; a "
            "sampled id of the padding could not be scored. Give a model with at least as many ids"
        )


def vocabulary_difference(first: Mapping[str, int], second: Mapping[str, int]) -> str | None:
    """Describe the differing token with the lowest id. None if the vocabularies are equal."""
    differing = first.items() ^ second.items()
    if not differing:
        return None
    token, _ = min(differing, key=lambda item: (item[1], item[0]))
    ids = [str(vocabulary.get(token, "missing")) for vocabulary in (first, second)]
    return f"the id of token {token!r} is {ids[0]} in the first and {ids[1]} in the second"


async def shared_context_window(
    service_client: ServiceClient, policy_model: str, scorers: Mapping[str, str]
) -> tuple[int | None, str]:
    """Return the smallest context window, in tokens, of the policy and of the models that score its
    answers, and the name of that model. None: the service knows no window.

    `scorers` maps the option that names a scoring model to its base model. A line is printed for
    each scorer whose window is smaller than the policy's, because answers end there.
    """
    window = (await model_info(service_client, policy_model)).max_context_length
    smallest, name = window, policy_model
    for option, base_model in scorers.items():
        other = (await model_info(service_client, base_model)).max_context_length
        if other is None or (window is not None and other >= window):
            continue
        print(
            f"{option}: a prompt and its answer have at most {other} tokens together, because that "
            f"is the context window of {base_model}; {policy_model} has {window}"
        )
        if smallest is None or other < smallest:
            smallest, name = other, base_model
    return smallest, name


async def model_info(service_client: ServiceClient, base_model: str) -> SupportedModel:
    """Return what the service knows of a base model; only its name if it knows nothing.

    A model that is named by its directory is known after it is loaded. So it is loaded if
    necessary.
    """
    info = (await service_client.get_server_capabilities_async()).model(base_model)
    if info is None or info.max_context_length is None:
        await service_client.create_sampling_client_async(base_model=base_model)
        info = (await service_client.get_server_capabilities_async()).model(base_model)
    return info or SupportedModel(base_model)
