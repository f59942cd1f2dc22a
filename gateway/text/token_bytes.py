"""How few tokens a text can have: a text of N bytes has at least N / longest of them, where a token stands for at most
so many bytes.

That holds only for tokenizers that leave nothing of a text out: byte-level BPE and BPE with byte fallback, without
normalisers and added tokens that swallow text. For others there is no bound.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from slipstream.tokenizer.codec import byte_token

NFC_SHRINKS = 4
"""A text has at most so many times the bytes of its normal form C (a test computes it)."""
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"}
"""Pre-tokenizers that only divide a text, unless told to remove what they divide by."""


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """Most bytes of a text that one token stands for; 0 where that is not known."""
    shrinks = _shrinks(_state(tokenizer.normalizer))
    splits = _flat(_state(tokenizer.pre_tokenizer), "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    if not shrinks or not isinstance(tokenizer.model, models.BPE) or any(each.lstrip or each.rstrip for each in added):
        return 0
    if any(each["type"] not in _KEEPING or each.get("behavior") == "Removed" for each in splits):
        return 0
    words = tokenizer.get_vocab(with_added_tokens=False)
    byte_level = any(each["type"] == "ByteLevel" for each in splits)
    if byte_level:
        known, sizes = set(pre_tokenizers.ByteLevel.alphabet()) <= words.keys(), [len(word) for word in words]
    else:
        fallback = tokenizer.model.byte_fallback
        known = fallback and sum(byte_token(word) is not None for word in words) == 256
        sizes = [len(word.encode()) for word in words]
    if not known:  # what the model has no token for is left out, or is one token however long it is
        return 0
    return shrinks * max(*sizes, *(len(each.content.encode()) for each in added), 1)


def _shrinks(normaliser: dict[str, Any] | None) -> int:
    """How many times the bytes of its normalised form a text has at most; 0 where that is not known."""
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
