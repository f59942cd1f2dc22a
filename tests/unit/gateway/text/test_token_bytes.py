"""A bound on how few tokens a text has is one, for every tokenizer that it is computed for."""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.text.token_bytes import NFC_SHRINKS, longest_token_bytes
from slipstream.tokenizer.vocabulary import SHIPPED, load_tokenizer

SIGNS = "ab f<s>\n é中🚀한가Ωé" + "\u0301\u212a\u1fef"


def byte_level(normaliser: object = None, added: tuple[AddedToken, ...] = (), left_out: str = "") -> Tokenizer:
    words = [*(word for word in sorted(pre_tokenizers.ByteLevel.alphabet()) if word not in left_out), "ab", "abab"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [("a", "b"), ("ab", "ab")]))
    tokenizer.normalizer = normaliser
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def sentence_piece(fallback: bool = True) -> Tokenizer:
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "ab", "▁ab"]
    merges = [("a", "b"), ("▁", "ab")]
    tokenizer = Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, merges, byte_fallback=fallback, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


KNOWN = {
    "bytes": lambda: byte_level(added=(AddedToken("<s>", special=True),)),
    "normal form C": lambda: byte_level(normalizers.NFC()),
    "SentencePiece": sentence_piece,
    "shipped": lambda: load_tokenizer(str(SHIPPED / "target")),
}
UNKNOWN = {
    "an added token that takes the blanks before it": lambda: byte_level(added=(AddedToken("<s>", lstrip=True),)),
    "a normaliser that leaves accents out": lambda: byte_level(normalizers.StripAccents()),
    "a normaliser that shortens": lambda: byte_level(normalizers.Replace("aa", "a")),
    "a byte without a token": lambda: byte_level(left_out="!"),
    "no fallback": lambda: sentence_piece(fallback=False),
    "words": lambda: Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
}


@cache
def known(name: str) -> tuple[Tokenizer, int]:
    tokenizer = KNOWN[name]()
    return tokenizer, longest_token_bytes(tokenizer)


@pytest.mark.parametrize("name", KNOWN)
@given(text=st.text(st.sampled_from(SIGNS)) | st.text() | st.sampled_from(["ab" * 50, "\u212a" * 50, " " * 50]))
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer, longest = known(name)
    assert 0 < longest < 200
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * longest >= len(text.encode())


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_a_token_may_stand_for_any_text_there_is_no_bound(name: str) -> None:
    assert longest_token_bytes(UNKNOWN[name]()) == 0


def test_normal_form_c_shortens_by_no_more_than_that() -> None:
    """Each character of a normal form, against the longest text of which it is the normal form: its full decomposition,
    in which each character may be written by any other one with the same decomposition."""
    longest: dict[str, int] = defaultdict(int)
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    decomposed = {each: unicodedata.normalize("NFD", each) for each in characters}
    for each, parts in decomposed.items():
        if len(parts) == 1:
            longest[parts] = max(longest[parts], len(each.encode()))
    ratios = [
        sum(longest[part] for part in parts) / len(each.encode())
        for each, parts in decomposed.items()
        if unicodedata.normalize("NFC", each) == each
    ]
    assert max(ratios) <= NFC_SHRINKS
