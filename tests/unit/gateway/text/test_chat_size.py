"""Conversations that are too long are known to be by the bytes of their messages, before a template renders them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.tenant import OPEN
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from gateway.text.worker import _Texts
from slipstream.errors import SlipstreamError
from slipstream.tokenizer.chat_template_source import ChatTemplateSource
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2
from tests.support.templates import CONVERSATIONS, CORPUS, DEEPSEEK, TOOLS
from tests.support.toy_tokenizer import toy_tokenizer

LAST_ONLY = "{% for message in messages[-2:] %}{{ message.role }}: {{ message.content }}{% endfor %}"
SHORTENED = "{% for message in messages %}{{ message.role }}: {{ message.content[:4] }}{% endfor %}"


def of(folder: Path, template: str | Mapping[str, str]) -> Tokenizer:
    """A token is a byte."""
    named = {"default": template} if isinstance(template, str) else dict(template)
    source = ChatTemplateSource(named, {"bos_token": "<s>", "eos_token": "</s>"})
    return Tokenizer(load_tokenizer(str(toy_tokenizer(folder))), 1 << 20, source)


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("name", CORPUS)
async def test_no_conversation_has_fewer_tokens_than_its_lower_bound(tmp_path: Path, name: str) -> None:
    tokenizer = of(tmp_path, CORPUS[name])
    several = [said("system", "x" * 50), *[said("user", "a"), said("assistant", "b")] * 3, said("system", "y")]
    for messages in (*CONVERSATIONS.values(), several):
        least = await tokenizer.least_chat_tokens(messages)
        try:
            tokens = await tokenizer.encode_chat(messages, tenant=OPEN)
        except SlipstreamError:  # the template refuses it
            continue
        assert least <= len(tokens)


@pytest.mark.parametrize("name", CORPUS)
async def test_messages_of_users_count_under_every_published_template(tmp_path: Path, name: str) -> None:
    tokenizer = of(tmp_path, CORPUS[name])
    long = [said("user", "  " + "long " * 1000), said("assistant", "-"), said("user", "?")]
    assert await tokenizer.least_chat_tokens(long) >= (4999 + 1) / tokenizer.longest_token


@pytest.mark.parametrize("template", [LAST_ONLY, SHORTENED], ids=["last messages alone", "beginnings alone"])
async def test_where_a_template_leaves_texts_out_nothing_is_counted(tmp_path: Path, template: str) -> None:
    assert await of(tmp_path, template).least_chat_tokens([said("user", "long " * 1000)] * 3) == 1


async def test_the_template_for_tools_has_a_lower_bound_of_its_own(tmp_path: Path) -> None:
    tokenizer = of(tmp_path, {"default": CORPUS["ChatML"], "tool_use": LAST_ONLY})
    messages = [said("user", "long " * 1000)] * 3
    assert await tokenizer.least_chat_tokens(messages) > 1 == await tokenizer.least_chat_tokens(messages, TOOLS)


async def test_several_messages_of_the_system_count_for_nothing(tmp_path: Path) -> None:
    tokenizer = of(tmp_path, DEEPSEEK)
    system = said("system", "long " * 1000)
    assert await tokenizer.least_chat_tokens([system, said("user", "?")]) > 4000 / tokenizer.longest_token
    assert await tokenizer.least_chat_tokens([system, system, said("user", "?")]) == 1


async def test_nothing_of_the_conversation_is_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = of(tmp_path, CORPUS["ChatML"])
    await tokenizer.least_chat_tokens([said("user", "?")])
    monkeypatch.delattr(ChatTemplate, "render")
    messages = [said("user", "long " * 100)] * 100
    assert await tokenizer.least_chat_tokens(messages) > 40_000 / tokenizer.longest_token
    texts = _Texts(tokenizer.encoding)
    assert texts.least_tokens(gateway_pb2.Chat(messages=messages)) > 40_000 / tokenizer.longest_token  # type: ignore[arg-type]


async def test_content_is_not_counted_where_the_request_chooses_another_template(tmp_path: Path) -> None:
    tokenizer = of(tmp_path, CORPUS["ChatML"])
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="long " * 100)])
    chat.template_variables_json = '{"chat_template": "other"}'
    assert _Texts(tokenizer.encoding).least_tokens(chat) == 1


async def test_without_a_template_the_refusal_is_the_rendering_s(tmp_path: Path) -> None:
    tokenizer = Tokenizer(load_tokenizer(str(toy_tokenizer(tmp_path))), 1 << 20)
    assert await tokenizer.least_chat_tokens([said("user", "?")]) == 1
