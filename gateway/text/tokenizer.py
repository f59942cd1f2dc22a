"""Text to token ids, without ever holding the event loop for long."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Encoder

from gateway.text.chat_template import ChatTemplate, Message
from gateway.text.control_tokens import ControlTokens
from gateway.text.detokenizer import Detokenizer, TokenDecoder
from slipstream.errors import InvalidArgument
from slipstream.tokenizer.chat_template_source import ChatTemplateSource
from slipstream.tokenizer.codec import Encode, MidTextEncoder
from slipstream.tokenizer.grammar import Grammars
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.tokenizer.vocabulary import fingerprint
from slipstream.v1 import gateway_pb2, types_pb2

THREAD_FROM_CHARACTERS = 2048
"""Shorter texts are encoded in less time than a thread costs."""

DEVELOPER = "developer"
"""Role that newer clients give the system's messages; templates that do not know it would leave such messages out."""


class Tokenizer:
    def __init__(self, encoder: Encoder, max_bytes: int, chat_template: ChatTemplateSource | None = None) -> None:
        self._encoder = encoder
        self.chat_template = ChatTemplate(chat_template, max_bytes)
        self._max_bytes = max_bytes
        self._decoding = TokenDecoder(encoder)
        self._middle = MidTextEncoder(partial(self._encode, special=False), self._joined)
        self._control: dict[str, ControlTokens] = {}
        """By source of the template."""
        self._grammars: dict[tuple[object, ...], Grammars] = {}
        self.fingerprint = fingerprint(encoder)

    async def encode(self, text: str) -> list[int]:
        """Token ids of a whole text, with the special tokens that the tokenizer puts around it. Raises InvalidArgument
        for a text above the size limit."""
        return await self._measured(self._encode, text)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the chat template, up to where the model answers. Control tokens in the
        conversation are text. Raises what `ControlTokens.mark` and `ChatTemplate.render` raise, and InvalidArgument for
        what is nested too deeply."""
        return await asyncio.to_thread(self._encode_chat, messages, tools, variables or {})

    async def encode_middle(self, text: str) -> list[int]:
        """Token ids of a part of a text, without special tokens around it. Raises what `encode` raises."""
        return await self._measured(self._middle.encode, text)

    async def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a text that holds its special tokens already, as a chat template writes it. Raises what `encode`
        raises."""
        return await self._measured(partial(self._encode, special=False), text)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, without special tokens."""
        return await asyncio.to_thread(self._decoding.whole, tokens)

    async def prepare(self, model: types_pb2.ModelInfo) -> None:
        """Prepare structured output for a model: what takes long the first time is done now."""
        await asyncio.wrap_future(self._grammars_of(model).prepare())

    async def compile(self, structure: StructuredOutput, model: types_pb2.ModelInfo, salt: str, tenant: str) -> None:
        """Raises InvalidArgument for a structure that cannot be read, FailedPrecondition for one that the model cannot
        write."""
        await asyncio.wrap_future(self._grammars_of(model).compile(structure, salt, tenant))

    def _grammars_of(self, model: types_pb2.ModelInfo) -> Grammars:
        """The compiled grammars for a model. The models of a gateway share their tokenizer, but not always these
        values."""
        size, ends = model.vocabulary_size, tuple(model.eos_token_ids)
        key = (model.vocabulary_fingerprint, size, ends)
        if key not in self._grammars:
            self._grammars[key] = Grammars(lambda: self._encoder, model.vocabulary_fingerprint, size, ends)
        return self._grammars[key]

    def shown(self, token: int) -> gateway_pb2.TokenText:
        """The text and bytes of one token."""
        return self._decoding.text_of(token)

    def detokenizer(self) -> Detokenizer:
        """A detokenizer for one session's output."""
        return self._decoding.detokenizer()

    async def _measured(self, encode: Encode, text: str) -> list[int]:
        size = len(text.encode())
        if size > self._max_bytes:
            raise InvalidArgument(f"The text has {size} bytes; send at most {self._max_bytes}.", reason="TEXT_TOO_LONG")
        if len(text) < THREAD_FROM_CHARACTERS:
            return encode(text)
        return await asyncio.to_thread(encode, text)

    def _encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> list[int]:
        source = self.chat_template.source(tools=bool(tools))
        if DEVELOPER not in source:
            messages = [dict(each) | {"role": "system"} if each.get("role") == DEVELOPER else each for each in messages]
        if source not in self._control:
            self._control[source] = ControlTokens(self._encoder, source)
        try:
            mark, messages, tools, variables = self._control[source].mark(messages, tools, variables)
        except RecursionError as error:
            raise InvalidArgument(
                "The conversation, its tools or the template's variables are nested too deeply.", reason="TOO_DEEP"
            ) from error
        first, *others = self.chat_template.render(messages, tools, variables).split(mark)
        tokens = self._encode(first, special=False)  # the template writes special tokens
        for text in others:
            tokens += self._middle.encode(text)
        return tokens

    def _encode(self, text: str, special: bool = True) -> list[int]:
        if len(text) < THREAD_FROM_CHARACTERS:
            return _ids(self._encoder.encode(text, add_special_tokens=special))
        # `encode` keeps Python's lock: other threads, and so all streams, would wait. Encoding a batch does not.
        return _ids(self._encoder.encode_batch([text], add_special_tokens=special)[0])

    def _joined(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.shown(token).bytes for token in tokens)


def _ids(encoding: Encoding) -> list[int]:
    ids: list[int] = encoding.ids
    return ids
