"""Small tokenizers that split text as the model families' own do, with their special tokens and
chat templates. Each is a byte-level BPE trained on a few sentences, so that it has merges across
line breaks and spaces. At these places, tokenising a message in pieces could differ from tokenising
the rendered template.
"""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from planish.testing import byte_symbols

TEMPLATES = Path(__file__).parent / "chat_templates"

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}| ?", r"|\p{N}{1,3}| ?")

CORPUS = [
    "The answer is 42.\n\nUser: What is 6 times 7?\n\nAssistant: It is 42.\n\n",
    "system\n\nuser\n\nassistant\n\n  indented text\n\n\n    more of it\n",
    'def add(a, b):\n    return a + b\n\n<tool>{"name": "add", "arguments": {"a": 1}}</tool>\n',
    "Fine :) yes:) really:)",
    "Größe, naïve, 東京, привет 🙂🙂 <think about it> im_start im_end tool_call think |>|><|<|",
] * 20

SPECIAL = {
    "qwen": [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"),
        *("<|vision_start|>", "<|vision_end|>"),
    ],
    "smollm2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ],
    "deepseek": [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
    ],
    "kimi": [
        "[BOS]",
        "[EOS]",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<|im_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    "gpt_oss": [
        "<|endoftext|>",
        "<|return|>",
        "<|constrain|>",
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|call|>",
    ],
    "smollm3": ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"],
    "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
}
# In Qwen's tokenizers these are single tokens, but not special ones.
QWEN_WORDS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|fim_prefix|>",
]
# Tokens that are single, but not special, in the other families' tokenizers.
OTHER_WORDS = {
    "qwen": QWEN_WORDS,
    "smollm3": QWEN_WORDS[:6],
    "deepseek": ["<think>", "</think>"],
    "kimi": ["<think>", "</think>"],
}
ROLES = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "smollm2": {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    },
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "smollm3": {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    "deepseek": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "kimi": {"bos_token": "[BOS]", "eos_token": "[EOS]"},
    "gpt_oss": {"bos_token": "<|endoftext|>", "eos_token": "<|return|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
}


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def family_tokenizer(family: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `family`, a key of SPECIAL. `chat_template` names a file of
    chat_templates/.
    """
    if family == "gemma":
        return _wrapped(_sentencepiece(), family, chat_template)
    tokenizer = Tokenizer(models.BPE(ignore_merges=family == "llama3"))
    if family == "smollm2":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    else:
        split = Regex(QWEN_SPLIT if family == "qwen" else LLAMA_SPLIT)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL[family]]
    # As in SmolLM2's own file, its special tokens are also words of the BPE vocabulary.
    own = SPECIAL[family] if family == "smollm2" else []
    trainer = trainers.BpeTrainer(
        vocab_size=520, show_progress=False, initial_alphabet=byte_symbols(), special_tokens=own
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(special)
    if family in OTHER_WORDS:
        tokenizer.add_tokens(
            [AddedToken(text, special=False, normalized=False) for text in OTHER_WORDS[family]]
        )
    if family == "llama3":
        bos = "<|begin_of_text|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    return _wrapped(tokenizer, family, chat_template)


def _sentencepiece() -> Tokenizer:
    """Return a BPE over characters with byte fallback, and runs of line breaks as tokens, as
    Gemma's.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    own = [*SPECIAL["gemma"], *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=own)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer makes every token of `own` an added one, but bytes are found by the model alone.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in SPECIAL["gemma"]
    ]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    runs = [character * count for character in "\n " for count in range(1, 9)]
    tokenizer.add_tokens(
        [AddedToken(run, special=False, normalized=False) for run in runs if run != " "]
    )
    return tokenizer


def _wrapped(
    tokenizer: Tokenizer, family: str, chat_template: str | None
) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **ROLES[family]
    )
    fast.chat_template = template(chat_template) if chat_template else None
    return fast


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary has whole words, control tokens among them, and a token
    for unknown words.
    """
    words = [
        "<unk>",
        "<|im_start|>",
        "<|im_end|>",
        "user",
        "assistant",
        "system",
        "hello",
        "world",
        "\n",
        "<",
        ">",
        "|",
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| "), behavior="isolated")
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in words[:3]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>"
    )
