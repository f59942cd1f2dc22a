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
    module._faster.cache_clear()
    yield
    module._faster.cache_clear()


def slower(monkeypatch: pytest.MonkeyPatch, kind: torch.dtype) -> None:
    def least_seconds(dtypes: tuple[torch.dtype, ...], products: int) -> dict[torch.dtype, float]:
        return {each: 1.0 + (each is kind) for each in dtypes}

    monkeypatch.setattr(module, "_least_seconds", least_seconds)


def test_an_emulated_type_gives_way_to_float32_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slower(monkeypatch, torch.bfloat16)
    assert load_checkpoint(DRAFT).info.dtype == load_checkpoint(DRAFT).info.dtype == "float32"
    assert load_checkpoint(DRAFT, "bfloat16").info.dtype == "bfloat16"
    assert sum("slower in bfloat16" in record.message for record in caplog.records) == 1


def test_a_type_that_is_fast_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    slower(monkeypatch, torch.float32)
    assert load_checkpoint(DRAFT).info.dtype == "bfloat16"
    assert fast_dtype(torch.float32) is torch.float32


def test_products_are_timed_in_each_type() -> None:
    found = module._least_seconds((torch.bfloat16, torch.float32), 2)
    assert all(0.0 < seconds < 60.0 for seconds in found.values()) and len(found) == 2


def test_as_many_weights_are_multiplied_as_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model's lie in the caches, a target's in memory, where half the bytes count."""
    product, asked = module.INPUTS * module.OUTPUTS, list[int]()

    def least_seconds(dtypes: tuple[torch.dtype, ...], products: int) -> dict[torch.dtype, float]:
        asked.append(products)
        return {dtype: 1.0 + (dtype is torch.bfloat16) * (products < 4) for dtype in dtypes}

    monkeypatch.setattr(module, "_least_seconds", least_seconds)
    sizes = [1, 3 * product, 4 * product, 70_000_000_000]
    found = [fast_dtype(torch.bfloat16, size) for size in sizes]
    assert found == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert asked == [1, 3, 4, module.MOST_PRODUCTS]
    assert fast_dtype(torch.bfloat16) is torch.bfloat16 and len(asked) == 4


def test_a_draft_model_does_without_batch_invariant_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.attention.plan.AttentionPlan._attend_invariant", None)
    monkeypatch.setattr("slipstream.engine.kvcache.store.paged_attention", lambda *_: None)
    assert open_proposer(ProposerSettings(model=DRAFT, dtype="float32")).model.dtype == "float32"
