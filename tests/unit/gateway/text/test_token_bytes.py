"""A bound on how few tokens a text has is one, for every tokenizer that it is computed for."""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.text.token_bytes import NFC_SHRINKS, UNKNOWN, TokenBytes, token_bytes
from slipstream.tokenizer.vocabulary import SHIPPED, load_tokenizer

SIGNS = "ab! f<s>\n é中🚀한가Ωé" + "\u0301\u212a\u1fef"


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
    "bytes without tokens": lambda: byte_level(left_out="!f"),
    "shipped": lambda: load_tokenizer(str(SHIPPED / "target")),
}
UNBOUNDED = {
    "an added token that takes the blanks before it": lambda: byte_level(added=(AddedToken("<s>", lstrip=True),)),
    "a normaliser that leaves accents out": lambda: byte_level(normalizers.StripAccents()),
    "a normaliser that shortens": lambda: byte_level(normalizers.Replace("aa", "a")),
    "a byte without a token, which a normaliser may make": lambda: byte_level(normalizers.NFC(), left_out="!"),
    "no fallback": lambda: sentence_piece(fallback=False),
    "words": lambda: Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
}


@cache
def known(name: str) -> tuple[Tokenizer, TokenBytes]:
    tokenizer = KNOWN[name]()
    return tokenizer, token_bytes(tokenizer)


@pytest.mark.parametrize("name", KNOWN)
@given(text=st.text(st.sampled_from(SIGNS)) | st.text() | st.sampled_from(["ab" * 50, "\u212a" * 50, " " * 50]))
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer, bound = known(name)
    assert 0 < bound.longest < 200
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * bound.longest >= bound.size(text)


def test_bytes_without_tokens_do_not_count() -> None:
    _, bound = known("bytes without tokens")
    assert bound.size("af!bé!f") == len("abé".encode())
    assert known("bytes")[1].size("a!b") == 3


def test_the_real_model_s_tokenizer_has_a_bound() -> None:
    """It lacks tokens for control characters, and for bytes that no text has."""
    file = Path(__file__).parents[4] / ".cache" / "smollm2" / "tokenizer.json"
    if not file.exists():
        pytest.skip("`make real-model` downloads it")
    bound = token_bytes(Tokenizer.from_file(str(file)))
    assert bound.longest == 81 and bound.size("ab\x04") == 2


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_a_token_may_stand_for_any_text_there_is_no_bound(name: str) -> None:
    assert token_bytes(UNBOUNDED[name]()) == UNKNOWN


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
