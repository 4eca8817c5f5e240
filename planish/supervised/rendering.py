"""Convert a conversation to datums, and truncate those that are too long.

Positions beyond `max_length` are cut off. A datum that would then contain no learned token is left
out. The metrics of the step contain how many datums were truncated and how many were left out. So
no conversation is rejected in the middle of a run.

Some formats strip reasoning from earlier turns. Then each answer is trained after the prompt that
it would be sampled from, so a conversation of several turns becomes several datums.
"""

from functools import partial
from typing import Any

import torch

from planish.datasets.messages import PlainText
from planish.errors import UserError
from planish.renderers import Renderer, TrainOnWhat, datum_from_weights
from planish.renderers.datums import Reduction
from planish.renderers.messages import check_characters
from planish.renderers.renderer import Messages
from planish.supervised.types import Batch, ChatDatasetBuilderCommonConfig
from planish.types import ModelInput


def conversation_to_data(
    messages: Messages | PlainText,
    renderer: Renderer,
    max_length: int | None = None,
    train_on_what: TrainOnWhat | str = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> Batch:
    """Return the datums of one conversation, or the datum of a plain text.
    `planish.renderers.datum_from_weights` describes `reduction`.
    """
    batch = Batch()
    examples = (
        [plain_text_example(messages, renderer)]
        if isinstance(messages, PlainText)
        else renderer.build_supervised_examples(messages, train_on_what)
    )
    for tokens, weights in examples:
        end = tokens.length if max_length is None else max_length + 1
        if not weights[1:end].any():
            batch.num_left_out += 1
            continue
        batch.num_truncated += tokens.length > end
        batch.append(datum_from_weights(tokens, weights, max_length, reduction))
    return batch


def plain_text_example(text: PlainText, renderer: Renderer) -> tuple[ModelInput, torch.Tensor]:
    """Return the tokens (N) of a plain text and their weights, float32 (N): 1 for each token but a
    beginning-of-sequence token.

    The text is encoded as the tokenizer encodes it, without a chat format: its special tokens are
    tokens, so a text that a chat template has rendered is trained as it was rendered. Beginning and
    end of sequence are added, unless the text has them.
    """
    tokenizer: Any = renderer.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins = begin is not None and begin in tokenizer.encode("")
    if begins and ids[:1] != [begin]:
        ids = [begin, *ids]
    if end is not None and ids[-1:] != [end]:
        ids = [*ids, end]
    weights = torch.ones(len(ids))
    if begins:
        weights[0] = 0.0
    return ModelInput.from_ints(ids), weights


def check_conversation(
    messages: Messages | PlainText, renderer: Renderer, train_on_what: TrainOnWhat, where: str
) -> None:
    """Raise UserError, which names the row by `where`, for a conversation that cannot be trained
    on. Nothing is tokenised.
    """
    try:
        if isinstance(messages, PlainText):
            check_characters(messages, "the text")
        else:
            renderer.check_supervised_examples(messages, train_on_what)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def conversation_converter(config: ChatDatasetBuilderCommonConfig, renderer: Renderer) -> Any:
    """Return `conversation_to_data` with the options of a builder. It takes only the messages."""
    return partial(
        conversation_to_data,
        renderer=renderer,
        max_length=config.max_length,
        train_on_what=config.train_on_what,
        reduction=config.reduction,
    )
