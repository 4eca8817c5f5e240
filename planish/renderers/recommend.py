"""Find the renderer that a model was trained with, from its name or the files of a local directory.

For a directory, the right renderer is the one that writes the same text as its chat template. Base
models often contain their family's template without having been trained on it. If the
end-of-sequence token is not the template's end of turn, the model is such a base model. If no
renderer writes what the template writes, the renderer is `template`, which uses the template
itself. For a name, the model family decides. An unknown name is an error that lists the renderers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish.errors import DamagedFileError, UnknownModelError
from planish.model.architecture.hf_config.families import (
    FAMILIES,
    MODEL_TYPES,
    MULTIMODAL_ARCHITECTURES,
)
from planish.model.architecture.hf_config.json_fields import MAX_CONFIG_BYTES, read_json
from planish.renderers.chat_format import ChatFormat
from planish.renderers.chatml import ChatML
from planish.renderers.llama3 import BOS, EOT, START
from planish.renderers.mistral import Mistral
from planish.renderers.registry import FORMATS
from planish.renderers.template_markup import ChatTemplate
from planish.renderers.template_traits import find_traits
from planish.renderers.templates import (
    HELLO,
    MISTRAL_SYSTEM,
    choose_template,
    default_system_message,
    render_template,
    writes_like,
    writes_reasoning_like,
    writes_tools_like,
)

RENDERERS_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"(?:meta-)?llama-3(?:\.\d)?-\d+b-instruct", "llama3"),
    (r"(?:meta-)?llama-3(?:\.\d)?-\d+b", "role_colon"),
    (r"qwen3-[\d.]+b(?:-a[\d.]+b)?-base", "role_colon"),
    (r"qwen3-[\d.]+b(?:-a[\d.]+b)?-instruct-2507", "qwen3_instruct"),
    (r"qwen3-[\d.]+b(?:-a[\d.]+b)?", "qwen3"),
    (r"qwen3\.[568]-[\d.]+b(?:-a[\d.]+b)?-base", "role_colon"),
    # The templates of the small models disable thinking by default.
    (r"qwen3\.5-(?:0\.8|2)b", "qwen3_5_disable_thinking"),
    (r"qwen3\.[56]-[\d.]+b(?:-a[\d.]+b)?", "qwen3_5"),
    (r"qwen3\.8-[\d.]+b(?:-a[\d.]+b)?", "qwen3_8_xhigh_reasoning"),
    (r"qwen2\.5-(?:math-|coder-)?[\d.]+b-instruct(?:-1m)?", "chatml"),
    (r"qwen2\.5-(?:math-|coder-)?[\d.]+b", "role_colon"),
    (r"smollm2-[\d.]+[mb]-instruct", "chatml"),
    (r"smollm2-[\d.]+[mb]", "role_colon"),
    (r"smollm3-[\d.]+b-base", "role_colon"),
    (r"smollm3-[\d.]+b", "smollm3"),
    (r"gemma-3-\d+[mb]-it", "gemma3"),
    (r"(?:gemma-3-|gemma3-)\d+[mb](?:-pt)?", "role_colon"),
    (r"gpt-oss-\d+b", "gpt_oss_no_sysprompt"),
    (r"deepseek-v3\.1-base", "role_colon"),
    (r"deepseek-v3\.1", "deepseekv3"),
    (r"kimi-k2-thinking", "kimi_k2"),
    (r"kimi-k2\.5", "kimi_k25"),
    (r"kimi-k2\.6", "kimi_k26"),
    (r"nvidia-nemotron-3-(?:nano|super)-.*", "nemotron3"),
    (r"nvidia-nemotron-3(?:-ultra|\.5-lightning|\.5-super-vl)-.*", "nemotron3_ultra"),
    (r"ministral-3-\d+b-(?:instruct|reasoning)-2512", "mistral"),
    (r"ministral-3-\d+b-base-2512", "role_colon"),
    (r"mistral-small-(?:3\.[12]-)?24b-instruct-\d+", "mistral"),
    (r"mistral-7b-v0\.[13]", "role_colon"),
    (r"(?:mistral-7b|mixtral-8x\d+b|mistral-nemo)-instruct-.*|magistral-small-.*", "template"),
    (r"qwen3-vl-[\d.]+b(?:-a[\d.]+b)?-instruct", "qwen3_vl_instruct"),
    (r"qwen3-vl-[\d.]+b(?:-a[\d.]+b)?-thinking", "qwen3_vl"),
    (r"qwen2(?:\.5)?-vl-[\d.]+b-instruct", "chatml"),
    (r"qwen3-[\d.]+b(?:-a[\d.]+b)?-thinking-2507|qwen3-coder-.*-instruct", "template"),
    (r"deepseek-r1-distill-.*|deepseek-r1-0528-qwen3-8b", "template"),
    (
        r"phi-4(?:-mini)?(?:-instruct|-reasoning|-reasoning-plus)?|phi-3(?:\.5)?-.*-instruct",
        "template",
    ),
    (r"olmo-(?:2|3|3\.1)-.*-(?:instruct|think)|hermes-[234]-.*", "template"),
    (r"gemma-2-\d+b-it|granite-[34]\.\d-.*(?<!base)|seed-oss-\d+b-instruct", "template"),
    (r"glm-4(?:\.\d)?-.*(?<!base)|exaone-4\.0-.*|lfm2(?:\.5)?-.*(?<!base)", "template"),
    (r"mistral-(?:nemo|small-24b)-base-\d+", "role_colon"),
)
"""Model names without their organisation, in lower case, and their renderers."""

_SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
MAX_TOKENIZER_BYTES = 256 << 20
"""The maximum size of a tokenizer.json."""
_FP8 = re.compile(r"-fp8(-dynamic|-block)?$")
"""How the names of fp8 checkpoints end. They have the renderers of the original models."""

MODEL_TYPES_OF_BASE_MODELS = {
    MODEL_TYPES.get(architecture, family)
    for architecture, family in FAMILIES.items()
    if family != "gpt_oss"
} | {model_type for model_type, _ in MULTIMODAL_ARCHITECTURES.values()}
"""The model types (config.json) for which a directory without a chat template gets role_colon."""


def recommended_renderer_name(model_name_or_path: str | Path) -> str:
    """Return the renderer's name for a model name, such as "Qwen/Qwen3-8B", or for a local model
    directory.

    Base models, and directories without a chat template, get role_colon. Otherwise, an unknown
    model raises UnknownModelError (a ValueError), which says what was examined and lists the
    renderers.
    """
    path = Path(model_name_or_path)
    if path.is_dir():
        return _renderer_of_directory(path)
    name = str(model_name_or_path)
    family = _FP8.sub("", name.rstrip("/").rpartition("/")[2].lower())
    for pattern, renderer in RENDERERS_BY_NAME:
        if re.fullmatch(pattern, family):
            return renderer
    raise UnknownModelError(
        f"no renderer is known for model {name!r}, and no directory of that name exists; "
        f"{_choose_hint()}"
    )


def _choose_hint() -> str:
    return f"name the renderer yourself: {', '.join(FORMATS)}"


def _renderer_of_directory(path: Path) -> str:
    config = _read_optional_json(path / "config.json")
    if config is None:
        raise UnknownModelError(
            f"{path} has no config.json, so it is no model directory; copy it from the model, or "
            f"{_choose_hint()}"
        )
    template = _read_chat_template(path)
    if template is None:
        if config.get("model_type") in MODEL_TYPES_OF_BASE_MODELS:
            return "role_colon"
        raise UnknownModelError(
            f"{path} has no chat template and is of model type {config.get('model_type')!r}; "
            f"{_choose_hint()}"
        )
    tokenizer_config = _read_optional_json(path / "tokenizer_config.json") or {}
    special_tokens = _special_tokens(path, tokenizer_config)
    prompt_text = render_template(template, [HELLO], True, **{"bos_token": BOS} | special_tokens)
    if START in prompt_text and EOT in prompt_text:
        # Templates of Llama 3.1 and later add a dated preamble, so their text never equals that of
        # the llama3 renderer. The marks are unique to the family.
        return "llama3"
    # Kimi's turns end with <|im_end|> too, but its tokenizer names another end of sequence.
    if (
        "<|im_start|>" in prompt_text
        and "<|im_end|>" in prompt_text
        and _is_base(path, tokenizer_config, config)
    ):
        return "role_colon"
    special_tokens = {"bos_token": "", **special_tokens}
    matches = [
        (name, chat_format)
        for name, chat_format in _candidates(template, special_tokens).items()
        if writes_like(template, chat_format, special_tokens)
    ]
    matches = [match for match in matches if writes_tools_like(template, match[1], special_tokens)]
    if not matches:
        _check_template(path, template, special_tokens, tokenizer_config)
        return "template"
    # The formats of one family may differ only in how they write reasoning. So prefer a format that
    # also writes reasoning like the template.
    matches.sort(key=lambda match: not writes_reasoning_like(template, match[1], special_tokens))
    return _RENDERER_BY_NAME_OF.get(matches[0][0], matches[0][0])


_TEMPLATE_RENDERERS = (
    "qwen3",
    "qwen3_instruct",
    "chatml",
    "llama3",
    "gemma3",
    "smollm3",
    "qwen3_5",
    "qwen3_5_disable_thinking",
    "qwen3_8_xhigh_reasoning",
    "gpt_oss_medium_reasoning",
    "deepseekv3",
    "kimi_k2",
    "kimi_k25",
    "nemotron3",
    "nemotron3_ultra",
    "mistral",
)
"""The renderers that write what a chat template writes by default."""


_RENDERER_BY_NAME_OF = {"gpt_oss_medium_reasoning": "gpt_oss_no_sysprompt"}
"""The renderers that models get by name, where these do not write what the template writes by
default. The template of gpt-oss writes the current date, so prompts would not be reproducible.
"""


def _check_template(
    path: Path, template: str, special_tokens: Mapping[str, str], tokenizer_config: dict[str, Any]
) -> None:
    """Raise UnsupportedError, or DamagedFileError, if the renderer `template` cannot use a chat
    template. A directory without tokenizer files is not checked.
    """
    added = _added_tokens(path, tokenizer_config)
    marks = sorted(
        text
        for text, is_special in added.values()
        if is_special or (text.startswith("<") and text.endswith(">"))
    )
    if marks:
        find_traits(ChatTemplate(template, tuple(special_tokens.items()), tuple(marks)))


def _candidates(template: str, special_tokens: Mapping[str, str]) -> dict[str, ChatFormat]:
    formats = {name: FORMATS[name](None) for name in _TEMPLATE_RENDERERS}
    formats["chatml"] = ChatML(default_system=default_system_message(template, special_tokens))
    formats["mistral"] = Mistral(default_system_message(template, special_tokens, MISTRAL_SYSTEM))
    return formats


def _special_tokens(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a chat template may use, by role."""
    tokens = (_read_optional_json(path / "special_tokens_map.json") or {}) | tokenizer_config
    texts = {role: _token_text(tokens.get(role)) for role in _SPECIAL_TOKEN_ROLES}
    return {role: text for role, text in texts.items() if text}


