"""Conversations are rendered as transformers renders them, in a sandbox that a template cannot leave or keep busy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.tenant import OPEN
from gateway.text import chat_template
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.tokenizer.chat_template_source import (
    ChatTemplateSource,
    chat_template_fingerprint,
    load_chat_template,
)
from slipstream.tokenizer.vocabulary import load_tokenizer
from tests.support.toy_tokenizer import END, toy_tokenizer

CHAT_ML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
WITH_TOOLS = """{{ bos_token }}{% set ns = namespace(first=true, system='') %}
{% for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor %}
{{ ns.system }}
{% if tools %}
{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}
{% endif %}
{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{% if message.tool_calls is defined %}
{% for call in message.tool_calls %}<call {{ loop.index }}/{{ loop.length }}>{{ call.function | tojson }}</call>
{% endfor %}
{% else %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
{{ dict(a=1).items() | list }}{{ dict.fromkeys('ab', 2) }}{{ messages[-1].role | upper }}{{ '-' * 5 }}{{ 2 ** 8 }}"""
SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " <b>How warm is it in Ärö?</b> "},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "warmth", "arguments": {"at": "Ärö"}}}],
    },
    {"role": "tool", "content": "21"},
]
BEGUN = {"role": "assistant", "content": " In Ärö it is "}
UNFINISHED = {"add_generation_prompt": False, "continue_final_message": True}
TOOLS = [{"type": "function", "function": {"name": "warmth", "parameters": {"type": "object", "é": "<&>"}}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toy_tokenizer(tmp_path)


def template(source: str, max_bytes: int = 1 << 20) -> ChatTemplate:
    return ChatTemplate(ChatTemplateSource({"default": source}), max_bytes)


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("source", "messages", "tools", "variables"),
    [
        (CHAT_ML, SAID[:2], [], {}),
        (CHAT_ML, SAID[:2], [], {"enable_thinking": False}),
        (WITH_TOOLS, SAID, TOOLS, {}),
        (WITH_TOOLS, SAID[:2], [], {"eos_token": "."}),
        (CHAT_ML, SAID[:2], [], {"add_generation_prompt": False}),
        (CHAT_ML, [*SAID[:2], BEGUN], [], UNFINISHED),
        (WITH_TOOLS, [*SAID[:2], BEGUN], [], UNFINISHED),
    ],
)
async def test_the_text_and_the_tokens_are_those_of_transformers(
    folder: Path,
    source: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
) -> None:
    from transformers import PreTrainedTokenizerFast

    (folder / "chat_template.jinja").write_text(source)
    write_config(
        folder,
        bos_token={"__type": "AddedToken", "content": "<s>"},
        eos_token=END,
        tokenizer_class="PreTrainedTokenizerFast",
    )
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    asked = {"tools": tools or None, "add_generation_prompt": True, **variables}
    found = load_chat_template(str(folder))
    ours = Tokenizer(load_tokenizer(str(folder)), 1 << 20, found)
    text = ours.chat_template.render(messages, tools, variables)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **asked)
    assert messages[0]["content"] in text
    expected = load_tokenizer(str(folder)).encode(text).ids
    assert await ours.encode_chat(messages, tools, variables, tenant=OPEN) == expected


def test_the_file_of_its_own_comes_before_the_configuration_and_a_given_one_before_both(folder: Path) -> None:
    write_config(folder, chat_template="in the configuration")
    assert load_chat_template(str(folder)) == ChatTemplateSource({"default": "in the configuration"})
    (folder / "chat_template.jinja").write_text("in a file")
    assert load_chat_template(str(folder)) == ChatTemplateSource({"default": "in a file"})
    (folder / "given").write_text("given")
    assert load_chat_template(str(folder), str(folder / "given")) == ChatTemplateSource({"default": "given"})
    with pytest.raises(NotFound, match="nowhere"):
        load_chat_template(str(folder), str(folder / "nowhere"))


def test_requests_with_tools_have_the_template_for_tools(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_config(folder, chat_template=named)
    found = ChatTemplate(load_chat_template(str(folder)), 100)
    assert (found.render(SAID), found.render(SAID, TOOLS)) == ("plain", "tools")
    write_config(folder, chat_template=named[1:])
    with pytest.raises(FailedPrecondition, match="tool_use"):
        ChatTemplate(load_chat_template(str(folder)), 100).render(SAID)


def test_fingerprints_distinguish_templates(folder: Path) -> None:
    assert chat_template_fingerprint(str(folder)) == ""
    write_config(folder, chat_template="one")
    one = chat_template_fingerprint(str(folder))
    (folder / "chat_template.jinja").write_text("one")
    assert one == chat_template_fingerprint(str(folder)) != ""
    (folder / "chat_template.jinja").write_text("two")
    assert chat_template_fingerprint(str(folder)) != one
    write_config(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    assert chat_template_fingerprint(str(folder)) == ""


def test_a_model_without_a_template_names_the_flag() -> None:
    with pytest.raises(FailedPrecondition, match="--chat-template") as caught:
        ChatTemplate(None, 100).render(SAID)
    assert caught.value.reason == "CHAT_TEMPLATE_MISSING"


def test_a_template_that_cannot_be_read_names_its_line() -> None:
    with pytest.raises(FailedPrecondition, match="line 2") as caught:
        template("{% if messages %}\n{% endfor %}").render(SAID)
    assert caught.value.reason == "CHAT_TEMPLATE_BROKEN"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate."),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
        ("{{ dict.__init__() }}", "unsafe"),
        ("{{ 'a' * 100000000 }}", "characters"),
        ("{{ 10 ** 100000000 }}", "characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% for a in range(9999) %}{% for b in 'a' * 200 %}{% set c = b.upper() %}{% endfor %}{% endfor %}", "steps"),
    ],
)
def test_errors_and_forbidden_operations_of_a_template_are_errors_of_the_request(source: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        template(source).render([{"role": "user", "content": "Hi"}])
    assert caught.value.reason == "CHAT_REFUSED"


def test_the_text_is_bounded_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for a in range(99999) %}{{ 'é' * 100 }}{% endfor %}"
    with pytest.raises(InvalidArgument, match="1000 bytes") as caught:
        template(source, max_bytes=1000).render(SAID)
    assert caught.value.reason == "TEXT_TOO_LONG"
    assert template("{{ 'é' * 500 }}", max_bytes=1000).render(SAID) == "é" * 500


def test_every_rendering_has_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 10)
    counted = template("{% for a in range(8) %}{{ a }}{% endfor %}")
    assert [counted.render(SAID) for _ in range(3)] == ["01234567"] * 3


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one message"):
        template(CHAT_ML).render([])


def test_a_last_message_without_a_text_or_that_the_template_changes_cannot_be_continued() -> None:
    with pytest.raises(InvalidArgument, match="last message with a text"):
        template(WITH_TOOLS).render(SAID[:3], (), UNFINISHED)
    with pytest.raises(InvalidArgument, match="leaves out the last message"):
        template("{{ messages[-1].content | replace('a', 'b') }}").render([{"content": "a"}], (), UNFINISHED)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        template(WITH_TOOLS).render([BEGUN], (), UNFINISHED | {"add_generation_prompt": True})
