"""How many bytes a conversation has at least in the model's template, known without rendering it: templates write what
users and the application say as it is, which is found out by rendering a few messages once.

What assistants and tools say does not count: templates leave reasoning out of it, or write it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.text.chat_messages import Message
from gateway.text.chat_template import NAMED, ChatTemplate
from slipstream.errors import SlipstreamError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TURNS = 4
"""Answers of the conversation that is tried: some templates write the last turns alone."""
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


class ChatSize:
    """Of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._written: dict[str, frozenset[str]] = {}
        """By source of the template: roles whose texts it writes."""

    def texts(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Iterator[str]:
        """Texts of which each byte but white space around it will be in what the template writes; none where that is
        not known."""
        try:
            source = self._template.source(tools=bool(tools), name=variables.get(NAMED))
        except SlipstreamError:  # rendering says why
            return
        if source not in self._written:
            self._written[source] = self._written_roles([TOOL] if tools else [], variables.get(NAMED))
        written = self._written[source]
        if sum(message.get("role") == SYSTEM for message in messages) > 1:
            written -= {SYSTEM}  # some templates write the last one alone
        for message in messages:
            content, role = message.get("content"), message.get("role")
            if isinstance(content, str) and isinstance(role, str) and role in written:
                yield content.strip()

    def _written_roles(self, tools: Sequence[Mapping[str, Any]], name: Any) -> frozenset[str]:
        turns = [{"role": role, "content": f"{100_003 + turn}"} for turn in range(TURNS) for role in (USER, ASSISTANT)]
        asked = {"role": USER, "content": "200003"}
        first = {"role": SYSTEM, "content": "300007"}
        written: set[str] = set()
        for messages in ([*turns, asked], [first, *turns, asked]):
            try:
                text = self._template.render(messages, tools, {} if name is None else {NAMED: name})
            except SlipstreamError:  # it refuses such a conversation
                continue
            for role in (USER, SYSTEM):
                own = [each["content"] for each in messages if each["role"] == role]
                if own and all(content in text for content in own):
                    written.add(role)
                else:
                    written.discard(role)
        return frozenset(written)


def least_tokens(texts: Iterator[str], size: Callable[[str], int], longest: int) -> int:
    """Tokens that a conversation with these texts has at least, one where that is not known. `size`: bytes of a text
    that are in its tokens; `longest`: most of one token, 0 where that is not known."""
    return max(1, -(-sum(map(size, texts)) // longest)) if longest else 1
