"""Which model or heads each method of `slipstream serve --drafter` gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from slipstream.cli.serve import _model_of, _named
from slipstream.errors import InvalidArgument
from slipstream.serving.fleet import Fleet
from slipstream.tokenizer.vocabulary import shipped_model


def test_a_method_s_own_folder_goes_before_the_common_one_and_that_before_the_shipped_one() -> None:
    named = _named(["eagle=heads", "model", "ngram", "medusa"])
    assert named == {"eagle": "heads", "model": "", "ngram": "", "medusa": ""}
    models = {kind: _model_of(kind, own, "target", "draft") for kind, own in named.items()}
    assert models == {"eagle": "heads", "model": "draft", "ngram": "", "medusa": "draft"}
    assert _named(["none"]) == {}


@pytest.mark.parametrize("target", ["", shipped_model("target")])
def test_the_shipped_heads_are_the_shipped_target_s(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("target", "draft", "eagle"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("slipstream.tokenizer.vocabulary.SHIPPED", tmp_path)
    mine = str(tmp_path / "target") if target else ""
    assert _model_of("eagle", "", mine, "") == str(tmp_path / "eagle")
    assert _model_of("model", "", "another", "") == str(tmp_path / "draft")
    with pytest.raises(InvalidArgument, match="name those of another: --drafter eagle=FOLDER"):
        _model_of("eagle", "", "another", "")


@pytest.mark.parametrize(
    ("given", "told"),
    [(["eagel=x"], "no such drafter: eagel"), (["none", "ngram"], "give it alone"), (["ngram=x"], "leave =x out")],
)
def test_an_invalid_list_of_drafters_is_refused(given: list[str], told: str) -> None:
    with pytest.raises(typer.BadParameter, match=told):
        _named(given)


def test_heads_are_the_verifier_s_and_a_draft_model_has_a_process() -> None:
    fleet = Fleet("target", {"eagle": "heads", "model": "draft", "ngram": ""}, "auto", 1)
    assert fleet.verifier._settings["VERIFIER_LOCAL_DRAFTERS"] == "eagle=heads"
    assert {kind: role._settings["DRAFTER_MODEL"] for kind, role in fleet.drafters.items()} == {
        "model": "draft", "ngram": "",
    }  # fmt: skip
