"""Where tokens and text differ: text that continues another one is encoded as such, with tokenizers that treat all
input as the beginning of a text, and entries of a vocabulary that stand for bytes are decoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def chain(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Settings of each decoder, with its `type`; nested sequences are flattened."""
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else None
    return _unfolded(json.loads(state)) if state is not None else []


def _unfolded(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [each for part in decoder["decoders"] for each in _unfolded(part)]


def byte_token(word: str) -> bytes | None:
    """The byte of a SentencePiece byte-fallback entry (`<0x41>`); None for other entries."""
    found = _BYTE_TOKEN.fullmatch(word)
    return bytes.fromhex(found[1]) if found else None


def byte_level(word: str) -> bytes:
    """The bytes of a byte-level entry; an entry with a character outside the alphabet stands for itself."""
    try:
        return bytes(_ALPHABET[character] for character in word)
    except KeyError:
        return word.encode()


def plain_token(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> tuple[int, str] | None:
    """The first of these tokens with plain text of its own, as (token, text). It is put before others, because a
    decoder may strip a space at the beginning of a text."""
    for token in tokens:
        text = decode([token])
        if text.isalnum() and decode([token, token]).startswith(text):
            return token, text
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


Encode = Callable[[str], list[int]]
"""Encodes without special tokens. May raise where the tokenizer has no token for a character."""
_ANCHORS = ("\n", "0", ".", "a")
_PROBES = ("b", " b", "\nb", "(b")


class MidTextEncoder:
    """Encodes behind an anchor, whose tokens are removed again: the tokenizer puts its space before the anchor."""

    def __init__(self, encode: Encode, joined: Callable[[Sequence[int]], bytes]) -> None:
        """`joined` returns the bytes of tokens that follow others."""
        self._encode = encode
        self._joined = joined
        self.prepends = joined(self._probed("b")) == b" b"
        """Whether the tokenizer puts a space before a text."""
        self._anchor = self._find_anchor() if self.prepends else None

    def encode(self, text: str) -> list[int]:
        if self._anchor is not None:
            anchor, tokens = self._anchor
            found = self._encode(anchor + text)
            if found[: len(tokens)] == tokens:
                return found[len(tokens) :]
        return self._encode(text)

    def _probed(self, text: str) -> list[int]:
        try:
            return self._encode(text)
        except Exception:  # tokenizers raises bare Exception
            return []

    def _find_anchor(self) -> tuple[str, list[int]] | None:
        def intact(anchor: str) -> int:
            tokens = self._probed(anchor)
            found = [(self._probed(anchor + probe), probe) for probe in _PROBES]
            size = len(tokens)
            return sum(ids[:size] == tokens and self._joined(ids[size:]) == text.encode() for ids, text in found)

        best = max(_ANCHORS, key=intact)
        return (best, self._probed(best)) if intact(best) else None
