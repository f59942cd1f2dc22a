"""`auto` computes in float32 where this CPU emulates the checkpoint's own type, and says so once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.engine.models import fast_dtype as module
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.fast_dtype import fast_dtype
from slipstream.proposers.base import ProposerSettings
from slipstream.proposers.model_factory import open_proposer

DRAFT = str(Path(__file__).parents[4] / "models" / "draft")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    fast_dtype.cache_clear()
    yield
    fast_dtype.cache_clear()


def slower(monkeypatch: pytest.MonkeyPatch, kind: torch.dtype) -> None:
    monkeypatch.setattr(module, "_least_seconds", lambda dtypes: {each: 1.0 + (each is kind) for each in dtypes})


def test_an_emulated_type_gives_way_to_float32_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slower(monkeypatch, torch.bfloat16)
    assert load_checkpoint(DRAFT).info.dtype == load_checkpoint(DRAFT).info.dtype == "float32"
    assert load_checkpoint(DRAFT, "bfloat16").info.dtype == "bfloat16"
    assert sum("emulates bfloat16" in record.message for record in caplog.records) == 1


def test_a_type_that_is_fast_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    slower(monkeypatch, torch.float32)
    assert load_checkpoint(DRAFT).info.dtype == "bfloat16"
    assert fast_dtype(torch.float32) is torch.float32


def test_products_are_timed_in_each_type() -> None:
    found = module._least_seconds((torch.bfloat16, torch.float32))
    assert all(0.0 < seconds < 60.0 for seconds in found.values()) and len(found) == 2


def test_a_draft_model_does_without_batch_invariant_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.attention.plan.AttentionPlan._attend_invariant", None)
    monkeypatch.setattr("slipstream.engine.kvcache.store.paged_attention", lambda *_: None)
    assert open_proposer(ProposerSettings(model=DRAFT, dtype="float32")).model.dtype == "float32"
