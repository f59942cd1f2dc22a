"""Incremental detokenization: never half a character, and joined exactly what decoding at once gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.text.detokenizer import TokenDecoder

WORDS = ("▁", "▁a", "b", "▁▁", "é", "▁日", "�", "<eos>", "", " x", "##c", "do", "'", "n't", ".")


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = ["Ġthe", "Ã©", "ðŁĺ", "ĠðŁ"]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate([*alphabet, *extra])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("日本"), AddedToken("Ġplain")])
    return tokenizer


def sentence_piece(decoder: decoders.Decoder | None, *, with_bytes: bool = True) -> Tokenizer:
    words = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256) if with_bytes)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


TOKENIZERS = {
    "byte-level": byte_level(),
    "llama": sentence_piece(llama_decoder()),
    "gemma": sentence_piece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
    "metaspace": sentence_piece(decoders.Metaspace()),
    "word-piece": sentence_piece(decoders.WordPiece(), with_bytes=False),
    "word-level": sentence_piece(None, with_bytes=False),
    "bpe-suffix": sentence_piece(decoders.BPEDecoder(), with_bytes=False),
}
DECODINGS = {name: TokenDecoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def check(name: str, ids: list[int]) -> list[str]:
    tokenizer, detokenizer = TOKENIZERS[name], DECODINGS[name].detokenizer()
    pieces = [detokenizer.push(token) for token in ids]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    return pieces


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(data=st.data())
def test_pieces_of_arbitrary_ids_join_to_the_whole_text(name: str, data: st.DataObject) -> None:
    size = TOKENIZERS[name].get_vocab_size(with_added_tokens=True)
    check(name, data.draw(st.lists(st.integers(0, size + 3), max_size=24)))


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"byte-level"}))
@given(data=st.data())
def test_behind_a_prompt_the_text_is_what_the_whole_has_behind_the_prompts(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True) + 4)
    whole = [token for token in ids if not (tokenizer.id_to_token(token) or "").startswith("<0x")]
    before = data.draw(st.lists(st.sampled_from(whole), max_size=12))  # bytes would go on in the output
    output = data.draw(st.lists(st.sampled_from(ids), max_size=12))
    detokenizer = DECODINGS[name].detokenizer(before)
    text = "".join(map(detokenizer.push, output)) + detokenizer.flush()
    told = tokenizer.decode(before, skip_special_tokens=True)
    assert told + text == tokenizer.decode(before + output, skip_special_tokens=True)


def test_a_prompt_of_many_special_tokens_and_blanks_is_no_beginning_of_a_text() -> None:
    blank, end, word = (TOKENIZERS["llama"].token_to_id(word) for word in ("▁", "<eos>", "▁a"))
    for before in ([end] * 100_000, [end, blank] * 3, [blank] * 100_000):
        detokenizer = DECODINGS["llama"].detokenizer(before)
        told = TOKENIZERS["llama"].decode(before, skip_special_tokens=True)
        whole = TOKENIZERS["llama"].decode([*before, word], skip_special_tokens=True)
        assert told + detokenizer.push(word) == whole


@given(text=st.text(max_size=40))
def test_arbitrary_unicode_survives_and_is_never_cut_inside_a_character(text: str) -> None:
    text = text.replace("�", "")
    pieces = check("byte-level", TOKENIZERS["byte-level"].encode(text).ids)
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="�"), max_size=12))
def test_byte_fallback_shows_no_half_character(text: str) -> None:
    ids = [TOKENIZERS["llama"].token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert not any("�" in piece for piece in check("llama", [*ids, TOKENIZERS["llama"].token_to_id("b")]))


def test_text_streams_token_by_token_where_the_decoder_allows() -> None:
    ids = [TOKENIZERS["llama"].token_to_id(word) for word in ("▁a", "b", "▁a")]
    assert check("llama", ids) == ["a", "b", " a", ""]
    ids = TOKENIZERS["byte-level"].encode("aé!").ids
    assert check("byte-level", ids) == ["a", "", "é", "!", ""]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(data=st.data())
def test_the_token_that_ends_a_text_is_left_out_of_it(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=12, unique=True))
    ends = data.draw(st.sets(st.integers(0, tokenizer.get_vocab_size() + 3).filter(lambda end: end not in ids)))
    detokenizer = DECODINGS[name].detokenizer(left_out=ends)
    text = "".join(map(detokenizer.push, [*ids, *sorted(ends)[:1]])) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma", "metaspace"])
@given(st.data())
def test_special_tokens_are_written_where_they_are_asked_for(name: str, data: st.DataObject) -> None:
    """Space aside, which decoders strip at the beginning of a text: it begins anew behind a special token."""
    tokenizer, decoder = TOKENIZERS[name], DECODINGS[name]
    end = tokenizer.token_to_id("<eos>")
    ids = data.draw(st.lists(st.just(end) | st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    detokenizer = decoder.detokenizer(shown=[end, 0])
    text = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    runs, run = list[str](), list[int]()
    for token in [*ids, end]:
        if token == end:
            runs.append(tokenizer.decode(run))
            run = []
        else:
            run.append(token)
    assert text.replace(" ", "") == "<eos>".join(runs).replace(" ", "")


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"byte-level"}))
@given(data=st.data())
def test_behind_a_prompt_special_tokens_stand_in_the_text_that_it_has_without_them(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    end = tokenizer.token_to_id("<eos>")
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    whole = [token for token in ids if not (tokenizer.id_to_token(token) or "").startswith("<0x")]
    before = data.draw(st.lists(st.sampled_from(whole), max_size=6))
    output = data.draw(st.lists(st.sampled_from([*whole, *[end] * 4]), max_size=12))
    detokenizer = DECODINGS[name].detokenizer(before, [end])
    text = "".join(map(detokenizer.push, output)) + detokenizer.flush()
    told = tokenizer.decode(before, skip_special_tokens=True)
    assert text.count("<eos>") == output.count(end)
    assert told + text.replace("<eos>", "") == tokenizer.decode(before + output, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma", "metaspace"])
@given(st.data())
def test_with_all_special_tokens_a_text_is_what_decoding_them_too_gives(name: str, data: st.DataObject) -> None:
    tokenizer, decoder = TOKENIZERS[name], DECODINGS[name]
    end = tokenizer.token_to_id("<eos>")
    ids = data.draw(st.lists(st.just(end) | st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    detokenizer = decoder.detokenizer(shown=decoder.special_tokens, as_text=True)
    text = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


def test_marks_are_control_tokens_by_the_rule_of_grammars() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("[ARGS]")])
    decoder = TokenDecoder(tokenizer)
    ids = {mark: tokenizer.token_to_id(mark) for mark in ("<eos>", "<think>")}
    assert {mark: decoder.control_token(mark) for mark in ("<eos>", "<think>")} == ids
    assert decoder.control_token("[ARGS]") is None and decoder.control_token("nothing") is None
    assert decoder.specials(["<eos>", "<think>", "nothing"]) == [ids["<eos>"]]
    assert decoder.ending([1, 2, *ids.values()]).endswith("<eos><think>")
