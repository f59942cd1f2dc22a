"""Two tokenizers, one text: real tokenizers of four families, trained here on a few lines."""

from __future__ import annotations

import json
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from slipstream.proposers.cross_vocabulary.continuations import Continuations, Ending
from slipstream.proposers.cross_vocabulary.spelling import Spelling
from slipstream.proposers.cross_vocabulary.translation import CUT_AT, DraftText, Translation

LINES = [
    "def read(self, path): return open(path).read()  # opens the path and reads it",
    "for item in items:\n    if item.name is None:\n        return None\n    print(item.name, item.path)",
    "the reader reads what the writer wrote; the naïve façade — “quoted” — costs 5 € or 日本語 and 🙂🙂",
    "import sys\nimport os.path as ospath\n\n\nclass Reader(object):\n    pass\n",
]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
WORDS = Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")


def byte_level(size: int, special: list[str], *, regex: bool = True, space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=regex)
    tokenizer.pre_tokenizer = (
        split if regex else pre_tokenizers.Sequence([pre_tokenizers.Split(WORDS, "isolated"), split])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=ALPHABET, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: a space before a text, blanks as `▁`, single bytes for the unknown, a token for the beginning."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator([word for line in LINES for word in line.replace(" ", " ▁").split(" ")], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][: len(special)]  # single bytes are plain tokens
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


FAMILIES = {
    "bytes": lambda: byte_level(340, ["<|end|>", "<|mark|>"]),
    "other bytes": lambda: byte_level(420, ["</s>", "<|mark|>"], regex=False),
    "bytes after a space": lambda: byte_level(330, ["<|end|>"], space=True),
    "only bytes": lambda: byte_level(257, ["<|end|>"]),
    "byte fallback": byte_fallback,
    "unigram": unigram,
    "word piece": word_piece,
}
LOSSLESS = ("bytes", "other bytes", "bytes after a space", "only bytes", "byte fallback")
"""Families that have tokens for any text."""
PAIRS = [
    ("bytes", "other bytes"),
    ("other bytes", "byte fallback"),
    ("byte fallback", "bytes after a space"),
    ("bytes after a space", "unigram"),
    ("unigram", "word piece"),
    ("word piece", "only bytes"),
    ("only bytes", "bytes"),
]


@cache
def spelling(family: str) -> Spelling:
    return Spelling(FAMILIES[family]())


@cache
def translation(target: str, draft: str) -> Translation:
    return Translation(spelling(target), spelling(draft))


def tokens_of(family: str) -> st.SearchStrategy[list[int]]:
    """Any tokens, half of the time those of real text; ids beyond the vocabulary too."""
    some = st.text(st.sampled_from("adeinrt .\n(é日🙂")).map(lambda text: spelling(family).encode(text.encode(), False))
    real = st.sampled_from(LINES).map(lambda line: spelling(family).encode(line.encode(), False))
    return st.one_of(st.lists(st.integers(0, spelling(family).size + 1), max_size=40), some, real)


def as_bytes(family: str, tokens: list[int]) -> bytes:
    return spelling(family).joined(tokens)


@pytest.mark.parametrize("family", LOSSLESS)
@given(text=st.one_of(st.text(max_size=30), st.sampled_from(LINES)), broken=st.binary(max_size=4), inside=st.booleans())
@settings(max_examples=60, deadline=None)
def test_tokens_spell_the_bytes_that_were_encoded(family: str, text: str, broken: bytes, inside: bool) -> None:
    data = text.encode() + broken
    found = as_bytes(family, spelling(family).encode(data, inside))
    assert found == data or (not inside and spelling(family).prepends and found == b" " + data)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_draft_tokens_are_a_function_of_the_text(target: str, draft: str, data: st.DataObject) -> None:
    """In whatever pieces it arrives."""
    pair = translation(target, draft)
    grown, told, longest = DraftText(pair), list[int](), 0
    for _ in range(data.draw(st.integers(1, 6))):
        kept = grown.closed[:]
        fresh = data.draw(tokens_of(target))
        grown.read(fresh)
        told += fresh
        once = DraftText(pair)
        once.read(told)
        assert grown.ids == once.ids
        assert len(grown) == len(told)
        assert grown.closed[: len(kept)] == kept
        longest = max(longest, len(grown.tail()))
        assert all(0 <= token < pair.draft.size for token in grown.ids)
    path = data.draw(tokens_of(target))
    ahead = grown.closed + grown.tail(path)
    grown.read(path)
    assert ahead == grown.ids
    assert longest <= CUT_AT + 8


@pytest.mark.parametrize(("target", "draft"), [("bytes", "other bytes"), ("byte fallback", "bytes")])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_nothing_of_the_text_is_lost_or_added(target: str, draft: str, data: st.DataObject) -> None:
    pair = translation(target, draft)
    tokens = data.draw(tokens_of(target))
    text = DraftText(pair)
    text.read(tokens)
    expected = as_bytes(target, tokens)
    found = as_bytes(draft, text.ids)
    assert found == expected or (pair.target.prepends and b" " + found == expected)


def test_every_byte_token_of_half_a_character_arrives() -> None:
    pair = translation("only bytes", "bytes")
    text = DraftText(pair)
    smile = pair.target.encode("a🙂".encode())
    for count, token in enumerate(smile):
        text.read([token])
        assert as_bytes("bytes", text.ids) == "a🙂".encode()[: count + 1]


def test_special_tokens_are_never_spelled_out_and_map_to_their_counterparts() -> None:
    pair = Translation(spelling("bytes"), spelling("other bytes"), ([0], [0]))
    mark, end = pair.target.special["<|mark|>"], pair.target.special["<|end|>"]
    text = DraftText(pair)
    text.read([*pair.target.encode(b"in"), mark, *pair.target.encode(b"it"), end])
    draft = pair.draft
    twins = draft.special["<|mark|>"], draft.special["</s>"]
    assert text.ids == [*draft.encode(b"in"), twins[0], *draft.encode(b"it"), twins[1]]
    assert (pair.first[twins[0]], pair.first[twins[1]]) == (mark, end)
    alone = translation("bytes", "unigram")
    assert alone.pieces[mark] == b""
    literal = draft.encode(b"<|mark|>")
    assert twins[0] not in literal and draft.joined(literal) == b"<|mark|>"


def test_the_beginning_is_marked_once() -> None:
    to_llama, from_llama = translation("bytes", "byte fallback"), translation("byte fallback", "bytes")
    begin = to_llama.draft.special["<s>"]
    text = DraftText(to_llama)
    text.read(to_llama.target.encode(b"read it"))
    assert text.ids == [begin, *to_llama.draft.encode(b"read it", False)]
    assert as_bytes("byte fallback", text.ids) == b" read it"
    back = DraftText(from_llama)
    back.read(text.ids)
    assert back.ids == from_llama.draft.encode(b"read it")
    same = Translation(spelling("byte fallback"), spelling("byte fallback"))
    mirror = DraftText(same)
    mirror.read(text.ids)
    assert mirror.ids == text.ids


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_string_leads_to_a_target_token_that_begins_it(target: str, draft: str, data: st.DataObject) -> None:
    pair = translation(target, draft)
    last = pair.target.word(data.draw(st.integers(0, pair.target.size - 1))) or b""
    rest = data.draw(st.one_of(st.binary(max_size=6), st.text(max_size=5).map(str.encode), st.just(b" item.name")))
    token = pair.follow(last, rest)
    assert token == -1 or rest.startswith(pair.target.word(token) or b"?")


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_draft_tokens_lead_to_a_target_token_that_begins_them_or_is_the_same_special_token(
    target: str, draft: str
) -> None:
    pair = translation(target, draft)
    special = {index: name for name, index in pair.draft.special.items()}
    for index, first in enumerate(pair.first):
        word, began = pair.draft.words[index], pair.target.words[first] if first >= 0 else None
        assert (
            first == -1 or (word and began and word.startswith(began)) or pair.target.special[special[index]] == first
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_extensions_are_the_tokens_that_spell_more(family: str) -> None:
    pair = Translation(spelling("bytes"), spelling(family))
    words = pair.draft.words
    for start in {word for word in words if word} | {b"\xff", b"\xc3", b"nowhere"}:
        expected = {i for i, word in enumerate(words) if word and word.startswith(start) and word != start}
        assert set(pair.extensions(start).tolist()) == expected
        grows = any(word and word.startswith(start) and word != start for word in pair.target.words)
        assert pair.grows(start) == grows


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_model_gives_a_distribution_over_target_tokens(
    target: str, draft: str, seed: int, data: st.DataObject
) -> None:
    """Whatever the draft model says: no id without text (or twin), no NaN, no exception."""
    pair = translation(target, draft)
    chance = np.random.default_rng(seed)
    logs = np.log(chance.dirichlet(np.full(pair.draft.size, 0.05), size=9) + 1e-30).astype(np.float32)
    tokens = data.draw(st.lists(st.integers(0, pair.draft.size - 1), max_size=3))
    last = pair.target.word(data.draw(st.integers(0, pair.target.size - 1))) or b""
    place = Continuations(pair, last, Ending(tuple(tokens), tuple(range(len(tokens) + 1))))
    place.begin(logs)
    before = np.logaddexp.reduce(place.log_q().astype(np.float64))
    place.grow(logs, [4 + row for row, _ in enumerate(place.unfinished())])
    row = place.log_q()
    assert row.shape == (pair.target.size,)
    assert not np.isnan(row).any() and not np.isposinf(row).any()
    named = np.flatnonzero(np.isfinite(row))
    assert all(pair.target.words[token] or token in pair.first for token in named)
    assert np.logaddexp.reduce(row.astype(np.float64)) <= before + 5.0


def certain(pair: Translation, *following: dict[bytes, float]) -> np.ndarray:
    """Rows of log q that give the draft tokens of these texts these probabilities."""
    rows = np.full((len(following), pair.draft.size), -30.0, dtype=np.float32)
    for row, wanted in zip(rows, following, strict=True):
        for text, probability in wanted.items():
            (token,) = pair.draft.encode(text)
            row[token] = math.log(probability)
    return rows


def likeliest(place: Continuations, pair: Translation) -> bytes | None:
    return pair.target.word(int(place.log_q().argmax()))


@cache
def hand_made() -> Translation:
    """Target: `:`, line break with indentation, `print`. Drafter: `:` with its line break, indentation, `pri`, `nt`."""

    def tokenizer(merges: list[tuple[str, str]], pattern: str) -> Tokenizer:
        vocabulary = {sign: index for index, sign in enumerate(sorted(ALPHABET))}
        for left, right in merges:
            vocabulary.setdefault(left + right, len(vocabulary))
        made = Tokenizer(models.BPE(vocabulary, merges))
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        made.decoder = decoders.ByteLevel()
        return made

    line, blank = "Ċ", "Ġ"
    word = [("p", "r"), ("pr", "i"), ("n", "t")]
    target = tokenizer([*word, ("pri", "nt"), (line, blank), (line + blank, blank)], r"[a-z]+|:|\s+")
    draft = tokenizer([*word, (":", line), (blank, blank)], r"[a-z]+|:\n*|\s+")
    return Translation(Spelling(target), Spelling(draft))


def test_a_token_that_spans_the_end_of_the_text_is_taken_back() -> None:
    """After `:` the drafter, for whom `:` and a line break are one token, expects no line break any more."""
    pair = hand_made()
    (colon,) = pair.draft.encode(b":")
    logs = certain(pair, {b":\n": 0.9, b":": 0.1}, {b"p": 0.9})
    misled = Continuations(pair, b":", Ending((), (1,)))
    misled.begin(logs)
    assert likeliest(misled, pair) == b"p"
    healed = Continuations(pair, b":", Ending((colon,), (0, 1)))
    healed.begin(logs)
    assert likeliest(healed, pair) == b"\n"
    q = np.exp(healed.log_q().astype(np.float64))
    assert q[pair.target.encode(b"\n")[0]] / q.sum() == pytest.approx(0.9 / 0.99, rel=1e-4)


def test_the_beginning_of_a_target_token_is_drafted_on() -> None:
    pair = hand_made()
    logs = certain(pair, {b"pri": 0.8, b"x": 0.2}, {b"nt": 0.75, b"x": 0.25})
    place = Continuations(pair, b":", Ending((), (0,)))
    place.begin(logs)
    assert likeliest(place, pair) == b"pri"
    (string,) = place.unfinished()
    assert (string.data, string.row) == (b"pri", 0)
    place.grow(logs, [1])
    assert likeliest(place, pair) == b"print"
    q = np.exp(place.log_q().astype(np.float64))
    assert q[pair.target.encode(b"print")[0]] / q.sum() == pytest.approx(0.6, rel=1e-4)


def test_tokens_that_would_have_merged_with_the_last_one_are_no_continuation() -> None:
    """The target said `pri`, so it does not go on with `nt`: it would have said `print`."""
    pair = hand_made()
    place = Continuations(pair, b"pri", Ending((), (0,)))
    place.begin(certain(pair, {b"nt": 0.9, b":": 0.1}))
    assert likeliest(place, pair) == b":"
