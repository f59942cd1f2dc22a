"""A model's special tokens are those that transformers' tokenizer of its folder has, wherever its files name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.errors import FailedPrecondition
from slipstream.tokenizer.special_tokens import _CLASS_OF, _OF_CLASS, load_special_tokens
from tests.support.toy_tokenizer import toy_tokenizer

GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
AN_OBJECT = {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def write(folder: Path, config: dict[str, Any] | None, others: dict[str, Any] | None = None, family: str = "") -> str:
    toy_tokenizer(folder)
    files = {"tokenizer_config.json": config, "special_tokens_map.json": others}
    files["config.json"] = {"model_type": family} if family else None
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return str(folder)


def theirs(folder: str) -> dict[str, str]:
    return dict(AutoTokenizer.from_pretrained(folder).special_tokens_map)


@pytest.mark.parametrize(
    ("config", "others"),
    [
        (GENERIC, None),
        (GENERIC | {"bos_token": "<s>", "eos_token": {"__type": "AddedToken"} | AN_OBJECT}, None),
        (GENERIC, {"bos_token": "<s>", "eos_token": AN_OBJECT}),
        (GENERIC | {"bos_token": "<a>"}, {"bos_token": "<s>"}),
        (GENERIC | {"bos_token": None}, {"bos_token": "<s>"}),
        (GENERIC | {"bos_token": "<s>"}, {"bos_token": None}),
        (GENERIC | {"bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "<a>", "eos_token": "<b>"}),
        (GENERIC | {"boi_token": "<image>", "add_bos_token": True}, None),
        (GENERIC | {"boi_token": {"__type": "AddedToken"} | AN_OBJECT}, None),
        (GENERIC | {"extra_special_tokens": {"image_token": "<image>"}}, None),
        (GENERIC | {"extra_special_tokens": ["<a>"]}, None),
        (GENERIC, {"extra_special_tokens": {"image_token": "<image>"}, "video_token": "<video>"}),
        (None, {"bos_token": "<s>"}),
        (GENERIC | {"bos_token": ""}, None),
    ],
)
def test_special_tokens_are_found_where_transformers_finds_them(
    config: dict[str, Any] | None, others: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = write(tmp_path, config, others)
    assert load_special_tokens(folder) == theirs(folder)


@pytest.mark.parametrize("named", [{}, {"bos_token": "<s>", "eos_token": None}], ids=["none named", "some named"])
@pytest.mark.parametrize("kind", [*_OF_CLASS, "TokenizersBackend"])
def test_special_tokens_of_the_class_apply_where_the_configuration_names_none(
    kind: str, named: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path, {"tokenizer_class": f"{kind}Fast"} | named, family="llama")
    assert load_special_tokens(folder) == theirs(folder)


@pytest.mark.parametrize("given", [{}, GENERIC], ids=["no class", "any class"])
@pytest.mark.parametrize("family", [*sorted(_CLASS_OF), "llama", "mistral", "glm", "gpt_oss"])
def test_special_tokens_of_the_family_apply_where_the_configuration_names_no_class(
    family: str, given: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path, dict(given), family=family)
    assert load_special_tokens(folder) == theirs(folder)


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(FailedPrecondition, match="not a JSON object"):
        load_special_tokens(folder)
