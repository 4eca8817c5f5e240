import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from transformers import AutoTokenizer

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError
from planish.testing import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    WORD_TOKENS,
    byte_tokenizer,
    save_byte_tokenizer,
    tiny_model,
)
from planish.tokenizer import load_tokenizer, save_tokenizer


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bytes_are_ids_and_any_text_has_a_round_trip(tmp_path, family):
    tokenizer = load_tokenizer(tiny_model(tmp_path, family))
    for text in [
        "abc",
        "e\u0301 stays decomposed",
        "日本\U0001f600\x00\x7f",
        " \n\t ",
        "<|im_start|>x<think>",
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é a") == [*"é a".encode()]
    for index, token in enumerate((*SPECIAL_TOKENS, *WORD_TOKENS)):
        assert tokenizer.encode(token) == [256 + index]
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_chat_template_is_chatml(tmp_path):
    tokenizer = load_tokenizer(save_byte_tokenizer(tmp_path))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_text_beyond_the_context_is_no_warning(tmp_path, caplog, monkeypatch):
    """The length is checked where the tokens are used."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = load_tokenizer(save_byte_tokenizer(tmp_path))
    assert len(tokenizer.encode("a" * 3000)) == 3000
    assert caplog.text == ""


@pytest.mark.parametrize(
    "named", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"]
)
def test_tokenizer_json_is_taken_as_it_is_whatever_class_is_named(tmp_path, named):
    directory = tiny_model(tmp_path, "qwen2")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": named})
    )
    stored = json.loads((directory / "tokenizer.json").read_text())
    tokenizer: Any = load_tokenizer(directory)
    loaded = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder", "model"):
        assert loaded[part] == stored[part]


def test_the_same_tokens_as_auto_tokenizer(tmp_path):
    directory = tiny_model(tmp_path)
    text = "Round trip: 12 + 30 = 42 <|im_end|>"
    assert load_tokenizer(directory).encode(text) == AutoTokenizer.from_pretrained(
        directory
    ).encode(text)


def test_a_template_may_be_absent(tmp_path):
    save_tokenizer(tmp_path, byte_tokenizer(), chat_template=None, max_length=8, special_tokens={})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template is None
    assert tokenizer.model_max_length == 8


def test_absent_and_damaged_tokenizers(tmp_path):
    with pytest.raises(UnknownModelError, match="not a directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(
        UnknownModelError, match=r"tokenizer\.json and tokenizer_config\.json are missing"
    ):
        load_tokenizer(tmp_path)
    save_byte_tokenizer(tmp_path)
    for damaged in ("{", "[]", '{"version": "1.0"}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(DamagedFileError, match="cannot be loaded"):
            load_tokenizer(tmp_path)


def test_code_of_a_checkpoint_never_runs(tmp_path):
    directory = tiny_model(tmp_path / "m")
    ran = tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "Evil"})
    )
    assert load_tokenizer(directory).encode("a") == [97]
    (directory / "tokenizer.json").unlink()
    with pytest.raises(DamagedFileError, match="cannot be loaded"):
        load_tokenizer(directory)
    assert not ran.exists()


def test_importing_the_module_loads_neither_torch_nor_transformers():
    program = (
        "import sys, planish.tokenizer; sys.exit(bool({'torch', 'transformers'} & "
        "sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_sentencepiece_model_alone_needs_its_package(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"a SentencePiece model")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"pip install sentencepiece.*tokenizer\.json"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{}")


def test_a_converted_sentencepiece_model_gives_the_tokens_of_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    text = "The capital of France is Paris. A word or two, and 12 more words for a model. " * 20
    (tmp_path / "text").write_text("\n".join(text.split(". ")))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    sentence = "The words of France"
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(sentence, add_special_tokens=False) == processor.encode(sentence)
    # transformers converts the file wrongly if it does not know its class.
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="other tokens than sentencepiece"):
        load_tokenizer(tmp_path)
