"""The padded plan against the library's own plain forward pass, family by family (fp32)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex_module

from slipstream.engine import torch_engine as packed_module
from slipstream.engine.attention.reads import inside_mask
from slipstream.engine.cuda_graphs.flex import FlexKernel, Kernel
from slipstream.engine.cuda_graphs.graphs import Acceleration
from slipstream.engine.cuda_graphs.inputs import Bucket, Buckets, Inputs, Pool, walk
from slipstream.engine.cuda_graphs.paged import PagedPlan
from slipstream.engine.engine import begin_unshared
from slipstream.engine.models.checkpoint import Checkpoint
from slipstream.engine.segment import Segment, Sequence
from slipstream.engine.torch_engine import TorchEngine
from tests.checkpoints import FAMILIES, WINDOW
from tests.packed import (
    TOLERANCE,
    TREE,
    Session,
    check_deep_tree,
    check_greedy_text,
    check_mixed_steps,
    fragmented,
    prefill,
    prompt,
    worst,
)
from tests.tape import listed_attention

WIDTH = 4
"""So narrow that prompts and trees of these tests take several chunks."""


def paged(kernel: Kernel) -> Callable[[Checkpoint], TorchEngine]:
    acceleration = Acceleration(kernel, None, Buckets(WIDTH, most_tokens=64))
    return lambda checkpoint: TorchEngine(checkpoint, tokens=1024, block_size=8, acceleration=acceleration)


LISTED = paged(listed_attention)
FLEX = paged(FlexKernel(compiled=False))


@pytest.fixture(autouse=True)
def only_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the step took the ordinary way")

    monkeypatch.setattr(packed_module, "AttentionPlan", refuse)


@fragmented
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_step_equals_plain_forward_passes(family: str, pairs: Any, opened: Any) -> None:
    check_mixed_steps(pairs(family, engine=LISTED), opened)


@fragmented
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma4", "gpt_oss"])
def test_flex_attention_computes_the_same(
    family: str, pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The operator's definition, without the seconds that it takes to wrap it for a compiler which does nothing.
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    check_mixed_steps(pairs(family, engine=FLEX), opened)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a compiler runs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_the_compiled_kernel_computes_the_same(family: str, pairs: Any) -> None:
    """PyTorch's kernel for CPUs, which reads the lists of blocks. It does not give the sums that sinks need. It wants
    as many columns in a list as the pool has blocks, so the pool is smaller than the model's length."""
    acceleration = Acceleration(FlexKernel(), None, Buckets(WIDTH, most_tokens=64))
    pair = pairs(family, engine=lambda checkpoint: TorchEngine(checkpoint, 64, 8, acceleration))
    session = Session(begin_unshared(pair.engine, 64), prompt(WINDOW + 2, 3))
    prefill(pair, session)
    session.segment(parents=TREE)
    assert worst(pair, [session]) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_text_equals_generate(family: str, pairs: Any) -> None:
    check_greedy_text(pairs(family, engine=LISTED))


def test_shared_blocks_are_read_by_all_who_share_them(pairs: Any) -> None:
    pair = pairs("mistral", engine=LISTED)
    text = prompt(20, 3)
    sessions = []
    for last in (7, 8):
        tokens = [*text, last]
        sequence = pair.engine.begin(tokens, "")
        pair.engine.grow(sequence, len(tokens) + len(TREE))
        sessions.append(Session(sequence, tokens, written=sequence.length))
        prefill(pair, sessions[-1])
    assert sessions[1].sequence.blocks[:2] == sessions[0].sequence.blocks[:2]
    for session in sessions:
        session.segment(parents=TREE)
    assert worst(pair, sessions) < TOLERANCE
    for session in sessions:
        session.keep(pair, [0])
        pair.engine.grow(session.sequence, 20)  # into blocks that it had not
        session.tokens += prompt(19, 6)
        session.segment()
    assert worst(pair, sessions) < TOLERANCE
    for session in sessions:
        pair.engine.close(session.sequence)


@fragmented
def test_nobody_sees_rows_behind_the_last_token_of_a_full_step(pairs: Any, opened: Any) -> None:
    pair = pairs("llama", engine=LISTED)
    first, last = opened(pair, [13, 64 - 1 - len(TREE)])
    prefill(pair, first)
    for session in (first, last):
        session.segment(parents=TREE if session is first else [])
    assert first.step.tokens + last.step.tokens == 64
    assert worst(pair, [first, last]) < TOLERANCE