def _is_base(path: Path, tokenizer_config: dict[str, Any], config: dict[str, Any]) -> bool:
    """Return whether a model with a ChatML template is a base model.

    It is one if its files name end-of-sequence tokens and `<|im_end|>` is not among them.
    """
    generation = _read_optional_json(path / "generation_config.json") or {}
    ids: set[int] = set()
    for source in (config, config.get("text_config"), generation):
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        ids.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    names = {id_: text for id_, (text, _) in _added_tokens(path, tokenizer_config).items()}
    eos_texts = {names[str(id_)] for id_ in ids if str(id_) in names} | {
        _token_text(tokenizer_config.get("eos_token"))
    } - {""}
    return bool(eos_texts) and "<|im_end|>" not in eos_texts


def _added_tokens(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return the added tokens of a tokenizer by id: the text, and whether the token is special."""
    tokenizer = _read_optional_json(path / "tokenizer.json", MAX_TOKENIZER_BYTES) or {}
    try:
        tokens = {
            str(id_): (_token_text(token), bool(token.get("special")))
            for id_, token in (tokenizer_config.get("added_tokens_decoder") or {}).items()
        }
        return tokens | {
            str(token["id"]): (token["content"], bool(token.get("special")))
            for token in tokenizer.get("added_tokens") or []
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"the added tokens in {path}/tokenizer_config.json or tokenizer.json are malformed "
            f"({error!r}); copy both from the model again, or {_choose_hint()}"
        ) from error


def _read_chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            if file.stat().st_size > MAX_CONFIG_BYTES:
                raise ValueError(f"it has more than {MAX_CONFIG_BYTES:,} bytes")
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise DamagedFileError(
                f"{file} cannot be read ({error}); copy it from the model again, or "
                f"{_choose_hint()}"
            ) from error
    separate = _read_optional_json(path / "chat_template.json") or {}
    tokenizer_config = _read_optional_json(path / "tokenizer_config.json") or {}
    return choose_template(separate.get("chat_template") or tokenizer_config.get("chat_template"))


def _token_text(token: Any) -> str:
    """Return the text of a token in tokenizer_config.json: a string or a dictionary's content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _read_optional_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
    return read_json(path, max_bytes) if path.is_file() else None
