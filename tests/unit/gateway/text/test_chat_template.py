"""Chat templates: rendered as transformers renders them, and unable to reach or to exhaust anything."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.text import chat_template
from gateway.text.chat_template import ChatTemplate, template_hash, template_sources
from slipstream.errors import FailedPrecondition, InvalidArgument

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Größe?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é<"}}}]},
    {"role": "tool", "content": "{}", "tool_call_id": "1"},
    {"role": "assistant", "content": "so", "reasoning": "because"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "b": 1, "a": "ü>"}}}]
TEMPLATES = {
    "chatml": """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "blocks and whitespace": """{% for message in messages %}
    {% if message.role == 'tool' %}
        {% continue %}
    {% endif %}
  [{{ loop.index }}{{ message.role }}]{{ message.content }}
    {% generation %}{% set x = message.content %}{{ x }}!{% endgeneration %}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}{{ x }}
""",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}{{ bos_token }}",
    "macros and namespaces": """{% macro show(m, depth=2) %}{{ '  ' * depth }}{{ m.role ~ m.content }}{% endmacro %}
{% set ns = namespace(found=false, n=0) %}
{% for message in messages %}{% set ns.n = ns.n + 1 %}{% set ns.found = message.role == 'user' or ns.found %}
{{ show(message) }}{% endfor %}{{ ns.found }}{{ ns.n }}{{ dict(a=1) }}{{ messages[0].missing is defined }}
{% for call in messages[2].tool_calls %}{{ call.function.arguments.items() | list }}{% endfor %}
{{ messages[4].reasoning_content }}{{ messages[4].thinking }}{{ tools[0].function.name if tools else 'none' }}""",
    "kwargs": "{{ enable_thinking | default(true) }}{{ messages[1:] | length }}{{ messages[::-1][0].content }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_the_text_is_that_of_transformers(name: str, tools: Any) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    source = TEMPLATES[name]
    (expected,), _ = render_jinja_template(
        [MESSAGES], tools, chat_template=source, add_generation_prompt=True, enable_thinking=False, **special
    )
    ours = ChatTemplate({"default": source}, special, 100_000)
    assert await ours.render(MESSAGES, tools, {"enable_thinking": False}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ dict.__init__.__globals__.x }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ 'x' * 999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ range(999999999) | list }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% include 'other' %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
async def test_what_a_template_must_not_do_is_an_error_of_the_request(source: str) -> None:
    template = ChatTemplate({"default": source}, {}, 10_000)
    with pytest.raises(InvalidArgument):
        await template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
async def test_a_template_that_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.05)
    began = time.monotonic()
    with pytest.raises(InvalidArgument, match="did not end"):
        await ChatTemplate({"default": source}, {}, 10_000).render(MESSAGES)
    assert time.monotonic() - began < 30


async def test_a_text_above_the_limit_is_refused() -> None:
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {}, 100)
    with pytest.raises(InvalidArgument, match="above 100 characters"):
        await template.render([{"role": "user", "content": "x" * 101}])


def test_a_template_that_is_no_jinja_is_refused_at_the_start() -> None:
    with pytest.raises(FailedPrecondition, match="cannot be compiled"):
        ChatTemplate({"default": "{% for %}"}, {}, 100)


async def test_a_template_is_found_where_checkpoints_keep_it(tmp_path: Path) -> None:
    assert template_sources(str(tmp_path), "") == ({}, {})
    config = {"chat_template": "old", "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert template_sources(str(tmp_path), "") == ({"default": "old"}, {"bos_token": "<s>", "eos_token": "</s>"})
    config["chat_template"] = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    sources, special = template_sources(str(tmp_path), "")
    template = ChatTemplate(sources, special, 100)
    assert await template.render(MESSAGES) == "plain" and await template.render(MESSAGES, TOOLS) == "tools"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert template_sources(str(tmp_path), "")[0] == {"default": "new"}
    (tmp_path / "given").write_text("given")
    given, _ = template_sources(str(tmp_path), str(tmp_path / "given"))
    assert given == {"default": "given"} and template_hash(given) != template_hash({"default": "new"})
