"""Renderers by name.

A renderer gives the same tokens as the renderer of the same name in tinker-cookbook 0.6.1. Where
the cookbook departs from the model's own chat template, planish follows the template:

* qwen3_5: the cookbook drops the reasoning of tool steps that belong to the current turn.
* qwen3_5_preserve_thinking: the cookbook writes no empty think blocks in history, and arguments
  such as True and None as Python does, where the template of Qwen3.6 writes JSON.
* qwen3_5*, qwen3_8_*: the cookbook writes a tool's specification in the caller's form. planish
  writes {"type": "function", "function": {...}}.
* qwen3_vl: the cookbook writes reasoning without line breaks, and each tool result in a turn of its
  own. planish writes both as in qwen3.
* gpt_oss_*: the cookbook keeps the reasoning of earlier turns, writes an empty system message, and
  declares tools in another layout, with a system message of its own.
* deepseekv3*: the cookbook leaves out the end of sentence after a tool call without text.
* deepseekv3_thinking: the cookbook accepts tools, which DeepSeek supports only without thinking.
* nemotron3*: the cookbook trims strings of users and tools.

A string that begins with a complete <think> block is reasoning in planish, in every format that
thinks. In the cookbook this depends on the renderer. The cookbook encodes images as JPEG; planish
keeps the file or encodes as PNG.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial

from planish.errors import UnsupportedError
from planish.renderers.chat_format import ChatFormat
from planish.renderers.chatml import ChatML, Thinking
from planish.renderers.deepseek import DeepSeekV3
from planish.renderers.gemma3 import Gemma3
from planish.renderers.harmony import Harmony
from planish.renderers.kimi import Kimi
from planish.renderers.llama3 import Llama3
from planish.renderers.mistral import Mistral
from planish.renderers.nemotron3 import Nemotron3
from planish.renderers.qwen3_5 import Qwen35
from planish.renderers.renderer import Renderer
from planish.renderers.role_colon import RoleColon
from planish.renderers.smollm3 import SmolLM3
from planish.renderers.template_format import template_format
from planish.renderers.templates import MISTRAL_SYSTEM, chat_template_of, default_system_message
from planish.renderers.vision import QwenVL, VisionRenderer, image_processor_of
from planish.tokenizer import ModelTokenizer


def _chatml(tokenizer: ModelTokenizer) -> ChatFormat:
    template = chat_template_of(tokenizer)
    if template is None:
        return ChatML()
    special_tokens = {"bos_token": "", **getattr(tokenizer, "special_tokens_map", {})}
    return ChatML(default_system=default_system_message(template, special_tokens))


def _mistral(tokenizer: ModelTokenizer, current_date: str | None = None) -> ChatFormat:
    template = chat_template_of(tokenizer)
    if template is None:
        return Mistral()
    special_tokens = {"bos_token": "", **getattr(tokenizer, "special_tokens_map", {})}
    now = current_date or date.today().isoformat()
    return Mistral(default_system_message(template, special_tokens, MISTRAL_SYSTEM, now))


def _role_colon(tokenizer: ModelTokenizer) -> ChatFormat:
    return RoleColon(bos=getattr(tokenizer, "bos_token", None))


def _harmony(effort: str, tokenizer: ModelTokenizer) -> ChatFormat:
    return Harmony(effort, date.today().isoformat())


def _smollm3(thinks: bool, tokenizer: ModelTokenizer) -> ChatFormat:
    return SmolLM3(date.today().isoformat(), thinks)


FIXED_FORMATS: dict[str, ChatFormat] = {
    "llama3": Llama3(),
    "qwen3": ChatML(thinking=Thinking.STRIP_HISTORY),
    "qwen3_disable_thinking": ChatML(thinking=Thinking.DISABLED),
    "qwen3_instruct": ChatML(),
    "qwen3_5": Qwen35(),
    "qwen3_5_disable_thinking": Qwen35(thinks=False),
    "qwen3_5_preserve_thinking": Qwen35(preserves_thinking=True),
    "qwen3_8_xhigh_reasoning": Qwen35(preserves_thinking=True, effort="xhigh"),
    "qwen3_8_medium_reasoning": Qwen35(preserves_thinking=True, effort="medium"),
    "qwen3_8_low_reasoning": Qwen35(preserves_thinking=True, effort="low"),
    "qwen3_8_disable_thinking": Qwen35(thinks=False, preserves_thinking=True, effort="medium"),
    "gpt_oss_no_sysprompt": Harmony(),
    "deepseekv3": DeepSeekV3(),
    "deepseekv3_disable_thinking": DeepSeekV3(),
    "deepseekv3_thinking": DeepSeekV3(thinks=True),
    "kimi_k2": Kimi(),
    "kimi_k25": Kimi(opens_think_block=True),
    "kimi_k25_disable_thinking": Kimi(opens_think_block=True, thinks=False),
    "kimi_k26": Kimi(opens_think_block=True),
    "kimi_k26_disable_thinking": Kimi(opens_think_block=True, thinks=False),
    "kimi_k26_preserve_thinking": Kimi(opens_think_block=True, preserves_thinking=True),
    "nemotron3": Nemotron3(),
    "nemotron3_low_thinking": Nemotron3(effort="low"),
    "nemotron3_disable_thinking": Nemotron3(thinks=False),
    "nemotron3_preserve_thinking": Nemotron3(preserves_thinking=True),
    "nemotron3_ultra": Nemotron3(is_ultra=True),
    "nemotron3_ultra_disable_thinking": Nemotron3(is_ultra=True, thinks=False),
    "nemotron3_ultra_medium_thinking": Nemotron3(is_ultra=True, effort="efficient"),
    "nemotron3_ultra_preserve_thinking": Nemotron3(is_ultra=True, preserves_thinking=True),
    "gemma3": Gemma3(),
    "qwen3_vl": QwenVL(thinking=Thinking.STRIP_HISTORY),
    "qwen3_vl_instruct": QwenVL(),
}
"""The formats that are the same for every tokenizer."""

FORMATS: dict[str, Callable[..., ChatFormat]] = {
    "role_colon": _role_colon,
    "chatml": _chatml,
    **{name: partial(lambda form, tokenizer: form, form) for name, form in FIXED_FORMATS.items()},
    **{
        f"gpt_oss_{effort}_reasoning": partial(_harmony, effort)
        for effort in ("low", "medium", "high")
    },
    "mistral": _mistral,
    "smollm3": partial(_smollm3, True),
    "smollm3_disable_thinking": partial(_smollm3, False),
    "template": template_format,
    "template_thinking": partial(template_format, thinks=True),
    "template_disable_thinking": partial(template_format, thinks=False),
}
"""Maps each renderer name to a function that makes its format for a tokenizer."""


def get_renderer(
    name: str,
    tokenizer: ModelTokenizer,
    *,
    default_system: str | None = None,
    strip_thinking_from_history: bool | None = None,
    current_date: str | None = None,
) -> Renderer:
    """Return the renderer `name` for a tokenizer of `transformers`.

    `default_system` (chatml and mistral only) replaces the default system message of the
    tokenizer's chat template; "" means none. `strip_thinking_from_history=False` (qwen3 only) keeps all reasoning in
    prompts, so that each prompt extends the one before it. `current_date` (gpt_oss_*_reasoning,
    mistral, smollm3* and template* only), such as "2025-06-28", is the date in the system message, by
    default today's.
    Raises ValueError for an unknown name or an option of another renderer.
    """
    if name not in FORMATS:
        raise ValueError(f"renderer {name!r} is unknown; choose one of {', '.join(FORMATS)}")
    if default_system is not None and name not in ("chatml", "mistral"):
        raise ValueError(
            "default_system is an option of the renderers chatml and mistral, not of "
            f"{name}; give a system message instead"
        )
    if strip_thinking_from_history is not None and name != "qwen3":
        raise ValueError(
            f"strip_thinking_from_history is an option of renderer qwen3, not of {name}; remove it"
        )
    if name == "mistral" and default_system is not None:
        return _renderer(name, tokenizer, Mistral(default_system or None))
    if name.startswith(("template", "mistral")) and current_date is not None:
        return _renderer(name, tokenizer, FORMATS[name](tokenizer, current_date=current_date))
    chat_format = FORMATS[name](tokenizer)
    if current_date is not None:
        if not isinstance(chat_format, Harmony | SmolLM3) or not chat_format.date:
            raise ValueError(
                "current_date is an option of the renderers gpt_oss_*_reasoning, mistral, smollm3* "
                f"and template*, not of {name}; remove it"
            )
        return _renderer(name, tokenizer, replace(chat_format, date=current_date))
    if name == "chatml" and default_system is not None:
        return _renderer(name, tokenizer, ChatML(default_system=default_system or None))
    if name == "qwen3" and strip_thinking_from_history is False:
        return _renderer(name, tokenizer, ChatML(thinking=Thinking.KEEP_HISTORY))
    return _renderer(name, tokenizer, chat_format)


VISION_RENDERERS = ("qwen3_vl", "qwen3_vl_instruct")
"""The renderers of models with images. The other renderers also write images if the tokenizer's
directory has an image processor.
"""


def _renderer(name: str, tokenizer: ModelTokenizer, chat_format: ChatFormat) -> Renderer:
    processor = image_processor_of(tokenizer)
    if processor is None and name not in VISION_RENDERERS:
        return Renderer(name, tokenizer, chat_format)
    return VisionRenderer(name, tokenizer, chat_format, processor)


_WITHOUT_THINKING = {
    "qwen3": "qwen3_disable_thinking",
    "qwen3_5": "qwen3_5_disable_thinking",
    "qwen3_5_preserve_thinking": "qwen3_5_disable_thinking",
    "qwen3_8_xhigh_reasoning": "qwen3_8_disable_thinking",
    "qwen3_8_medium_reasoning": "qwen3_8_disable_thinking",
    "qwen3_8_low_reasoning": "qwen3_8_disable_thinking",
    "deepseekv3_thinking": "deepseekv3",
    "kimi_k25": "kimi_k25_disable_thinking",
    "kimi_k26": "kimi_k26_disable_thinking",
    "kimi_k26_preserve_thinking": "kimi_k26_disable_thinking",
    "smollm3": "smollm3_disable_thinking",
    "template_thinking": "template_disable_thinking",
    "template": "template_disable_thinking",
    "nemotron3": "nemotron3_disable_thinking",
    "nemotron3_low_thinking": "nemotron3_disable_thinking",
    "nemotron3_preserve_thinking": "nemotron3_disable_thinking",
    "nemotron3_ultra": "nemotron3_ultra_disable_thinking",
    "nemotron3_ultra_medium_thinking": "nemotron3_ultra_disable_thinking",
    "nemotron3_ultra_preserve_thinking": "nemotron3_ultra_disable_thinking",
}
"""Maps each renderer that thinks to the renderer of the same models without thinking.

