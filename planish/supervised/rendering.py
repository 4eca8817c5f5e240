"""A conversation as datums, with one policy for what is too long.

What lies beyond `max_length` positions is cut off. A datum of which nothing that is learned would
be left is left out. Both are counted, and the counts are in the metrics of the step; nothing is
refused in the middle of a run.

Where a format strips reasoning from history, each answer is trained after the prompt that it is
sampled from, so a conversation of several turns gives several datums.
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
    """The datums of one conversation. Reductions: `planish.renderers.datum_from_weights`."""
    batch = Batch()
    for tokens, weights in renderer.build_supervised_examples(messages, train_on_what):
        kept = tokens.length if max_length is None else max_length + 1
        if not weights[1:kept].any():
            batch.left_out += 1
            continue
        batch.truncated += tokens.length > kept
        batch.append(datum_from_weights(tokens, weights, max_length, reduction))
    return batch


def rendering_of(config: ChatDatasetBuilderCommonConfig, renderer: Renderer) -> Any:
    """`conversation_to_data` by the options of a builder: a function of the messages alone."""
    return partial(
        conversation_to_data,
        renderer=renderer,
        max_length=config.max_length,
        train_on_what=config.train_on_what,
        reduction=config.reduction,
    )
