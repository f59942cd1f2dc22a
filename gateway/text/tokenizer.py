"""Text to token ids, without ever holding the event loop for long: short texts at once, long ones as tenants' work."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Encoder

from gateway.auth.tenant import Tenant
from gateway.text.chat_messages import Message, read_chat
from gateway.text.chat_size import ChatSize, least_tokens
from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import Detokenizer
from gateway.text.encoding import MIDDLE, RENDERED, WHOLE, TextEncoding
from gateway.text.json_body import IDS
from gateway.work.pieces import SHORT, in_pieces, is_short, json_in_pieces
from gateway.work.tenant_work import TenantWork
from slipstream.errors import InvalidArgument
from slipstream.tokenizer.chat_template_source import ChatTemplateSource
from slipstream.tokenizer.grammar import Grammars
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.tokenizer.vocabulary import fingerprint
from slipstream.v1 import gateway_pb2, types_pb2

Conversation = tuple[Sequence[Message], Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""Messages, definitions of tools, and further variables of the template."""
SHORT_TOKENS = 512
"""As few tokens are decoded there."""


class Tokenizer:
    """Token ids of long texts are arrays. Long texts are the tenant's work, and raise what `TenantWork.run` raises."""

    def __init__(
        self,
        encoder: Encoder,
        max_bytes: int,
        chat_template: ChatTemplateSource | None = None,
        work: TenantWork | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`work`: None does everything on the event loop, for callers with a single client. `special_tokens`: by the
        names that the model's configuration has for them."""
        self.special_tokens = special_tokens or {}
        self.encoding = TextEncoding(encoder, max_bytes, chat_template)
        self.work = work
        self._max_bytes = max_bytes
        self._grammars: dict[tuple[object, ...], Grammars] = {}
        self._chat_size = ChatSize(self.encoding.chat_template)
        self.fingerprint = fingerprint(encoder)
        self.longest_token = self.encoding.token_bytes.longest
        """Most bytes of a text for one token; 0 where that is not known."""

    @property
    def chat_template(self) -> ChatTemplate:
        return self.encoding.chat_template

    def least_tokens(self, text: str) -> int:
        """Tokens that a text has at least, which costs nothing to know. Raises InvalidArgument for a text above the
        size limit."""
        size = self._checked_size(text)
        if not self.longest_token:
            return min(1, size)
        return -(-self.encoding.token_bytes.size(text) // self.longest_token)

    async def least_chat_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens that a conversation has at least in the chat template; nothing of it is rendered."""
        texts = self._chat_size.texts(messages, tools, variables or {})
        return least_tokens(await in_pieces(self.encoding.token_bytes.size, texts), self.longest_token)

    async def encode(self, text: str, tenant: Tenant) -> Sequence[int]:
        """Token ids of a whole text, with the special tokens that the tokenizer puts around it. Raises InvalidArgument
        for a text above the size limit."""
        return await self._encode(text, WHOLE, tenant)

    async def tokenize_response(self, text: str, tenant: Tenant) -> gateway_pb2.TokenizeResponse | bytes:
        """The answer of the RPC Tokenize, of a long text serialised. Raises what `encode` raises."""
        self._checked_size(text)
        if self.work is None or is_short(text):
            return gateway_pb2.TokenizeResponse(token_ids=self.encoding.encode(text))
        return bytes(await self._run(tenant, "tokenize", text.encode()))

    async def encode_middle(self, text: str, tenant: Tenant) -> Sequence[int]:
        """Token ids of a part of a text, without special tokens around it. Raises what `encode` raises."""
        return await self._encode(text, MIDDLE, tenant)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        most_tokens: int = 0,
        *,
        tenant: Tenant,
    ) -> Sequence[int]:
        """Token ids of a conversation in the chat template. `most_tokens`: above which the conversation is of no use;
        0: none. Raises what `TextEncoding.encode_chat` raises."""
        given = [messages, tools, variables or {}]
        most_bytes = most_tokens * self.longest_token
        if self.work is None or is_short(given):
            return self.encoding.encode_chat(messages, tools, variables or {}, most_bytes)
        body = await _as_json(given)
        return _ids(await self._run(tenant, "chat", body, proto=False, most_bytes=most_bytes, answer=None))

    async def encode_message(self, chat: gateway_pb2.Chat, most_tokens: int, tenant: Tenant) -> Sequence[int]:
        """`encode_chat` of a conversation as a client of gRPC sends it. Raises what `read_chat` raises, too."""
        if self.work is None or chat.ByteSize() < SHORT:
            return self.encoding.encode_chat(*read_chat(chat), most_tokens * self.longest_token)
        return await self.encode_large_message(chat.SerializeToString(), most_tokens, tenant)

    async def encode_large_message(self, chat: bytes, most_tokens: int, tenant: Tenant) -> Sequence[int]:
        """`encode_message` of a serialised conversation."""
        most_bytes = most_tokens * self.longest_token
        return _ids(await self._run(tenant, "chat", chat, proto=True, most_bytes=most_bytes, answer=None))

    async def tokenized(
        self, given: str | Conversation, tenant: Tenant, *, special: bool, texts: bool, max_length: int
    ) -> bytes:
        """The answer of `/tokenize` in JSON, for a text or a conversation. `special`: with the special tokens around a
        text. `texts`: with the text of each token. Raises what `encode` and `encode_chat` raise."""
        kind, answer = WHOLE if special else RENDERED, {"texts": texts, "max_length": max_length}
        beside = self.work is not None and not is_short(given)
        if isinstance(given, str):
            self._checked_size(given)
            if beside:
                return bytes(await self._run(tenant, "encode", given.encode(), text=kind, answer=answer))
            tokens = self.encoding.encode(given, kind)
        elif beside:
            body = await _as_json(given)
            return bytes(await self._run(tenant, "chat", body, proto=False, most_bytes=0, answer=answer))
        else:
            tokens = self.encoding.encode_chat(*given)
        return self.encoding.tokenized(tokens, texts=texts, max_length=max_length)

    async def decode(self, tokens: Sequence[int], tenant: Tenant, below: int = 0) -> str:
        """The text of these tokens, without special tokens. `below`: where every id has to be; 0: they were checked.
        Raises InvalidArgument for others."""
        if self.work is None or len(tokens) < SHORT_TOKENS:
            return self.encoding.decode(tokens, below)
        return str(await self._run(tenant, "decode", array(IDS, tokens).tobytes(), below=below), "utf-8")

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
            encoder = self.encoding.encoder
            self._grammars[key] = Grammars(lambda: encoder, model.vocabulary_fingerprint, size, ends)
        return self._grammars[key]

    def ends(self, texts: Sequence[str]) -> list[int | str]:
        """Each of these as a token of its own, where the vocabulary has it."""
        found: list[int | str] = []
        for text in texts:
            token = self.encoding.encoder.token_to_id(text)
            found.append(text if token is None else token)
        return found

    def shown(self, token: int) -> gateway_pb2.TokenText:
        """The text and bytes of one token."""
        return self.encoding.shown(token)

    def detokenizer(
        self,
        before: Sequence[int] = (),
        shown: Collection[int] = (),
        left_out: Collection[int] = (),
        *,
        as_text: bool = False,
    ) -> Detokenizer:
        """A detokenizer for one session's output. `before`: tokens that its text goes on from. `shown`: special tokens
        that are written into it, `as_text` or as marks. `left_out`: tokens that are not."""
        return self.encoding.decoder.detokenizer(before, shown, left_out, as_text=as_text)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens without text."""
        return self.encoding.decoder.special_tokens

    def shown_special(self, token: int) -> gateway_pb2.TokenText:
        """The text and bytes of one token where special tokens have text."""
        known = self.shown(token)
        if token not in self.special_token_ids:
            return known
        return gateway_pb2.TokenText(token_id=token, text=known.text, bytes=known.text.encode())

    def _checked_size(self, text: str) -> int:
        size = len(text.encode())
        if size > self._max_bytes:
            raise InvalidArgument(
                f"The text has {size} bytes; send at most {self._max_bytes}.",
                reason="TEXT_TOO_LONG",
                numbers={"bytes": size, "limit": self._max_bytes},
            )
        return size

    async def _encode(self, text: str, kind: str, tenant: Tenant) -> Sequence[int]:
        self._checked_size(text)
        if self.work is None or is_short(text):
            return self.encoding.encode(text, kind)
        return _ids(await self._run(tenant, "encode", text.encode(), text=kind, answer=None))

    async def _run(self, tenant: Tenant, kind: str, body: bytes, **options: Any) -> bytes | bytearray | memoryview:
        assert self.work is not None
        return (await self.work.run(tenant, kind, body, **options)).body


def _ids(packed: bytes | bytearray | memoryview) -> Sequence[int]:
    return array(IDS, bytes(packed))


async def _as_json(value: Any) -> bytes:
    """Raises InvalidArgument for what no JSON can hold."""
    try:
        return await json_in_pieces(value, ascii=False)
    except (RecursionError, ValueError, TypeError) as error:
        message = "The conversation is nested too deeply, or holds what is no JSON."
        raise InvalidArgument(message, reason="TOO_DEEP") from error
