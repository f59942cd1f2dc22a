"""Text to token ids and back, in the thread that asks: a loaded tokenizer, and the model's chat template.

The gateway encodes short texts with it on its event loop (`gateway.text.tokenizer`), and its working processes long
ones (`gateway.text.worker`), with the same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer as Encoder

from gateway.text.chat_messages import Message
from gateway.text.chat_template import NAMED, ChatTemplate
from gateway.text.control_tokens import ControlTokens
from gateway.text.detokenizer import TokenDecoder
from gateway.text.token_bytes import token_bytes
from slipstream.errors import InvalidArgument
from slipstream.tokenizer.chat_template_source import ChatTemplateSource
from slipstream.tokenizer.codec import MidTextEncoder
from slipstream.v1 import gateway_pb2

DEVELOPER = "developer"
"""Role that newer clients give the system's messages; templates that do not know it would leave such messages out."""

WHOLE, MIDDLE, RENDERED = "whole", "middle", "rendered"
"""Kinds of texts: with the special tokens that the tokenizer puts around it; a part of a text, without them; one that
holds its special tokens already, as a chat template writes it."""


class TextEncoding:
    def __init__(self, encoder: Encoder, max_bytes: int, chat_template: ChatTemplateSource | None = None) -> None:
        """`max_bytes`: of what a chat template writes."""
        self.encoder = encoder
        self.token_bytes = token_bytes(encoder)
        self.chat_template = ChatTemplate(chat_template, max_bytes)
        self.decoder = TokenDecoder(encoder)
        plain = partial(self._encode, special=False)
        middle = MidTextEncoder(plain, self._joined)
        self._encoders: Mapping[str, Callable[[str], list[int]]] = {
            WHOLE: self._encode,
            MIDDLE: middle.encode,
            RENDERED: plain,
        }
        self.around = _around(encoder)
        """Tokens that the tokenizer puts before and behind a text."""
        self._control: dict[str, ControlTokens] = {}
        """By source of the template."""

    def encode(self, text: str, kind: str = WHOLE) -> list[int]:
        """Token ids of a text."""
        return self._encoders[kind](text)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        most_bytes: int = 0,
    ) -> list[int]:
        """Token ids of a conversation in the chat template, up to where the model answers. Control tokens in the
        conversation are text. `most_bytes`: of the text that the template makes; 0: what a template may write. Raises
        what `ControlTokens.mark` and `ChatTemplate.render` raise, and InvalidArgument for
        what is nested too deeply."""
        source = self.chat_template.source(tools=bool(tools), name=variables.get(NAMED))
        if DEVELOPER not in source:
            messages = [dict(each) | {"role": "system"} if each.get("role") == DEVELOPER else each for each in messages]
        if source not in self._control:
            self._control[source] = ControlTokens(self.encoder, source)
        try:
            mark, messages, tools, variables = self._control[source].mark(messages, tools, variables)
        except RecursionError as error:
            raise InvalidArgument(
                "The conversation, its tools or the template's variables are nested too deeply.", reason="TOO_DEEP"
            ) from error
        first, *others = self.chat_template.render(messages, tools, variables).split(mark)
        if most_bytes and sum(map(self.token_bytes.size, (first, *others))) > most_bytes:
            raise InvalidArgument(
                f"This model's maximum context length is exceeded: the conversation has more than {most_bytes} bytes "
                "in the model's template, and so more tokens than it takes; shorten it.",
                reason="PROMPT_TOO_LONG",
                field="prompt",
                numbers={"limit_bytes": most_bytes},
            )
        tokens = self.encode(first, RENDERED)  # the template writes special tokens
        for text in others:
            tokens += self.encode(text, MIDDLE)
        return tokens

    def decode(self, tokens: Sequence[int], below: int = 0) -> str:
        """The text of token ids. `below`: where every id has to be; 0: they were checked. Raises InvalidArgument."""
        if below and max(tokens, default=0) >= below:
            raise InvalidArgument(f"The model has tokens below {below}.", reason="TOKEN_OUT_OF_RANGE")
        return self.decoder.whole(tokens)

    def tokenized(self, tokens: Sequence[int], *, texts: bool, max_length: int) -> bytes:
        """The answer of `/tokenize` in JSON. `texts`: with the text of each token."""
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": max_length, "tokens": list(tokens)}
        if texts:
            answer["token_strs"] = [self.shown(token).text for token in tokens]
        return json.dumps(answer).encode()

    def shown(self, token: int) -> gateway_pb2.TokenText:
        """The text and bytes of one token."""
        return self.decoder.text_of(token)

    def _encode(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = self.encoder.encode(text, add_special_tokens=special).ids
        return ids

    def _joined(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.shown(token).bytes for token in tokens)


def _around(encoder: Encoder) -> tuple[int, int]:
    """Tokens that a tokenizer puts before and behind a text."""
    added = encoder.encode("a").special_tokens_mask
    if 0 not in added:
        return len(added), 0
    return added.index(0), added[::-1].index(0)
