"""`auto` follows what the CPU is: the same choice at every start, and why it was made is in the log."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch

from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.models import fast_dtype as module
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.fast_dtype import choose_dtype, dtype_on
from slipstream.proposers.base import ProposerSettings
from slipstream.proposers.model_factory import open_proposer

DRAFT = str(Path(__file__).parents[4] / "models" / "draft")
FLOAT, HALF, OTHER = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("own", "kernels", "native", "expected"),
    [
        (HALF, True, True, HALF),
        (HALF, True, False, HALF),
        (HALF, False, True, HALF),
        (HALF, False, False, FLOAT),
        *((OTHER, *cpu, FLOAT) for cpu in itertools.product((True, False), repeat=2)),
        *((FLOAT, *cpu, FLOAT) for cpu in itertools.product((True, False), repeat=2)),
    ],
)
def test_a_half_type_stays_where_kernels_or_instructions_multiply_it(
    own: torch.dtype, kernels: bool, native: bool, expected: torch.dtype
) -> None:
    assert choose_dtype(own, kernels=kernels, native=native).dtype is expected


def test_the_log_names_the_type_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("slipstream.engine.models.checkpoint.find_kernels", lambda: None)
    monkeypatch.setattr(module, "native_bfloat16", lambda: False)
    assert load_checkpoint(DRAFT).info.dtype == "float32"
    assert load_checkpoint(DRAFT, "bfloat16").info.dtype == "bfloat16"
    assert [record.getMessage() for record in caplog.records if "computed in" in record.getMessage()] == [
        f"{DRAFT} is computed in float32: this CPU would emulate bfloat16; it takes twice the memory"
    ]


@pytest.mark.skipif(find_kernels() is None, reason="without compiled kernels")
def test_a_checkpoint_in_bfloat16_stays_so_where_kernels_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native_bfloat16", lambda: False)
    assert {load_checkpoint(DRAFT).info.dtype for _ in range(3)} == {"bfloat16"}
    assert load_checkpoint(DRAFT, lean=False).info.dtype == "float32"


@pytest.mark.skipif(find_kernels() is None, reason="without compiled kernels")
def test_a_type_chosen_for_kernels_is_chosen_again_where_they_do_not_fit_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "native_bfloat16", lambda: False)
    monkeypatch.setattr("slipstream.engine.models.checkpoint.fits", lambda model: False)
    loaded = load_checkpoint(DRAFT)
    assert (loaded.info.dtype, loaded.forward_path) == ("float32", "library")


def test_a_head_uses_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for native, expected in ((True, HALF), (False, FLOAT)):
        monkeypatch.setattr(module, "native_bfloat16", lambda native=native: native)
        assert dtype_on(cpu, HALF) is expected
    assert dtype_on(torch.device("cuda"), HALF) is HALF


def test_no_clock_is_read() -> None:
    """A type that a timing chose made two starts on one machine differ."""
    assert not hasattr(module, "time")


def test_a_draft_model_does_without_batch_invariant_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.attention.plan.AttentionPlan._attend_invariant", None)
    # The trial before it plays in both ways.
    monkeypatch.setattr("slipstream.engine.models.forward_trial.report_of", lambda question: "passed before")
    monkeypatch.setattr("slipstream.engine.kvcache.store.paged_attention", lambda *_, **__: None)
    assert open_proposer(ProposerSettings(model=DRAFT, dtype="float32")).model.dtype == "float32"
