"""Text to token ids, without ever holding the event loop for long."""

from __future__ import annotations

import asyncio

from tokenizers import Tokenizer as Encoder

from gateway.detokenizer import Decoding, Detokenizer
from slipstream.errors import InvalidArgument
from slipstream.vocabulary import fingerprint

THREAD_FROM_CHARACTERS = 2048
"""Shorter texts are encoded in less time than a thread costs."""


class Tokenizer:
    def __init__(self, encoder: Encoder, max_bytes: int) -> None:
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._decoding = Decoding(encoder)
        self.fingerprint = fingerprint(encoder)

    async def encode(self, text: str) -> list[int]:
        """Raises InvalidArgument for a text above the limit."""
        size = len(text.encode())
        if size > self._max_bytes:
            raise InvalidArgument(f"The text has {size} bytes; send at most {self._max_bytes}.", reason="TEXT_TOO_LONG")
        if len(text) < THREAD_FROM_CHARACTERS:
            return self._encode(text)
        return await asyncio.to_thread(self._encode, text)

    def detokenizer(self) -> Detokenizer:
        """For one session's output."""
        return self._decoding.detokenizer()

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode(text).ids
        return ids
