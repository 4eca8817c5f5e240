"""The tokenizer with which llguidance compiles constraints: that of the model, with a token for the
end of a text, and without the tokens that the model cannot sample.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from planish.engine.constraints.processes import TokenizerSpec
from planish.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_TOKEN = "<|planish: end of the text|>"


def tokenizer_spec(tokenizer: PreTrainedTokenizerBase, num_logits: int) -> TokenizerSpec:
    """Return the tokenizer of a model with `num_logits` logits. Raise UnsupportedError if llguidance
    cannot read such a tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(
            "SamplingParams.constraint needs a tokenizer with a tokenizer.json, and this model has "
            "none; convert its tokenizer, or leave the constraint out"
        )
    text = backend.to_str()
    if max(backend.get_vocab().values()) >= num_logits:
        text = _without_tokens_from(text, num_logits)
    copy = Tokenizer.from_str(text)
    copy.no_padding()
    copy.no_truncation()
    tokens = {*copy.get_vocab().values()}
    copy.add_special_tokens([AddedToken(_END_TOKEN, special=True, normalized=False)])
    end_token = copy.token_to_id(_END_TOKEN)
    if end_token is None or end_token in tokens:
        raise UnsupportedError(
            "SamplingParams.constraint cannot be used with this model: the ids of its "
            "tokenizer.json have gaps; number the tokens without gaps, or leave the constraint out"
        )
    num_bits = max(num_logits, max(tokens) + 1, end_token + 1)
    return TokenizerSpec(copy.to_str(), num_bits, end_token)


def _without_tokens_from(text: str, first: int) -> str:
    """Return a tokenizer.json without the tokens from id `first` on. Their texts are then written
    with other tokens.
    """
    data = json.loads(text)
    data["added_tokens"] = [one for one in data["added_tokens"] if one["id"] < first]
    model = data["model"]
    if isinstance(model["vocab"], list):  # Unigram: the place in the list is the id
        del model["vocab"][first:]
        return json.dumps(data)
    vocabulary = model["vocab"] = {
        token: id_ for token, id_ in model["vocab"].items() if id_ < first
    }
    if "merges" in model:
        pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if {left, right, left + right} <= vocabulary.keys()
        ]
    return json.dumps(data)
