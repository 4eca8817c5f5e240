"""Limit `max_length` to the context windows of a run's models, so that no batch is rejected."""

# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from typing import TypeVar

import chz

from planish import ServiceClient
from planish.supervised.types import ChatDatasetBuilder
from planish.training.scoring_models import model_info
from planish.training.supervised_config import Config

C = TypeVar("C", bound=Config)


async def limit_to_context(
    config: C, service_client: ServiceClient, other_models: Sequence[tuple[str, int]] = ()
) -> C:
    """Return `config` with its dataset's `max_length` lowered to the smallest context window.

    A message is printed if `max_length` changes. `other_models` are other base models that read
    each example, such as a teacher, with the number of tokens that each needs beyond `max_length`.
    A builder that is not a ChatDatasetBuilder is returned unchanged. Models whose context window
    the service does not report are ignored.
    """
    builder = config.dataset_builder
    if not isinstance(builder, ChatDatasetBuilder):
        return config
    max_length = builder.common_config.max_length
    limits: list[tuple[int, str]] = []
    for name, extra_tokens in ((config.model_name, 0), *other_models):
        context_window = (await model_info(service_client, name)).max_context_length
        if context_window is not None:
            limits.append((context_window - extra_tokens, name))
    if not limits or (max_length is not None and max_length <= min(limits)[0]):
        return config
    limit, name = min(limits)
    print(f"max_length={max_length} is lowered to {limit}, because of the context window of {name}")
    common_config = chz.replace(builder.common_config, max_length=limit)
    return chz.replace(config, dataset_builder=chz.replace(builder, common_config=common_config))
