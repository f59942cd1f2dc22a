"""Chat templates mean in Jinja what they mean to transformers: blocks, filters, globals, loops, and errors."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.text import chat_template
from gateway.text.chat_template import ChatTemplate
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.tokenizer.chat_template_source import ChatTemplateSource

HI = {"role": "user", "content": " How <b>warm</b>? \n"}
SAID: list[list[dict[str, Any]]] = [
    [HI],
    [{"role": "system", "content": "Be brief."}, HI, {"role": "assistant", "content": "21"}],
    [HI, {"role": "assistant", "content": ""}, HI],
]
SOURCES = {
    "a generation block sees its loop": (
        "{% for m in messages %}{% generation %}{{ loop.index }}{% if loop.last %}!{% endif %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}"
    ),
    "a generation block keeps its variables": (
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    ),
    "a generation block in a macro": (
        "{% macro g(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ g(m) }}{% endfor %}"
    ),
    "a generation block has a caller's names": "{% generation %}{{ varargs is defined }}{% endgeneration %}",
    "nothing leaves a generation block": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% break %}{% endgeneration %}{% endfor %}"
    ),
    "white space around a generation block": "  {% generation %}\n a \n  {% endgeneration %}\n b {%- generation -%} c{% endgeneration %}",
    "a break outside a loop": "{% break %}",
    "break and continue": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "an iterator that a loop left": (
        "{% set it = messages | map(attribute='role') %}{% for a in it %}{{ a }}{% break %}{% endfor %}{{ it | list }}"
    ),
    "a loop over an iterator knows its length": (
        "{% for a in messages | map(attribute='role') %}{{ a }}{{ loop.length }}{{ loop.last }}{{ loop.previtem }}{% endfor %}"
    ),
    "a recursive loop": (
        "{% for k in [[1, [2, 3]], [4]] recursive %}{% if k is iterable %}({{ loop(k) }}){% else %}{{ k }}{{ loop.depth }}"
        "{% endif %}{% endfor %}"
    ),
    "a loop with a condition, and without elements": (
        "{% for m in messages if m.role == 'critic' %}{{ m }}{% else %}none{% endfor %}{% for m in nothing %}{% else %}0{% endfor %}"
    ),
    "a loop over a mapping": "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}{{ messages[0] | dictsort }}",
    "a loop over nothing that can be passed through": "{% for m in 3 %}{{ m }}{% endfor %}",
    "a loop over none": "{% for m in none %}{{ m }}{% endfor %}",
    "a date, by the name of its argument": "{{ strftime_now(format='%Y') }}{{ strftime_now('%d %b') }}",
    "a date of nothing": "{{ strftime_now(3) }}",
    "refusals": "{% if messages | length > 1 %}{{ raise_exception('too ' ~ messages | length) }}{% endif %}ok",
    "refusals by the name of their argument": "{{ raise_exception(message='x') }}",
    "JSON": (
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}"
        "{{ 'é' | tojson(ensure_ascii=true) }}{{ messages | map('tojson') | join('|') }}"
    ),
    "JSON of nothing": "{{ {'a': nothing} | tojson }}",
    "namespaces": "{% set ns = namespace({'a': 1}, b=2) %}{% set ns.c = ns.a + ns.b %}{{ ns.c }}{{ ns.d is defined }}",
    "changing a list": "{% set l = [] %}{% set _ = l.append(1) %}{{ l }}",
    "arithmetic": "{{ 7 // 2 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 'a' * 0 }}{{ true * 3 }}{{ 2 ** -1 }}{{ 1 / 3 }}",
    "arithmetic with nothing": "{{ nothing * 3 }}",
    "texts": (
        "{{ messages[0].content.strip().split(' ')[0].removeprefix('H') }}{{ '%s-%03d' % ('a', 3) }}{{ '{:>5}'.format(2) }}"
        "{{ messages[0].content | trim | title | replace('H', 'h', 1) | truncate(9) }}{{ 'a\\nb'.splitlines() }}"
    ),
    "macros": (
        "{% macro a(x, y='q') -%} {{ x }}{{ y }}{{ varargs }}{{ kwargs }} {%- endmacro %}{{ a(1, 2, 3, k=5) }}"
        "{% macro w() %}<{{ caller('x') }}>{% endmacro %}{% call(z) w() %}{{ z }}{% endcall %}"
    ),
    "an unknown filter": "{{ messages | fromjson }}",
    "another file": "{% include 'x' %}",
    "white space": "   {% if true %}   \n  x{% endif %}  \n {{- 1 }} \n {%+ if true %}y{%+ endif %}\n{# c #}\n",
    "what stands before line ends": "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\n",
    "variables that there are": (
        "{{ documents }}{{ tools }}{{ add_generation_prompt }}{{ continue_final_message is defined }}{{ chat_template is defined }}"
    ),
    "escapes": "{% autoescape true %}{{ messages[0].content }}{{ '<' | safe }}{% endautoescape %}{{ messages[0].content | e }}",
}


@pytest.mark.parametrize("name", SOURCES)
def test_templates_render_as_in_transformers(name: str) -> None:
    template = ChatTemplate(ChatTemplateSource({"default": SOURCES[name]}), 1 << 20)
    for messages in SAID:
        try:
            expected = render_jinja_template([messages], chat_template=SOURCES[name], add_generation_prompt=True)[0][0]
        except Exception:
            with pytest.raises((InvalidArgument, FailedPrecondition)):
                template.render(messages)
        else:
            assert template.render(messages) == expected


@pytest.mark.parametrize("documents", ["a", ["a"], 3])
def test_documents_are_objects(documents: Any) -> None:
    template = ChatTemplate(ChatTemplateSource({"default": "{{ documents }}"}), 1 << 20)
    with pytest.raises(InvalidArgument, match="documents is a list of objects"):
        template.render([HI], (), {"documents": documents})
    assert template.render([HI], (), {"documents": []}) == "[]"


def test_a_field_that_the_template_does_not_name_is_not_continued() -> None:
    """As transformers refuses it: where a message is written whole, its end is not the answer's beginning."""
    template = ChatTemplate(ChatTemplateSource({"default": "{{ messages | tojson }}"}), 1 << 20)
    with pytest.raises(InvalidArgument, match="does not read content"):
        template.render([HI], (), {"continue_final_message": True})


def test_a_recursive_loop_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 100)
    source = "{% for a in [range(60)] * 2 recursive %}{% if a is iterable %}{{ loop(a) }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidArgument, match="steps"):
        ChatTemplate(ChatTemplateSource({"default": source}), 1 << 20).render([HI])
