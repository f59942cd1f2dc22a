"""The bytes that each token of a tokenizer stands for, and the tokens that spell given bytes.

Bytes and not characters, because a token may hold half a character. Spellings are those in the middle of a text: the
beginning of a text (a space before it, a special token) is treated apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from slipstream.tokenizer.codec import MidTextEncoder, byte_level, byte_token, chain, plain_token

_BROKEN = re.compile("([\udc80-\udcff]+)")
"""Bytes that are no UTF-8, as `surrogateescape` shows them."""


class Spelling:
    """Takes the tokenizer over: its parsing of special tokens is switched off.

    `size` bounds the ids that `encode` returns: a model may have fewer rows than its tokenizer has tokens.
    """

    def __init__(self, tokenizer: Tokenizer, size: int | None = None) -> None:
        tokenizer.encode_special_tokens = True  # `<s>` in a text is three characters
        self._tokenizer = tokenizer
        known = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.size = known if size is None else size
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token.content: index for index, token in added.items() if token.special}
        self.words = list(self._words(known, {index: token.content for index, token in added.items()}))
        """Bytes of each token; None for one without text: special, unknown, or not decodable by itself."""
        self._bytes = _byte_tokens(self.words)
        self.opening = self._opening()
        self._middle = MidTextEncoder(self._encode, self.joined)
        self.prepends = self._middle.prepends

    def word(self, token: int) -> bytes | None:
        return self.words[token] if 0 <= token < len(self.words) else None

    def joined(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.word(token) or b"" for token in tokens)

    def encode(self, data: bytes, inside: bool = True) -> list[int]:
        """The tokens that spell `data` in the middle of a text, or at its beginning. Never raises.

        Text without tokens is left out or becomes the unknown token: compare `joined` where that matters.
        """
        try:
            tokens = self._middle.encode(data.decode()) if inside else self._encode(data.decode())
        except UnicodeDecodeError:
            tokens = self._encode_broken(data, inside)
        return [token for token in tokens if token < self.size]

    def _encode_broken(self, data: bytes, inside: bool) -> list[int]:
        tokens: list[int] = []
        for number, part in enumerate(_BROKEN.split(data.decode("utf-8", "surrogateescape"))):
            if number % 2:
                broken = part.encode("utf-8", "surrogateescape")
                tokens += [self._bytes[byte] for byte in broken if byte in self._bytes]
            elif part:
                tokens += self._middle.encode(part) if inside or number else self._encode(part)
        return tokens

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception:  # tokenizers raises bare Exception where it has no token for a character
            return []
        return ids

    def _opening(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before every text, such as one for its beginning."""
        encoding = self._tokenizer.encode("b", add_special_tokens=True)
        first = next((i for i, special in enumerate(encoding.special_tokens_mask) if not special), 0)
        return tuple(token for token in encoding.ids[:first] if token < self.size)

    def _words(self, known: int, added: dict[int, str]) -> Iterator[bytes | None]:
        kinds = {kind["type"] for kind in chain(self._tokenizer)}
        special = set(self.special.values())
        anchor = None if "ByteLevel" in kinds or not kinds else self._anchor(known, special)
        for index in range(known):
            word: str | None = self._tokenizer.id_to_token(index)
            if word is None or index in special:
                yield None
            elif "ByteFallback" in kinds and (byte := byte_token(word)):
                yield byte
            elif index in added:
                yield added[index].encode()
            elif "ByteLevel" in kinds:
                yield byte_level(word)
            else:
                yield _clean(word if anchor is None else self._after(anchor, index))

    def _anchor(self, known: int, special: set[int]) -> tuple[int, str] | None:
        words = (index for index in range(known) if self._tokenizer.id_to_token(index) is not None)
        return plain_token((index for index in words if index not in special), self._decode)

    def _after(self, anchor: tuple[int, str], token: int) -> str:
        first, alone = anchor
        both = self._decode([first, token])
        return both[len(alone) :] if both.startswith(alone) else ""

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def _clean(text: str) -> bytes | None:
    """None for a token that is no text by itself: decoders put U+FFFD for half a character."""
    return text.encode() if text and "\ufffd" not in text else None


def _byte_tokens(words: list[bytes | None]) -> dict[int, int]:
    """The token of each single byte, for broken UTF-8; any of several that spell it."""
    return {word[0]: token for token, word in enumerate(words) if word is not None and len(word) == 1}
