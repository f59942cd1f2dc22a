"""Opening a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.engine import factory
from slipstream.engine.engine import Engine, ModelOutput
from slipstream.proposers import model_factory
from slipstream.proposers.base import ProposerSettings, open_proposer

DRAFT = Path(__file__).resolve().parents[4] / "models" / "draft"


@pytest.mark.parametrize("translated", [False, True])
def test_a_draft_model_has_proposed_before_it_is_ready(translated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each way of drawing, so that the first request waits for no first pass; and nothing of it stays."""
    passes: list[int] = []
    engines: list[Engine] = []

    def open_engine(*given: Any) -> Engine:
        engine = factory.open_engine(*given)
        forward = engine.forward

        def counted(segments: Any, *more: Any) -> ModelOutput:
            passes.append(len(segments))
            return forward(segments, *more)

        monkeypatch.setattr(engine, "forward", counted)
        engines.append(engine)
        return engine

    monkeypatch.setattr(model_factory, "open_engine", open_engine)
    if translated:
        monkeypatch.setattr(model_factory, "fingerprint", lambda tokenizer: "another")
    settings = ProposerSettings(model=str(DRAFT), translate_for=str(DRAFT) if translated else "")
    open_proposer("model", settings)
    (engine,) = engines
    assert len(passes) >= len(model_factory.WARM_UP)
    assert engine.kv.blocks_free == engine.kv.blocks_total
