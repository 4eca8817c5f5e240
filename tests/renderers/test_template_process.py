"""Chat templates are rendered as transformers renders them, within limits of time and memory."""

import resource
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from planish.errors import DamagedFileError
from planish.renderers.template_process import (
    TemplateProcess,
    TemplateRefusedError,
    template_process,
)
from planish.renderers.templates import PROBES, render_template

TEMPLATES = sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}},
}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_text_is_that_of_transformers(path):
    template = path.read_text(encoding="utf-8")
    for messages, prompt in PROBES:
        for tools in (None, [TOOL]):
            try:
                [expected], _ = render_jinja_template(
                    [[dict(message) for message in messages]],
                    tools,
                    chat_template=template,
                    add_generation_prompt=prompt,
                    bos_token="<bos>",
                )
            except Exception:
                with pytest.raises(DamagedFileError):
                    render_template(template, messages, prompt, tools=tools, bos_token="<bos>")
                continue
            assert (
                render_template(template, messages, prompt, tools=tools, bos_token="<bos>")
                == expected
            )


SCOPES = [
    "{% generation %}{% set a = 1 %}{{ a }}{% endgeneration %}{{ a is defined }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ messages | tojson(indent=1) }}{{ {'a': '<é>'} | tojson }}",
    "  {% if true %}\n  x\n  {% endif %}\n",
    "{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ strftime_now('%Y') | length }}{{ tools is none }}",
]


@pytest.mark.parametrize("template", SCOPES)
def test_the_environment_is_that_of_transformers(template):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    [expected], _ = render_jinja_template([messages], chat_template=template)
    assert render_template(template, messages, False) == expected


BOMBS = {
    "an endless loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "an endless text": "{% for i in range(99999) %}{% for j in range(99999) %}word{% endfor %}"
    "{% endfor %}",
    "one long text": "{{ 'x' * 100000000000 }}",
    "a constant": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "a huge number": "{% set n = messages | length + 8 %}{{ n ** (n ** (n ** n)) }}",
    "a doubled text": "{% set ns = namespace(t='x') %}{% for i in range(99) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "a doubled list": "{% set ns = namespace(t=[1]) %}{% for i in range(99) %}"
    "{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "a width": "{{ 'x' | center(100000000000) }}",
    "a format": "{{ '%100000000000d' | format(1) }}",
    "endless recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a regular list": "{{ (range(99999) | list) * 100000 }}",
    "files": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "an import": "{% include '/etc/passwd' %}",
    "no template": "{% for %}",
    "no filter": "{{ messages | nothing }}",
    "a wrong operation": "{{ 1 + 'a' }}",
    "a division": "{{ 1 / 0 }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_hostile_templates_end_in_a_clear_error_and_the_next_one_is_rendered(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedFileError, match="the chat template cannot be rendered"):
        render_template(BOMBS[name], [{"role": "user", "content": "x"}], True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert render_template("{{ messages[0].content }}!", [{"content": "x"}], True) == "x!"


def test_a_template_that_refuses_a_conversation_is_told_apart():
    template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(TemplateRefusedError, match="System role not supported"):
        render_template(template, [], True)


def test_a_worker_that_has_ended_is_replaced():
    process = TemplateProcess()
    try:
        assert process.render("a", {}) == "a"
        worker: Any = process._process
        worker.kill()
        worker.wait()
        assert process.render("b", {}) == "b"
        assert process._process is not worker
    finally:
        process.close()
    assert process._process is None


def test_threads_get_their_own_texts():
    texts: dict[int, str] = {}

    def render(number: int) -> None:
        texts[number] = template_process.render("{{ n }}", {"n": number})

    threads = [threading.Thread(target=render, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) for number in range(20)}
