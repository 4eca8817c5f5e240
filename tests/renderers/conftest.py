import pytest
from family_tokenizers import family_tokenizer
from oracle_cases import family_of

from planish.renderers import FORMATS, Renderer, get_renderer

# Each renderer with a tokenizer and the chat template of a model that it is for (role_colon has no
# template).
RENDERERS = {
    "role_colon": ("smollm2", None),
    "role_colon without bos": ("qwen", None),
    "llama3": ("llama3", "llama3"),
    "gemma3": ("gemma", "gemma3"),
    "chatml of SmolLM2": ("smollm2", "smollm2"),
    "chatml of Qwen2.5": ("qwen", "qwen2_5"),
    "qwen3": ("qwen", "qwen3"),
    "qwen3_disable_thinking": ("qwen", "qwen3"),
    "qwen3_instruct": ("qwen", "qwen3_instruct_2507"),
    "smollm3": ("smollm3", "smollm3"),
    "smollm3_disable_thinking": ("smollm3", "smollm3"),
    "template of Llama 3": ("llama3", "llama3"),
    "template of Gemma 3": ("gemma", "gemma3"),
    "template of Qwen2.5": ("qwen", "qwen2_5"),
    "template of Qwen3": ("qwen", "qwen3"),
    "template_disable_thinking of Qwen3": ("qwen", "qwen3"),
    "qwen3_instruct without word tokens": ("smollm2", "qwen3_instruct_2507"),
    **{
        name: (family_of(name), None)
        for name in (
            "qwen3_5",
            "qwen3_5_disable_thinking",
            "qwen3_8_low_reasoning",
            "nemotron3_disable_thinking",
            "deepseekv3",
            "deepseekv3_thinking",
            "kimi_k2",
            "kimi_k25",
            "gpt_oss_no_sysprompt",
            "mistral",
        )
    },
}


@pytest.fixture(scope="session")
def renderers() -> dict[str, Renderer]:
    made = {}
    for case, (family, chat_template) in RENDERERS.items():
        name = next(
            name for name in sorted(FORMATS, key=len, reverse=True) if case.startswith(name)
        )
        made[case] = get_renderer(name, family_tokenizer(family, chat_template))
    return made


@pytest.fixture(params=list(RENDERERS))
def renderer(request: pytest.FixtureRequest, renderers: dict[str, Renderer]) -> Renderer:
    return renderers[request.param]
