"""Convert a conversation to datums, and truncate those that are too long.

Positions beyond `max_length` are cut off. A datum that would then contain no learned token is left
out. The metrics of the step contain how many datums were truncated and how many were left out. So
no conversation is rejected in the middle of a run.

Some formats strip reasoning from earlier turns. Then each answer is trained after the prompt that
it would be sampled from, so a conversation of several turns becomes several datums.
"""

from functools import partial
from typing import Any

from planish.renderers import Renderer, TrainOnWhat, datum_from_weights
from planish.renderers.datums import Reduction
from planish.renderers.renderer import Messages
from planish.supervised.types import Batch, ChatDatasetBuilderCommonConfig


def conversation_to_data(
    messages: Messages,
    renderer: Renderer,
    max_length: int | None = None,
    train_on_what: TrainOnWhat | str = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> Batch:
    """Return the datums of one conversation. `planish.renderers.datum_from_weights` describes
    `reduction`.
    """
    batch = Batch()
    for tokens, weights in renderer.build_supervised_examples(messages, train_on_what):
        end = tokens.length if max_length is None else max_length + 1
        if not weights[1:end].any():
            batch.num_left_out += 1
            continue
        batch.num_truncated += tokens.length > end
        batch.append(datum_from_weights(tokens, weights, max_length, reduction))
    return batch


def conversation_converter(config: ChatDatasetBuilderCommonConfig, renderer: Renderer) -> Any:
    """Return `conversation_to_data` with the options of a builder. It takes only the messages."""
    return partial(
        conversation_to_data,
        renderer=renderer,
        max_length=config.max_length,
        train_on_what=config.train_on_what,
        reduction=config.reduction,
    )