@fragmented
def test_windows_are_of_positions_in_deep_trees_too(pairs: Any, opened: Any) -> None:
    check_deep_tree(pairs("mistral", engine=LISTED), opened)


@fragmented
@pytest.mark.parametrize("kernel", [LISTED, FLEX], ids=["listed", "flex"])
def test_broken_numbers_in_a_block_harm_nobody_who_gets_it_later(
    kernel: Any, pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    pair = pairs("llama", engine=kernel)
    rows = torch.arange(1024)
    for poison, layer in itertools.product([torch.inf, torch.nan], range(3)):
        broken = torch.full((1, 2, len(rows), 16), poison)
        pair.engine._store.write(layer, rows, broken, broken)
    (session,) = opened(pair, [13])
    prefill(pair, session)
    session.segment(parents=TREE)
    assert worst(pair, [session]) < TOLERANCE


@fragmented
def test_a_session_whose_own_keys_are_broken_shows_it(pairs: Any, opened: Any) -> None:
    pair = pairs("llama", engine=LISTED)
    broken, healthy = opened(pair, [13, 14])
    for session in (broken, healthy):
        prefill(pair, session)
    keys, _ = pair.engine._store.read(1)
    keys[:, :, broken.sequence.first_row + 3] = torch.nan
    logits = pair.engine.forward([broken.segment(), healthy.segment()]).logits
    assert logits[0].isnan().all() and logits[1].isfinite().all()


@fragmented
@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_a_forgotten_window_would_change_the_text(
    family: str, pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs(family, engine=LISTED)
    (session,) = opened(pair, [2 * WINDOW])
    prefill(pair, session)
    real = PagedPlan._mask
    monkeypatch.setattr(PagedPlan, "_mask", lambda self, window, group: real(self, None, group))
    session.segment(parents=[-1])
    assert worst(pair, [session]) > 0.1


@given(st.data())
def test_the_walk_knows_every_ancestor(data: st.DataObject) -> None:
    pending, nodes = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 14))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]
    segment = Segment(Sequence([0], 64), [1] * pending, [1] * nodes, parents)
    enter, leave = walk(segment)
    sees = (enter[None, :] <= enter[:, None]) & (enter[:, None] < leave[None, :])
    assert np.array_equal(sees, inside_mask(segment).numpy() == 0.0)


def table(count: int, *, first: int) -> Sequence:
    """A sequence whose blocks lie backwards in the pool."""
    return Sequence(list(range(first + count - 1, first - 1, -1)), 8)


@pytest.mark.parametrize("window", [None, 12, 30])
def test_a_chunk_reads_the_blocks_that_it_sees_and_no_others(window: int | None) -> None:
    pool = Pool(blocks=40, block_size=8, longest=12, max_length=512)
    inputs = Inputs(32, WIDTH, pool, torch.device("cpu"))
    segments = [Segment(table(7, first=3), [1] * 5, [1] * 6, [-1, 0, 1, 2, 3, -1]), Segment(table(3, first=20), [1])]
    segments[0].sequence.length, segments[1].sequence.length = 43, 16
    inputs.fill(segments)
    plan = PagedPlan(inputs, Bucket(16, 8), None, listed_attention)  # type: ignore[arg-type]
    mask = plan._mask(window, 1)
    b, m, n = torch.arange(8), torch.arange(WIDTH), torch.arange(pool.rows)
    seen = mask.mask_mod(b.view(-1, 1, 1), b[:1], m.view(-1, 1), n)
    real = torch.tensor([[place < count for place in range(WIDTH)] for count in (4, 4, 3, 1, 0, 0, 0, 0)])
    needed = (seen & real.unsqueeze(2)).any(dim=1).view(8, -1, pool.block_size).any(dim=2)
    for chunk in range(8):
        count = int(mask.kv_num_blocks[chunk, 0, 0])
        assert mask.kv_indices[chunk, 0, 0, :count].sort().values.tolist() == needed[chunk].nonzero().flatten().tolist()
    assert not needed[4:].any() and needed[:4].any(dim=1).all()
