"""The real embedded model, if it is in the cache. `make test` downloads it."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.model.architecture.config import ModelConfig
from planish.model.sources.embedded import DEFAULT_DIRECTORY_NAME
from planish.model.sources.resolve import models_home
from planish.model.sources.weights import load_weights
from planish.tokenizer import load_tokenizer

DIRECTORY = models_home() / DEFAULT_DIRECTORY_NAME

pytestmark = pytest.mark.skipif(
    not DIRECTORY.is_dir(), reason="the embedded model is not in the cache"
)

PROSE = (
    "The quick brown fox jumps over the lazy dog while the engineers discuss how reinforcement "
    "learning improves a language model that already understands ordinary English sentences."
)
CODE = "def gcd(a: int, b: int) -> int:\n    while b:\n        a, b = b, a % b\n    return a\n"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DIRECTORY)


def test_the_embedded_model_has_its_known_architecture_and_weights():
    config = ModelConfig.from_directory(DIRECTORY)
    assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == (
        "llama",
        30,
        576,
        49152,
    )
    assert (config.rms_norm_eps, config.rope.theta, config.tied_head) == (1e-5, 100000.0, True)
    weights = load_weights(DIRECTORY, config)
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "text",
    [
        "",
        PROSE,
        CODE,
        "12 + 30 = 42; 3.14159",
        "naïve café, 日本語, Ελληνικά, 👩‍🚀🏽",
        " two  spaces\t\r\n\n",
        "\u00e9 e\u0301",
    ],
)
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_token_ids_are_those_of_the_original_model(tokenizer):
    assert [
        tokenizer.encode(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ] == [[0], [1], [2]]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x = 1234")) == [
        "x",
        "Ġ=",
        "Ġ",
        "1",
        "2",
        "3",
        "4",
    ]
    assert len(tokenizer.encode(PROSE)) <= len(PROSE.split()) + 4
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_the_embedded_model_knows_the_capital_of_france(tokenizer):
    """The answer would be wrong if the rows of q and k were left in GGUF's order."""
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.bfloat16)
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        best = model(prompt).logits[0, -1].argmax()
    assert tokenizer.decode([best]) == " Paris"


@pytest.mark.slow
def test_the_embedded_model_answers_in_chat(tokenizer):
    model: Any = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.bfloat16)
    messages = [{"role": "user", "content": "Who wrote Romeo and Juliet?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=64, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert "Shakespeare" in tokenizer.decode(answer)
