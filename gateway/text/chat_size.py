"""Least number of bytes that a conversation has in the model's template, known without rendering it: templates write
what users and the application say as it is (`gateway.text.written_roles`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gateway.text.chat_messages import Message, texts_in
from gateway.text.chat_template import NAMED, ChatTemplate
from gateway.text.written_roles import SYSTEM
from slipstream.errors import SlipstreamError
from slipstream.v1 import gateway_pb2


class ChatSize:
    """Size of conversations in one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def texts(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Iterator[str]:
        """Texts of which each byte but white space around it will be in what the template writes; none where that is
        not known."""
        try:
            written = self._template.written_roles(tools=bool(tools), name=variables.get(NAMED)).counted
        except SlipstreamError:  # rendering says why
            return
        if sum(message.get("role") == SYSTEM for message in messages) > 1:
            written -= {SYSTEM}  # some templates write the last one alone
        for message in messages:
            content, role = message.get("content"), message.get("role")
            if isinstance(role, str) and role in written:
                yield from (text.strip() for text in texts_in(content))

    def texts_of_message(self, chat: gateway_pb2.Chat) -> Iterator[str]:
        """`texts` of a conversation as clients of gRPC send it."""
        # Another of the model's templates may be named there, and fields may replace what a message says.
        if not chat.template_variables_json and not any(each.fields_json for each in chat.messages):
            yield from self.texts([{"role": each.role, "content": each.content} for each in chat.messages], (), {})


def least_tokens(sizes: Iterable[int], longest: int) -> int:
    """Tokens that a conversation has at least whose texts have so many bytes in their tokens, one where that is not
    known. `longest`: most of one token, 0 where that is not known."""
    return max(1, -(-sum(sizes) // longest)) if longest else 1
