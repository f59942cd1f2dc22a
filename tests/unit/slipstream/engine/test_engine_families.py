"""Packed steps against the library's own plain forward pass, family by family (fp32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.engine.attention import plan as plan_module
from slipstream.engine.kvcache.store import KVStore
from tests.checkpoints import FAMILIES, WINDOW
from tests.packed import (
    TOLERANCE,
    TREE,
    Pair,
    Session,
    check_deep_tree,
    check_greedy_text,
    check_mixed_steps,
    prefill,
    worst,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_step_equals_plain_forward_passes(family: str, pairs: Any, opened: Any) -> None:
    check_mixed_steps(pairs(family), opened)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate(family: str, pairs: Any) -> None:
    check_greedy_text(pairs(family))


@pytest.mark.parametrize("family", ["mistral", "gemma4"])
def test_windows_are_of_positions_in_deep_trees_too(family: str, pairs: Any, opened: Any) -> None:
    check_deep_tree(pairs(family), opened)


def _tree_then_one(pair: Pair, tree: Session) -> float:
    prefill(pair, tree)
    tree.segment(parents=TREE)
    pair.engine.forward([tree.step])
    tree.keep(pair, [1, 4])
    tree.segment()
    return worst(pair, [tree])


def test_without_compaction_the_text_would_change(pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs("llama")
    good, bad = opened(pair, [20, 20])
    assert _tree_then_one(pair, good) < TOLERANCE
    monkeypatch.setattr(KVStore, "queue_moves", lambda self, moves: None)
    assert _tree_then_one(pair, bad) > 0.1


def test_a_visible_rejected_token_would_change_the_text(pairs: Any, opened: Any) -> None:
    pair = pairs("llama")
    (session,) = opened(pair, [20])
    prefill(pair, session)
    session.segment(parents=[-1])
    pair.engine.forward([session.step])
    session.keep(pair, [])
    session.sequence.length += 1
    session.segment()
    assert worst(pair, [session]) > 0.1


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by torch, as on a GPU and where nothing was compiled."""
    monkeypatch.setattr(KVStore, "attention", lambda self, layer: None)
    monkeypatch.setattr(KVStore, "attention_of_all", lambda self, layers: None)


@pytest.mark.usefixtures("no_kernel")
def test_a_causal_mask_would_change_a_tree(pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs("llama")
    (session,) = opened(pair, [20])
    prefill(pair, session)
    causal = lambda segment: torch.full((segment.tokens, segment.tokens), float("-inf")).triu_(1)  # noqa: E731
    monkeypatch.setattr(plan_module, "inside_mask", causal)
    session.segment(parents=TREE)
    assert worst(pair, [session]) > 0.1


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.usefixtures("no_kernel")
def test_a_mixed_step_without_kernels_equals_plain_forward_passes(family: str, pairs: Any, opened: Any) -> None:
    check_mixed_steps(pairs(family), opened)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_a_forgotten_window_would_change_the_text(
    family: str, pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs(family)
    (session,) = opened(pair, [2 * WINDOW])
    prefill(pair, session)
    plan = plan_module.AttentionPlan
    real = plan._read
    monkeypatch.setattr(plan, "_read", lambda self, at, kind: real(self, at, kind._replace(window=None)))
    session.segment(parents=[-1])
    assert worst(pair, [session]) > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_bf16_rows_do_not_depend_on_who_shares_the_step(family: str, pairs: Any, opened: Any) -> None:
    pair = pairs(family, "bfloat16")
    sessions = opened(pair, [20, 9, 14, 17])
    for session in sessions:
        pair.engine.forward([session.segment()])
        session.keep(pair, [])
    shapes = [[], [-1, 0, 1], TREE, [-1, -1, 0]]
    steps = [session.segment(parents=parents) for session, parents in zip(sessions, shapes, strict=True)]
    alone = torch.cat([pair.engine.forward([step]).logits for step in steps])
    assert torch.equal(pair.engine.forward(steps).logits, alone)
