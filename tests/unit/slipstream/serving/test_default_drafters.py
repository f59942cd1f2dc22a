"""The drafters of a server for which none are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from slipstream.serving.default_drafters import DEFAULT_DRAFTERS, LOOKUP_ALONE, PROCESSES_ALONE, default_drafters
from slipstream.tokenizer import vocabulary


def tokenizer_in(folder: Path, *words: str) -> str:
    folder.mkdir()
    tokens = {word: number for number, word in enumerate(words)}
    Tokenizer(models.WordLevel(tokens, unk_token=words[0])).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer_in(tmp_path / "draft", "one", "two")
    monkeypatch.setattr(vocabulary, "SHIPPED", tmp_path)
    return tmp_path


def test_the_shipped_target_has_a_draft_model_and_a_lookup() -> None:
    assert default_drafters("", "", None) == DEFAULT_DRAFTERS
    assert default_drafters("", "", False) == PROCESSES_ALONE


def test_a_draft_model_that_is_named_is_used_whatever_the_target_is() -> None:
    assert default_drafters("nowhere", "draft", None) == DEFAULT_DRAFTERS


def test_a_target_with_another_vocabulary_has_a_lookup_alone(shipped: Path, tmp_path: Path) -> None:
    other = tokenizer_in(tmp_path / "other", "one", "three")
    assert default_drafters(other, "", None) == LOOKUP_ALONE
    assert default_drafters(other, "", False) == LOOKUP_ALONE


def test_a_target_has_the_shipped_draft_model_with_its_vocabulary(shipped: Path, tmp_path: Path) -> None:
    same = tokenizer_in(tmp_path / "same", "one", "two")
    assert default_drafters(same, "", None) == (f"model={shipped / 'draft'}", "suffix")
    fits = tokenizer_in(tmp_path / "other-draft", "one", "three")
    assert default_drafters(tokenizer_in(tmp_path / "other", "one", "three"), "", False) == (f"model={fits}",)


def test_a_target_without_a_tokenizer_has_a_lookup_alone(shipped: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "draft")
    assert default_drafters(str(tmp_path), "", None) == LOOKUP_ALONE
