"""The bytes of a text bound its tokens, in every format and with every kind of tokenizer."""

import asyncio
from typing import Any

import pytest
from family_tokenizers import SPECIAL, family_tokenizer
from hypothesis import HealthCheck, given, settings, strategies as st
from oracle_cases import CONVERSATIONS, TOOL_CONVERSATIONS, planish_messages, with_tools
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from planish.renderers import FORMATS, get_renderer
from planish.renderers.codec import Codec, token_bounds
from planish.rl.environments.prompt_selection import length_bound, select_problems
from planish.types import ModelInput


def sentencepiece(normalizer: Any, splits_text: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and of few pieces, as those of SentencePiece are in tokenizers.json."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "fi"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splits_text:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[attr-defined]
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[attr-defined]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BLANKS = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
TOKENIZERS: dict[str, Any] = {
    **{family: family_tokenizer(family) for family in SPECIAL},
    "blanks": sentencepiece(BLANKS, splits_text=False),
    "compatible": sentencepiece(normalizers.NFKC(), splits_text=True),
    "decomposed": sentencepiece(normalizers.NFKD(), splits_text=True),
}
text = st.text(max_size=40) | st.text(
    alphabet="ab é\n東🙂\u0344\ufdfa\ufb01ﬁ<|im_end|> ▁", max_size=40
)


@pytest.mark.parametrize("family", TOKENIZERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=text, after=st.sampled_from([None, 5]))
def test_a_text_has_at_most_as_many_tokens_as_its_bound(family, text, after):
    codec = Codec(TOKENIZERS[family])
    ids = codec.encode_text(text, after)
    with token_bounds():
        assert len(codec.encode_text(text, after)) >= len(ids)
    assert codec.encode_text(text, after) == ids, "the block has ended"


CASES = [
    (name, family)
    for name in FORMATS
    if not name.startswith("template")
    for family in SPECIAL
    if set(FORMATS[name](None).capabilities.required) <= set(family_tokenizer(family).get_vocab())
]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_prompt_has_at_most_as_many_tokens_as_its_bound(name, family):
    renderer = get_renderer(name, family_tokenizer(family))
    conversations = list(CONVERSATIONS.values())
    has_tools = renderer.format.capabilities.tools
    prompts = [planish_messages(each) for each in conversations]
    if has_tools:
        prompts += [
            with_tools(renderer, planish_messages(each)) for each in TOOL_CONVERSATIONS.values()
        ]
    num_compared = 0
    for messages in prompts:
        try:
            exact = renderer.build_generation_prompt(messages).length
        except ValueError:  # formats without reasoning
            continue
        with token_bounds():
            bound = renderer.build_generation_prompt(messages).length
        assert exact <= bound <= 8 * exact
        num_compared += 1
    assert num_compared >= 4


@pytest.fixture
def tokenised(monkeypatch):
    """The texts that codecs give to their tokenizer."""
    texts: list[str] = []
    encode = Codec._encode

    def noted(self: Codec, text: str) -> list[int]:
        texts.append(text)
        return encode(self, text)

    monkeypatch.setattr(Codec, "_encode", noted)
    return texts


def test_only_prompts_that_may_be_too_long_are_tokenised(tokenised):
    renderer = get_renderer("qwen3", family_tokenizer("qwen"))

    def prompt_of(text: str) -> ModelInput:
        return renderer.build_generation_prompt([{"role": "user", "content": text}])

    texts = ["a " * 10, "é" * 30, "東" * 400, "b" * 5000]
    selection = select_problems(texts, prompt_of, str, split="train")
    assert selection.lengths is not None
    assert selection.lengths.longest(above=6000) is None
    assert tokenised == []
    found = selection.lengths.longest(above=4000)
    assert {text for text in texts if any(text in each for each in tokenised)} == {texts[3]}
    exact = [prompt_of(text).length for text in texts]
    assert (found is not None) == (max(exact) > 4000)
    longest = selection.lengths.longest()
    assert longest is not None
    assert longest.num_tokens == max(exact)
    limit = sorted(exact)[2]
    limited = select_problems(texts, prompt_of, str, split="train", max_prompt_tokens=limit)
    assert limited.problems == [
        text for text, length in zip(texts, exact, strict=True) if length <= limit
    ]


def test_an_environment_that_fails_without_tokens_is_rendered_with_them(tokenised):
    """It may decode its prompt, or report a prompt as too long."""
    renderer = get_renderer("qwen3", family_tokenizer("qwen"))

    def prompt_of(text: str) -> ModelInput | None:
        tokenised.clear()
        prompt = renderer.build_generation_prompt([{"role": "user", "content": text}])
        if tokenised:
            return prompt
        if text == "None":
            return None
        raise AssertionError(text)

    for given_text in ("None", "error"):
        assert length_bound(prompt_of, given_text) is None
        selection = select_problems([given_text], prompt_of, str, split="train")
        assert selection.lengths is not None
        exact = prompt_of(given_text)
        assert exact is not None
        assert selection.lengths.bounds == [exact.length]


def test_the_block_concerns_its_own_task_only():
    codec = Codec(family_tokenizer("qwen"))

    async def other() -> list[int]:
        await asyncio.sleep(0)
        return codec.encode_text("a")

    async def both() -> list[int]:
        task = asyncio.create_task(other())
        with token_bounds():
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return await task

    assert asyncio.run(both()) == codec.encode_text("a")
