"""Tokenizers made from SentencePiece put a blank before every text. Pieces that renderers tokenise
separately get no such blank.
"""

import pytest
from family_tokenizers import CORPUS
from sentencepiece_tokenizer import BYTES, sentencepiece_tokenizer
from transformers import PreTrainedTokenizerFast

from planish.renderers import get_renderer
from planish.renderers.termination import Termination

MESSAGES = [
    {"role": "user", "content": "What is 6 times 7?"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "  Fine </s> yes\n"},
    {"role": "assistant", "content": "42"},
]
TEXT = "User: What is 6 times 7?\n\nAssistant: It is 42.\n\nUser:   Fine </s> yes\n\n\nAssistant:"


@pytest.fixture(scope="module", params=["first", "each"])
def tokenizer(request) -> PreTrainedTokenizerFast:
    return sentencepiece_tokenizer(request.param, CORPUS)


def written(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """Return the text of the tokens with every blank. Decoding hides the first."""
    assert ids[0] == tokenizer.bos_token_id
    decoded = [str(tokenizer.convert_ids_to_tokens(id_)) for id_ in ids[1:]]
    for name in BYTES:
        decoded = [chr(int(token[3:5], 16)) if token == name else token for token in decoded]
    return "".join(decoded).replace("▁", " ")


def test_a_transcript_has_only_its_own_blanks(tokenizer):
    renderer = get_renderer("role_colon", tokenizer)
    prompt = renderer.build_generation_prompt(MESSAGES[:3]).to_ints()
    assert written(tokenizer, prompt) == f" {TEXT}"
    assert prompt.count(tokenizer.eos_token_id) == 0
    example, weights = renderer.build_supervised_example(MESSAGES)
    assert written(tokenizer, example.to_ints()) == f" {TEXT} 42\n\nUser:"
    assert example.to_ints()[: len(prompt)] == prompt
    trained = [
        id_ for id_, weight in zip(example.to_ints(), weights.tolist(), strict=True) if weight
    ]
    message, termination = renderer.parse_response(trained)
    assert (message["content"], termination) == ("42", Termination.STOP_SEQUENCE)


def test_a_continuation_adds_no_blank(tokenizer):
    renderer = get_renderer("role_colon", tokenizer)
    prompt = renderer.build_generation_prompt(MESSAGES[:1]).to_ints()
    whole = renderer.build_generation_prompt(MESSAGES[:3]).to_ints()
    answer = renderer.build_supervised_example(MESSAGES[:2])[0].to_ints()[len(prompt) :]
    for sampled in (answer, answer[: -len(renderer.codec.encode(["User:"], answer[-1]))]):
        continuation = renderer.build_continuation(MESSAGES[:3], 1, sampled)
        assert continuation is not None
        assert written(tokenizer, prompt + sampled + continuation.to_ints()) == written(
            tokenizer, whole
        )


def test_text_after_a_control_token_is_tokenized_as_in_the_whole_text(tokenizer):
    renderer = get_renderer("qwen3_instruct", tokenizer)
    text = "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    ids = renderer.build_generation_prompt([{"role": "user", "content": "hi there"}]).to_ints()
    assert ids == tokenizer.encode(text, add_special_tokens=False)
