"""The renderer for a model name or a model directory."""

import json
from pathlib import Path

import pytest
from family_tokenizers import family_tokenizer, template
from oracle_cases import family_of, is_of_a_family

from planish.errors import DamagedFileError, PlanishError, UnsupportedError
from planish.renderers import FORMATS, get_renderer, recommended_renderer_name
from planish.testing import tiny_model

QWEN25_BASE = template("qwen2_5").replace(
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are a helpful assistant.",
)
THINKING_2507 = template("qwen3").replace(
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)
LLAMA31 = """{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


@pytest.mark.parametrize(
    ("name", "renderer"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3"),
        ("meta-llama/Llama-3.1-8B", "role_colon"),
        ("meta-llama/Llama-3.2-1B", "role_colon"),
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("Qwen/Qwen3-30B-A3B", "qwen3"),
        ("Qwen/Qwen3-8B-Base", "role_colon"),
        ("Qwen/Qwen3-30B-A3B-Base", "role_colon"),
        ("Qwen/Qwen3-8B-FP8", "qwen3"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3_instruct"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_instruct"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_instruct"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "chatml"),
        ("Qwen/Qwen2.5-Math-1.5B-Instruct", "chatml"),
        ("Qwen/Qwen2.5-7B", "role_colon"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "chatml"),
        ("HuggingFaceTB/SmolLM2-1.7B", "role_colon"),
        ("SmolLM2-135M-Instruct", "chatml"),
        ("google/gemma-3-1b-it", "gemma3"),
        ("google/gemma-3-270m", "role_colon"),
        ("gemma3-270m", "role_colon"),
        ("google/gemma-3-4b-pt", "role_colon"),
        ("Qwen/Qwen3.5-4B", "qwen3_5"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5"),
        ("Qwen/Qwen3.5-0.8B", "qwen3_5_disable_thinking"),
        ("Qwen/Qwen3.5-9B-Base", "role_colon"),
        ("Qwen/Qwen3.6-27B", "qwen3_5"),
        ("Qwen/Qwen3.8-27B", "qwen3_8_xhigh_reasoning"),
        ("openai/gpt-oss-20b", "gpt_oss_no_sysprompt"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseekv3"),
        ("deepseek-ai/DeepSeek-V3.1-Base", "role_colon"),
        ("moonshotai/Kimi-K2-Thinking", "kimi_k2"),
        ("moonshotai/Kimi-K2.5", "kimi_k25"),
        ("moonshotai/Kimi-K2.6", "kimi_k26"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron3"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "nemotron3"),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "nemotron3_ultra"),
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16", "nemotron3_ultra"),
        ("nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16", "nemotron3_ultra"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "mistral"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral"),
        ("mistralai/Mistral-7B-v0.3", "role_colon"),
        ("HuggingFaceTB/SmolLM3-3B", "smollm3"),
        ("HuggingFaceTB/SmolLM3-3B-Base", "role_colon"),
        ("mistralai/Mistral-Nemo-Base-2407", "role_colon"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "template"),
        ("mistralai/Magistral-Small-2507", "template"),
        ("Qwen/Qwen3-4B-Thinking-2507", "template"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "template"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "template"),
        ("microsoft/phi-4", "template"),
        ("microsoft/Phi-4-mini-instruct", "template"),
        ("allenai/Olmo-3-7B-Instruct", "template"),
        ("allenai/Olmo-3-7B-Think", "template"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "template"),
        ("google/gemma-2-2b-it", "template"),
        ("ibm-granite/granite-4.0-micro", "template"),
        ("zai-org/GLM-4.5-Air", "template"),
        ("mistralai/Mistral-Small-24B-Base-2501", "role_colon"),
    ],
)
def test_known_model_names_have_a_renderer(name, renderer):
    assert recommended_renderer_name(name) == renderer


@pytest.mark.parametrize(
    "name", ["zai-org/GLM-5.3", "mistralai/Codestral-22B-v0.1", "no/such/directory", "", "Qwen3"]
)
def test_an_unknown_model_name_lists_the_renderers(name):
    with pytest.raises(ValueError, match=r"role_colon, chatml, llama3, qwen3") as caught:
        recommended_renderer_name(name if name else "nothing")
    assert isinstance(caught.value, PlanishError)
    assert all(known in str(caught.value) for known in FORMATS)


def model_directory(path: Path, model_type: str, chat_template: str | None, **tokens) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = {**tokens, **({"chat_template": chat_template} if chat_template else {})}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("model_type", "chat_template", "tokens", "renderer"),
    [
        ("qwen3", template("qwen3"), {"eos_token": "<|im_end|>"}, "qwen3"),
        ("qwen3", template("qwen3"), {"eos_token": "<|endoftext|>"}, "role_colon"),
        ("qwen3", template("qwen3"), {}, "qwen3"),
        (
            "qwen3",
            template("qwen3_instruct_2507"),
            {"eos_token": {"content": "<|im_end|>"}},
            "qwen3_instruct",
        ),
        ("qwen2", template("qwen2_5"), {"eos_token": "<|im_end|>"}, "chatml"),
        ("qwen2", QWEN25_BASE, {"eos_token": "<|endoftext|>"}, "role_colon"),
        (
            "llama",
            template("smollm2"),
            {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"},
            "chatml",
        ),
        (
            "llama",
            template("llama3"),
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            "llama3",
        ),
        (
            "llama",
            LLAMA31,
            {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>"},
            "llama3",
        ),
        ("llama", None, {"bos_token": "<|begin_of_text|>"}, "role_colon"),
        ("mistral", None, {"bos_token": "<s>"}, "role_colon"),
    ],
)
def test_a_model_directory_is_recognised_by_config_and_template(
    tmp_path, model_type, chat_template, tokens, renderer
):
    path = model_directory(tmp_path / "model", model_type, chat_template, **tokens)
    assert recommended_renderer_name(path) == renderer
    assert recommended_renderer_name(str(path)) == renderer


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "list"])
def test_chat_templates_are_found_in_all_file_locations(tmp_path, place):
    text = template("qwen2_5")
    path = model_directory(tmp_path, "qwen2", None, eos_token="<|im_end|>")
    if place == "chat_template.jinja":
        (path / place).write_text(text)
    elif place == "chat_template.json":
        (path / place).write_text(json.dumps({"chat_template": text}))
    else:
        named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": text}]
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert recommended_renderer_name(path) == "chatml"


def test_a_saved_tokenizer_of_each_family_is_recognised(tmp_path):
    """The files are written by transformers, as in a downloaded model."""
    for family, chat_template, renderer in [
        ("qwen", "qwen3", "qwen3"),
        ("smollm2", "smollm2", "chatml"),
        ("llama3", "llama3", "llama3"),
        ("smollm3", "smollm3", "smollm3"),
    ]:
        path = tmp_path / family
        tokenizer = family_tokenizer(family, chat_template)
        tokenizer.save_pretrained(path)
        eos = tokenizer.eos_token_id
        (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
        assert recommended_renderer_name(path) == renderer
        # The same model, if generation ended with the end of the text: a base model.
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 0]}))
        assert recommended_renderer_name(path) == renderer


@pytest.mark.parametrize(
    ("name", "family", "chat_template"),
    [
        ("openai/gpt-oss-20b", "gpt_oss", "gpt_oss"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen", "qwen3_coder"),
        ("Qwen/Qwen3-8B", "qwen", "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen", "qwen3_instruct_2507"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "qwen", "qwen2_5"),
        ("google/gemma-3-1b-it", "gemma", "gemma3"),
        ("HuggingFaceTB/SmolLM3-3B", "smollm3", "smollm3"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3", "llama3_1"),
    ],
)
def test_a_directory_has_the_renderer_of_the_name(tmp_path, name, family, chat_template):
    tokenizer = family_tokenizer(family, chat_template)
    tokenizer.save_pretrained(tmp_path)
    config = {"model_type": family, "eos_token_id": tokenizer.eos_token_id}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert recommended_renderer_name(tmp_path) == recommended_renderer_name(name)


CODER = """{%- if tools %}
    {{- '<|im_start|>system\n' + messages[0].content + '\n\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n<function>\n<name>' + tool.function.name + '</name>' }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n<function=' + call.function.name + '>\n</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""Text as Qwen3 Instruct 2507 writes it, and tools in XML, as in Qwen3-Coder."""


def test_a_template_with_another_form_of_tools_is_used_itself(tmp_path):
    """qwen3_instruct writes the same text, but calls as JSON."""
    path = model_directory(tmp_path, "qwen3_moe", CODER, eos_token="<|im_end|>")
    assert recommended_renderer_name(path) == "template"
    without_tools = CODER.replace("{%- if tools %}", "{%- if false %}").replace(
        "message.tool_calls or []", "[]"
    )
    (path / "chat_template.jinja").write_text(without_tools)
    assert recommended_renderer_name(path) == "qwen3_instruct"


ENDS_WITH_EOS = """{%- for message in messages %}
    {%- if message.role == 'system' %}{{- raise_exception('no system role') }}{%- endif %}
    {{- bos_token + message.role + ': ' + message.content + eos_token }}
{%- endfor %}"""


def test_templates_with_end_tokens_and_without_system_messages_are_not_damaged(tmp_path):
    """Such a template is intact, but no other renderer writes its format."""
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    path = model_directory(tmp_path, "mistral", ENDS_WITH_EOS, **tokens)
    assert recommended_renderer_name(path) == "template"
    chatml = template("qwen3_instruct_2507").replace("'<|im_end|>\\n'", "eos_token + '\\n'")
    assert "eos_token" in chatml
    path = model_directory(tmp_path, "qwen3", chatml, eos_token="<|im_end|>")
    assert recommended_renderer_name(path) == "qwen3_instruct"
    # transformers once wrote the special tokens to a file of their own.
    path = model_directory(tmp_path, "qwen3", chatml)
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert recommended_renderer_name(path) == "qwen3_instruct"


def test_chatml_reads_its_system_message_from_a_template_with_an_end_token():
    tokenizer = family_tokenizer("qwen", "qwen2_5")
    tokenizer.chat_template = template("qwen2_5").replace(
        "<|im_end|>\\n' }}", "' + eos_token + '\\n' }}"
    )
    assert "eos_token" in tokenizer.chat_template
    renderer = get_renderer("chatml", tokenizer)
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "Hi."}])
    assert "created by Alibaba Cloud" in tokenizer.decode(prompt.to_ints())


def test_the_tiny_test_model_is_recognised(tmp_path):
    assert recommended_renderer_name(tiny_model(tmp_path)) == "qwen3_instruct"


def test_unknown_directories_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json.*role_colon"):
        recommended_renderer_name(tmp_path)
    path = model_directory(tmp_path / "other", "qwen3", THINKING_2507)
    assert recommended_renderer_name(path) == "template"
    family_tokenizer("qwen").save_pretrained(path)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    with pytest.raises(UnsupportedError, match="no control token after an answer"):
        recommended_renderer_name(path)
    with pytest.raises(ValueError, match=r"no chat template.*'gpt2'.*role_colon"):
        recommended_renderer_name(model_directory(tmp_path / "gpt2", "gpt2", None))
    for chat_template in (
        "{% if %}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
    ):
        path = model_directory(tmp_path / "broken", "qwen3", chat_template)
        with pytest.raises(DamagedFileError, match="cannot be rendered"):
            recommended_renderer_name(path)
    (path / "config.json").write_text("{")
    with pytest.raises(DamagedFileError, match=r"config.json is not JSON"):
        recommended_renderer_name(path)


def test_every_recommended_name_can_be_made():
    tokenizers = {"role_colon": "qwen", "llama3": "llama3", "chatml": "smollm2", "gemma3": "gemma"}
    for name in FORMATS:
        family = family_of(name) if is_of_a_family(name) else tokenizers.get(name, "qwen")
        chat_template = "qwen3" if name.startswith("template") else None
        assert get_renderer(name, family_tokenizer(family, chat_template)).name == name


@pytest.mark.parametrize(
    ("chat_template", "family", "renderer"),
    [("mistral_small_like", "mistral", "mistral"), ("kimi_k2_like", "kimi", "kimi_k2")],
)
def test_directories_of_mistral_and_kimi_are_recognised(tmp_path, chat_template, family, renderer):
    """Kimi's tokenizer writes the list of tools sorted, by code of its own."""
    family_tokenizer(family, chat_template).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert recommended_renderer_name(tmp_path) == renderer


def test_mistral_writes_the_default_system_message_of_the_template():
    tokenizer = family_tokenizer("mistral", "mistral_small_like")
    hello = [{"role": "user", "content": "Hi"}]

    def prompt(**options) -> str:
        renderer = get_renderer("mistral", tokenizer, **options)
        return str(tokenizer.decode(renderer.build_generation_prompt(hello).to_ints()))

    assert prompt(current_date="2025-06-28") == (
        "<s>[SYSTEM_PROMPT]You are a model of Mistral AI.\nThe current date is 2025-06-28."
        "[/SYSTEM_PROMPT][INST]Hi[/INST]"
    )
    assert prompt(default_system="Be brief.").startswith("<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM")
    assert prompt(default_system="") == "<s>[INST]Hi[/INST]"
    renderer = get_renderer("mistral", tokenizer)
    system = [{"role": "system", "content": "Be kind."}, *hello]
    text = tokenizer.decode(renderer.build_generation_prompt(system).to_ints())
    assert text == "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]Hi[/INST]"