If several renderers have the same value, `with_thinking` selects the first of them.
"""
_ALWAYS_THINKING = (
    "kimi_k2",
    "qwen3_vl",
    "gpt_oss_no_sysprompt",
    "gpt_oss_low_reasoning",
    "gpt_oss_medium_reasoning",
    "gpt_oss_high_reasoning",
)
"""Renderers of models that cannot answer without thinking."""


def with_thinking(name: str, thinks: bool) -> str:
    """Return the name of a renderer for the same models as `name`.

    `thinks`: whether the returned renderer samples reasoning. Raises UnsupportedError if the models
    always think or never think, and `thinks` says otherwise.
    """
    if not thinks and name in _ALWAYS_THINKING:
        raise UnsupportedError(
            f"renderer {name!r}: its models always think; leave out the option that turns thinking "
            "off"
        )
    if not thinks:
        return _WITHOUT_THINKING.get(name, name)
    if name == "template":
        return "template_thinking"  # some templates do not think by default
    if name in _WITHOUT_THINKING or name in _ALWAYS_THINKING:
        return name
    name_without_thinking = "deepseekv3" if name == "deepseekv3_disable_thinking" else name
    for thinking, without_thinking in _WITHOUT_THINKING.items():
        if without_thinking == name_without_thinking:
            return thinking
    raise UnsupportedError(
        f"renderer {name!r}: its models do not think; leave out the option that turns thinking on, "
        f"or choose one of {', '.join(_WITHOUT_THINKING)}"
    )


_EFFORT_VARIANTS: tuple[dict[str, str], ...] = (
    {effort: f"gpt_oss_{effort}_reasoning" for effort in ("low", "medium", "high")},
    {effort: f"qwen3_8_{effort}_reasoning" for effort in ("low", "medium", "xhigh")},
    {"low": "nemotron3_low_thinking", "high": "nemotron3"},
    {"medium": "nemotron3_ultra_medium_thinking", "high": "nemotron3_ultra"},
)
"""For each family with several reasoning efforts, the renderer of each effort."""


def with_effort(name: str, effort: str) -> str:
    """Return the renderer of the same models as `name` with a reasoning effort.

    "none" stands for no thinking. For models with thinking but without efforts, "low", "medium" and
    "high" all return the renderer that thinks, because clients send one of them to turn thinking
    on. Raises UnsupportedError, with the list of efforts, if the models do not have this one.
    """
    efforts = _efforts(name)
    if effort not in efforts:
        raise UnsupportedError(
            f"the models of renderer {name} have no effort {effort!r}; "
            + (f"give {' or '.join(efforts)}" if efforts else "leave it out")
        )
    return efforts[effort]


def _efforts(name: str) -> dict[str, str]:
    """Return the renderers of the same models as `name` by reasoning effort."""
    without_thinking = with_thinking(name, False) if name not in _ALWAYS_THINKING else None
    renderers_by_effort = {} if without_thinking is None else {"none": without_thinking}
    for variants in _EFFORT_VARIANTS:
        family = {
            *variants.values(),
            *(_WITHOUT_THINKING.get(variant) for variant in variants.values()),
        }
        if name in family or (name.startswith("gpt_oss") and "gpt_oss_low_reasoning" in family):
            return renderers_by_effort | variants
    try:
        return renderers_by_effort | dict.fromkeys(
            ("low", "medium", "high"), with_thinking(name, True)
        )
    except UnsupportedError:  # a model that does not think
        return renderers_by_effort
