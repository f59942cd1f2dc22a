"""Packed steps against the library's own plain forward pass, family by family (fp32)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.engine.attention import plan as plan_module
from slipstream.engine.attention.batched import Part, SegmentBatch, batch
from slipstream.engine.kvcache.store import KVStore
from tests.support.checkpoints import ALL, WINDOW
from tests.support.packed_passes import (
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


@pytest.mark.parametrize("family", ALL)
def test_a_mixed_step_equals_plain_forward_passes(family: str, pairs: Any, opened: Any) -> None:
    check_mixed_steps(pairs(family), opened)


@pytest.mark.parametrize("family", ALL)
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
    monkeypatch.setattr(pair.engine.kv, "_copy_rows", lambda moves: None)
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
    monkeypatch.setattr(KVStore, "attention", lambda self, layer, sinks: None)
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


@pytest.fixture
def batches(no_kernel: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the calls that segments share, as on a GPU."""
    sizes: list[int] = []
    real = SegmentBatch.attend

    def attend(self: SegmentBatch, *arguments: Any) -> torch.Tensor:
        sizes.append(self.size)
        return real(self, *arguments)

    monkeypatch.setattr(SegmentBatch, "attend", attend)
    monkeypatch.setattr(plan_module, "calls_are_dear", lambda device: True)
    return sizes


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
def test_a_mixed_step_in_shared_calls_equals_plain_forward_passes(
    family: str, pairs: Any, opened: Any, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs(family)
    monkeypatch.setattr(pair.engine, "batch_invariant", False)
    check_mixed_steps(pair, opened)
    assert max(batches) > 1


def test_padded_entries_read_rows_that_were_written() -> None:
    """Others may hold no numbers, and a hidden NaN is one."""
    inside = torch.zeros(1, 1)
    parts = [
        Part(at, [0], 0, torch.arange(first, first + count), 0, inside) for at, first, count in ((0, 7, 3), (1, 40, 20))
    ]
    keys = batch(parts, 1, None, torch.float32, torch.device("cpu")).keys.view(2, -1)
    assert keys.shape[1] == 32 and keys[0].tolist() == [7, 8, 9] + 29 * [7]
    assert keys[1].tolist() == [*range(40, 60)] + 12 * [40]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_hold_in_shared_calls(
    family: str, pairs: Any, opened: Any, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of deep trees, whose nodes stand in slots beyond their depth, and of rows that were computed before."""
    pair = pairs(family)
    monkeypatch.setattr(pair.engine, "batch_invariant", False)
    first, second, third = sessions = opened(pair, [WINDOW + 1, WINDOW + 2, 2 * WINDOW])
    for session in sessions:
        prefill(pair, session)
    first.segment(parents=[-1] * 10 + list(range(9, 11 + WINDOW)))
    second.segment(parents=[-1, 0, 1, 2])
    third.segment(parents=[-1, -1, 0])
    batches.clear()
    assert worst(pair, sessions) < TOLERANCE
    assert max(batches) > 1
    whole = pair.engine.forward([session.step for session in sessions]).logits
    nodes = [session.step.tokens for session in sessions]
    held = [replace(session.step, held=2, wanted=[2]) for session in sessions]
    again = pair.engine.forward(held).logits
    expected = whole[[3, nodes[0] + 3, nodes[0] + nodes[1] + 3]]
    assert torch.allclose(again, expected, atol=1e-5)


@pytest.mark.parametrize("wrong", ["tree", "window", "order"])
def test_wrong_masks_or_row_positions_in_shared_calls_change_the_logits(
    wrong: str, pairs: Any, opened: Any, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs("mistral")
    monkeypatch.setattr(pair.engine, "batch_invariant", False)
    sessions = opened(pair, [2 * WINDOW, 2 * WINDOW - 3])
    for session in sessions:
        prefill(pair, session)
    for session, parents in zip(sessions, ([-1], [-1, 0]), strict=True):
        session.segment(parents=parents)
    if wrong == "tree":
        everything = lambda segment: torch.zeros(segment.tokens, segment.tokens)  # noqa: E731
        monkeypatch.setattr(plan_module, "inside_mask", everything)
    elif wrong == "window":
        once = plan_module.batch
        endless = lambda parts, group, window, *given: once(parts, group, None, *given)  # noqa: E731
        monkeypatch.setattr(plan_module, "batch", endless)
        part = plan_module.AttentionPlan._part
        monkeypatch.setattr(plan_module.AttentionPlan, "_part", lambda self, at, window: part(self, at, None))
    else:
        monkeypatch.setattr(plan_module, "order_of", lambda parts, groups, group: torch.arange(5 * group))
    assert worst(pair, sessions) > 0.1


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_ignoring_the_attention_window_changes_the_logits(
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
def test_bf16_rows_do_not_depend_on_other_sessions_of_the_step(family: str, pairs: Any, opened: Any) -> None:
    pair = pairs(family, "bfloat16")
    sessions = opened(pair, [20, 9, 14, 17])
    for session in sessions:
        pair.engine.forward([session.segment()])
        session.keep(pair, [])
    shapes = [[], [-1, 0, 1], TREE, [-1, -1, 0]]
    steps = [session.segment(parents=parents) for session, parents in zip(sessions, shapes, strict=True)]
    alone = torch.cat([pair.engine.forward([step]).logits for step in steps])
    assert torch.equal(pair.engine.forward(steps).logits, alone)
