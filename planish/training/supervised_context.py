"""Lengths that the models of a run can hold, so that no batch in the middle of it is refused."""

from collections.abc import Sequence
from typing import TypeVar

import chz

from planish import ServiceClient
from planish.supervised.types import ChatDatasetBuilder
from planish.training.supervised_config import Config

C = TypeVar("C", bound=Config)


async def within_context(
    config: C, service_client: ServiceClient, readers: Sequence[tuple[str, int]] = ()
) -> C:
    """`config` with its data set's `max_length` lowered to what the models' contexts hold, which is
    then said.

    `readers`: base models that read each example besides the one that is trained, and how many
    tokens more than `max_length` each needs. A builder of another kind than chats keeps its
    lengths, as do models of which the service does not say the context.
    """
    builder = config.dataset_builder
    if not isinstance(builder, ChatDatasetBuilder):
        return config
    asked = builder.common_config.max_length
    held = []
    for name, more in ((config.model_name, 0), *readers):
        context = (await service_client.get_server_capabilities_async()).context_of(name)
        if context is None:  # of a model that is named by its directory, known once it is loaded
            await service_client.create_sampling_client_async(base_model=name)
            context = (await service_client.get_server_capabilities_async()).context_of(name)
        if context is not None:
            held.append((context - more, name))
    if not held or (asked is not None and asked <= min(held)[0]):
        return config
    most, name = min(held)
    print(f"max_length={asked} is lowered to {most}: the context of {name} holds no more")
    common = chz.replace(builder.common_config, max_length=most)
    return chz.replace(config, dataset_builder=chz.replace(builder, common_config=common))
