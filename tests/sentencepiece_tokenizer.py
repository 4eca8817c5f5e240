"""Small tokenizers of SentencePiece's kind, which put a blank before texts."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MARKS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = ["The answer is 42. It is 42, and the sea is a place.", "Größe, naïve, привет"] * 20


def sentencepiece_tokenizer(kind: str, corpus: Sequence[str] = CORPUS) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts a blank before each text, as in Llama 2 and Mistral 7B ("each"),
    or before the first one ("first").
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    undo = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(undo)
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=MARKS + BYTES, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    spec = json.loads(tokenizer.to_str())
    # bytes are plain
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in MARKS]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
