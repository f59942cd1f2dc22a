"""Least number of tokens that a text can have: a text of N bytes has at least N / longest of them, where a token stands
for at most so many bytes.

That holds only for tokenizers that leave nothing of a text out: byte-level BPE and BPE with byte fallback, without
normalisers and added tokens that swallow text. Bytes that a byte-level vocabulary lacks, such as control characters in
SmolLM2's, are left out of texts and do not count. For other tokenizers there is no bound.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers

from slipstream.tokenizer.codec import byte_level, byte_token

NFC_SHRINKS = 4
"""A text has at most so many times the bytes of its normal form C (a test computes it)."""
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"}
"""Pre-tokenizers that only divide a text, unless configured to remove what they divide by."""


class TokenBytes(NamedTuple):
    """Bytes of a text behind its tokens."""

    longest: int
    """Most that one token stands for; 0 where that is not known."""
    left_out: bytes = b""
    """Bytes for which there is no token."""

    def size(self, text: str) -> int:
        """Bytes of a text that are in its tokens."""
        encoded = text.encode()
        return len(encoded.translate(None, self.left_out) if self.left_out else encoded)


UNKNOWN = TokenBytes(0)


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """UNKNOWN where a token may stand for any text."""
    shrinks = _shrinks(_state(tokenizer.normalizer))
    splits = _flat(_state(tokenizer.pre_tokenizer), "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    if not shrinks or not isinstance(tokenizer.model, models.BPE) or any(each.lstrip or each.rstrip for each in added):
        return UNKNOWN
    if any(each["type"] not in _KEEPING or each.get("behavior") == "Removed" for each in splits):
        return UNKNOWN
    words = tokenizer.get_vocab(with_added_tokens=False)
    left_out = b""
    if any(each["type"] == "ByteLevel" for each in splits):
        signs = set(pre_tokenizers.ByteLevel.alphabet()) - words.keys()
        left_out = bytes(sorted(byte_level(sign)[0] for sign in signs))
        # A normaliser may make such bytes of others.
        known, sizes = not left_out or tokenizer.normalizer is None, [len(word) for word in words]
    else:
        fallback = tokenizer.model.byte_fallback
        known = fallback and sum(byte_token(word) is not None for word in words) == 256
        sizes = [len(word.encode()) for word in words]
    if not known:  # what the model has no token for is left out, or is one token however long it is
        return UNKNOWN
    return TokenBytes(shrinks * max(*sizes, *(len(each.content.encode()) for each in added), 1), left_out)


def _shrinks(normaliser: dict[str, Any] | None) -> int:
    """Returns the largest ratio of a text's bytes to those of its normalised form; 0 where it is not known."""
    factor = 1
    for each in _flat(normaliser, "normalizers"):
        if each["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif each["type"] == "Replace":
            found = each["pattern"].get("String")
            if found is None or len(each["content"].encode()) < len(found.encode()):
                return 0
        elif each["type"] != "Prepend":
            return 0
    return factor


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _flat(part: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [each for member in part[members] for each in _flat(member, members)]
