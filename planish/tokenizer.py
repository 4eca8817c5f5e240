"""Load and save the tokenizers of local model directories, through `transformers`.

Invariants: only a local directory is read, never the network; code inside a checkpoint never runs;
`transformers` is imported at the first load, because that import takes seconds and may import
torch.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


class ModelTokenizer(Protocol):
    """What planish needs of a tokenizer: a tokenizer of `transformers`, or an object like it."""

    name_or_path: str

    @property
    def all_special_ids(self) -> Sequence[int]:
        """The ids of the special tokens."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The added tokens by id, special or not."""
        ...

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Return the text of the tokens, a string."""
        ...

    def convert_tokens_to_ids(self, tokens: str) -> Any:
        """Return the id of the token with this text.

        If there is no such token, return None or the id of the unknown token.
        """
        ...

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """Return the text of one token as the vocabulary writes it."""
        ...


_IMPORT_LOCK = threading.Lock()
"""transformers imports its modules at their first use, which fails in two threads at once."""


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model directory as a tokenizer of `transformers`.

    Raises UnknownModelError if `directory` is not a directory or holds no tokenizer, and
    DamagedFileError if its files cannot be read or require code from the checkpoint. Raises
    UnsupportedError if tokenizer.model is the only file and cannot be converted.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UnknownModelError(
            f"no tokenizer at {directory}: it is not a directory; name a local Hugging Face model "
            "directory"
        )
    has_fast_tokenizer = (directory / "tokenizer.json").is_file()
    model_file = directory / "tokenizer.model"
    if not has_fast_tokenizer and model_file.is_file():
        return _load_sentencepiece(model_file)
    if not has_fast_tokenizer and not (directory / "tokenizer_config.json").is_file():
        raise UnknownModelError(
            f"no tokenizer in {directory}: tokenizer.json and tokenizer_config.json are missing; "
            "copy them there"
        )
    try:
        return _load(directory)
    except Exception as error:
        # transformers and tokenizers raise bare Exception for files that they cannot parse.
        raise DamagedFileError(
            f"the tokenizer in {directory} cannot be loaded ({error}); copy tokenizer.json and "
            "tokenizer_config.json from the model again (a tokenizer that runs code of its own "
            "must be converted to tokenizer.json)"
        ) from error


_PROBE = "The capital of France is Paris."


def _load_sentencepiece(model_file: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer that only has tokenizer.model, which transformers converts."""
    remedy = "copy tokenizer.json from the model, or from another model with the same tokenizer"
    try:
        from sentencepiece import SentencePieceProcessor  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UnsupportedError(
            f"the tokenizer in {model_file.parent} is only a SentencePiece model (tokenizer.model), "
            "and the package sentencepiece, which reads it, is not installed; run "
            f"`pip install sentencepiece`, or {remedy}"
        ) from None
    try:
        tokenizer = _load(model_file.parent)
        expected = SentencePieceProcessor(model_file=str(model_file)).encode(_PROBE)
    except Exception as error:  # sentencepiece and transformers raise bare exceptions
        raise DamagedFileError(
            f"{model_file} cannot be read with sentencepiece ({error}); {remedy}"
        ) from error
    if tokenizer.encode(_PROBE, add_special_tokens=False) != expected:
        # Without tokenizer_class in tokenizer_config.json, transformers may convert it wrongly.
        raise UnsupportedError(
            f"transformers converts {model_file} to a tokenizer that gives other tokens than "
            f"sentencepiece; {remedy}"
        )
    return tokenizer


def _load(directory: Path) -> "PreTrainedTokenizerBase":
    # A module-level import would cost every command seconds, because transformers imports torch.
    with _IMPORT_LOCK:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # tokenizer.json holds the model's exact pipeline. The class that AutoTokenizer picks for a
    # model family rebuilds parts of that pipeline and may change them.
    loader = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    tokenizer = loader.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
    # Silence the tokenizer's length warning: planish's callers check the length themselves, and
    # their errors name a remedy.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def save_tokenizer(
    directory: str | Path,
    tokenizer: "Tokenizer",
    *,
    chat_template: str | None,
    max_length: int,
    special_tokens: Mapping[str, str],
) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`.

    `special_tokens` gives the special tokens by role, such as {"eos_token": "<|im_end|>"}.
    `max_length` is the model's context in tokens. The config names the class
    PreTrainedTokenizerFast, which uses tokenizer.json unchanged.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    directory = Path(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8"
    )
