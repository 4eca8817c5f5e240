"""POST /tokenize and /detokenize, as in vLLM. They return the tokens of a text or of a chat, and
the text of a list of tokens.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from planish.server.http.context import Json
from planish.server.http.openai_errors import WrongParameterError
from planish.server.openai.chat import renderer_of
from planish.server.openai.chat_prompts import build_prompt
from planish.server.openai.models import OpenAIModels, ServedModel
from planish.server.openai.protocol import check_text
from planish.server.openai.requests import DetokenizeRequest, TokenizeRequest
from planish.server.results import Tenant


async def tokenize(
    models: OpenAIModels, tenant: Tenant, request: Request, options: TokenizeRequest
) -> Json:
    """Answer with the tokens of a prompt or of a chat."""
    model = await models.find(tenant, options.model)
    return await models.run_tokenizer(tenant, request, lambda: _tokenize(model, options))


def _tokenize(model: ServedModel, options: TokenizeRequest) -> Json:
    tokenization = model.tokenization
    if (options.prompt is None) == (options.messages is None):
        raise WrongParameterError("prompt", "give either prompt or messages")
    if options.messages is not None:
        if options.add_special_tokens:
            raise WrongParameterError(
                "add_special_tokens", "the chat format adds special tokens itself; leave it out"
            )
        prompt = build_prompt(model, renderer_of(model, options), options, options.tools)
        if prompt.images:
            raise WrongParameterError(
                "messages", "messages has an image, which is no list of token ids; remove it"
            )
        tokens = prompt.to_ints()
    else:
        check_text("prompt", options.prompt, tokenization.max_characters)
        tokens = tokenization.tokenizer.encode(
            str(options.prompt), add_special_tokens=options.add_special_tokens is not False
        )
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": tokenization.max_context,
        "tokens": tokens,
        "token_strs": None,
    }
    if options.return_token_strs:
        answer["token_strs"] = [
            tokenization.tokenizer.convert_ids_to_tokens(token) for token in tokens
        ]
    return answer


async def detokenize(
    models: OpenAIModels, tenant: Tenant, request: Request, options: DetokenizeRequest
) -> Json:
    """Answer with the text of a list of tokens."""
    model = await models.find(tenant, options.model)
    text = await models.run_tokenizer(tenant, request, lambda: _detokenize(model, options.tokens))
    return {"prompt": text}


def _detokenize(model: ServedModel, tokens: list[int]) -> str:
    tokenizer = model.tokenization.tokenizer
    if len(tokens) > model.tokenization.max_context:
        raise WrongParameterError(
            "tokens",
            f"tokens has {len(tokens):,} ids, and the model's context holds "
            f"{model.tokenization.max_context:,}; give fewer",
        )
    vocabulary_size = model.tokenization.vocabulary_size
    unknown = next((token for token in tokens if token >= vocabulary_size), None)
    if unknown is not None:
        raise WrongParameterError(
            "tokens",
            f"tokens contains {unknown}; the tokenizer has ids from 0 to {vocabulary_size - 1}",
        )
    return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
