from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from slipstream.errors import FailedPrecondition, NotFound
from slipstream.tokenizer.vocabulary import as_ids, common_prefix, eos_token_ids, fingerprint, is_local, load_tokenizer

TOKENS = st.lists(st.integers(0, 1), max_size=8)


def tokenizer(words: list[str], added: list[str] | None = None) -> Tokenizer:
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    built.add_special_tokens([AddedToken(token) for token in added or []])
    return built


def test_the_fingerprint_depends_on_ids_and_tokens_only() -> None:
    base = fingerprint(tokenizer(["a", "b", "c"]))
    assert base == fingerprint(tokenizer(["a", "b", "c"])) and len(base) == 64
    assert base == fingerprint(tokenizer(["a", "b"], ["c"]))
    different = [["a", "c", "b"], ["a", "b"], ["a", "b", "c", "d"], ["a", "b", "C"]]
    assert len({base, *(fingerprint(tokenizer(words)) for words in different)}) == 5


def test_tokens_cannot_be_joined_into_the_same_fingerprint() -> None:
    assert fingerprint(tokenizer(["a", 'b", 2, "c'])) != fingerprint(tokenizer(["a", "b", "c"]))


def test_a_saved_tokenizer_keeps_its_fingerprint(tmp_path: Path) -> None:
    built = tokenizer(["a", "é", "\u0120the"], ["<eos>"])
    built.save(str(tmp_path / "tokenizer.json"))
    assert fingerprint(load_tokenizer(str(tmp_path))) == fingerprint(built)


def test_a_text_is_neither_truncated_nor_padded(tmp_path: Path) -> None:
    built = tokenizer(["a", "b"])
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.enable_truncation(2)
    built.enable_padding(length=4)
    built.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert [loaded.encode(text).ids for text in ("b a b", "b")] == [[1, 0, 1], [1]]


def test_missing_and_broken_files_are_typed(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder"):
        load_tokenizer("/no/such/folder")
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(NotFound, match=r"config\.json"):
        eos_token_ids(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FailedPrecondition):
        load_tokenizer(str(tmp_path))
    for content in ("not json", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(FailedPrecondition):
            eos_token_ids(str(tmp_path))


def test_generation_config_goes_before_config(tmp_path: Path) -> None:
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_text(json.dumps({"text_config": {"eos_token_id": 1}}))
    assert eos_token_ids(str(tmp_path)) == (1,)
    config.write_text(json.dumps({"eos_token_id": 2}))
    assert eos_token_ids(str(tmp_path)) == (2,)
    generation.write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert eos_token_ids(str(tmp_path)) == (3, 4)
    generation.write_text("{}")
    config.write_text("{}")
    assert eos_token_ids(str(tmp_path)) == ()


def test_names_of_local_folders_are_recognised() -> None:
    assert is_local("/models/x") and is_local("./x") and is_local("models/tiny/x")
    assert not is_local("owner/name") and not is_local("gpt2")
    assert as_ids(None) == () and as_ids(0) == (0,) and as_ids([1, 2]) == (1, 2)


@given(TOKENS, TOKENS, TOKENS)
def test_two_texts_share_what_they_begin_with_alike(same: list[int], one: list[int], other: list[int]) -> None:
    some, others = same + one, same + other
    length = common_prefix(some, others)
    assert some[:length] == others[:length]
    assert length in (len(some), len(others)) or some[length] != others[length]
